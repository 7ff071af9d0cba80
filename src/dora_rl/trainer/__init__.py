"""One optimizer step on a batch of samples, the publishing of versions, and checkpoints.

`settings` and `report` can be read without torch; `trainer` is what a runtime talks to. Imports
algorithms, models and weights; knows neither engines nor runtimes.
"""
