"""One optimizer step on a batch of samples, the publishing of versions, and checkpoints.

`settings` and `report` can be read without torch; `trainer` is what a runtime talks to; `native`
has kernels for what lies between the products of a pass on a CPU. Imports algorithms, models and
weights; knows neither engines nor runtimes.
"""
