"""`[rollout.vllm]`: what vLLM is told beyond what every engine is. Free of vLLM."""

from typing import Any, Literal

from pydantic import Field, field_validator

from dora_rl.config import ConfigModel

# What the engine sets itself, each for a promise of `engines.base`, and who sets it instead.
_OURS = {
    "model": "model.path",
    "tokenizer": "model.path",
    "max_num_seqs": "rollout.slots",
    "max_model_len": "rollout.vllm.context",
    "dtype": "rollout.vllm.dtype",
    "kv_cache_memory_bytes": "rollout.kv_budget_tokens",
    "num_gpu_blocks_override": "rollout.kv_budget_tokens",
    "block_size": "rollout.vllm.block_size",
    "tensor_parallel_size": "rollout.vllm.tensor_parallel_size",
    "gpu_memory_utilization": "rollout.vllm.gpu_memory_utilization",
    "enforce_eager": "rollout.vllm.enforce_eager",
    "seed": "run.seed",
    "load_format": None,
    "logprobs_mode": None,
    "scheduling_policy": None,
    "async_scheduling": None,
    "skip_tokenizer_init": None,
    "logits_processors": None,
    "speculative_config": None,
    "disable_log_stats": None,
}


class VllmSettings(ConfigModel):
    """How vLLM is run; `arguments` are those of its `EngineArgs`."""

    python: str | None = Field(
        default=None,
        min_length=1,
        description="the interpreter that has vLLM; else DORA_RL_VLLM_PYTHON, or .venv-vllm",
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        default=None, description="of weights and products; else the model's own"
    )
    context: int | None = Field(
        default=None, ge=2, description="the longest sequence; else the model's context"
    )
    block_size: int = Field(
        default=32, ge=16, multiple_of=16, description="tokens of one block of KV"
    )
    enforce_eager: bool = Field(default=True, description="no graphs and no compilation")
    tensor_parallel_size: int = Field(default=1, ge=1, le=1, description="GPUs of one engine")
    gpu_memory_utilization: float = Field(
        default=0.9, gt=0, le=1, description="share of a GPU's memory, where there is one"
    )
    arguments: dict[str, Any] = Field(
        default={}, description="further arguments of vLLM's EngineArgs, by name"
    )

    @field_validator("arguments")
    @classmethod
    def _not_ours(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        for name in arguments:
            if name in _OURS:
                instead = f"Set {_OURS[name]}" if _OURS[name] else "Leave it out"
                raise ValueError(f"vLLM's `{name}` is set by the engine: `{name}`. {instead}.")
        return arguments
