"""vLLM as a rollout engine: one full set of weights, stepped in the worker's own process.

settings      what `[rollout.vllm]` may say; free of vLLM
environment   which Python has vLLM, and what its process is told before it is imported
backend       every call into vLLM, and the only place that imports it
raw_logits    log-probabilities before temperature and filters, where a request asks for them
engine        the contract of `engines.base`: which request is where, what it may and how it ends
create        the engine as the registry makes it

It runs in an environment of its own (`make venv-vllm`): nothing here may need a library that only
the driver's environment has.
"""
