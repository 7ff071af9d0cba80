"""The mathematics of policy optimisation: pure functions on tensors.

`settings` and `filters` are free of torch, for the command line and for whoever judges groups.
A trainer needs `algorithm` alone. Responses are flat: `_T` is one entry a response token, the
sequences one after another, and `sequence_T` says which sequence a token belongs to; `_N` is one
entry a sequence. There is no padding.
"""
