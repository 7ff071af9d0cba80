"""Engines generate trajectories: the contract, a fake for tests, and the real ones.

`base` is the contract and needs no library; `fake` keeps it without a model; `embedded` runs
several versions of a Hugging Face model in this process; `vllm` is the real vLLM, in an environment
of its own. `speculation` decides which tokens are proposed to a trajectory, for whichever engine
checks them.
"""
