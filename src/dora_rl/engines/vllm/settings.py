"""`[rollout.vllm]`: what vLLM is told beyond what every engine is. Free of vLLM."""

from typing import Any, Literal

from pydantic import Field, field_validator

from dora_rl.config import ConfigModel

LEAST_TOKENS = 64  # of context and KV: the text of a fingerprint must fit
_LEAST_TEMPERATURE = 0.01
# Arguments of vLLM that are not for users, and who sets them instead. Those that nobody sets would
# break a promise of `engines.base`: several tokens at once, processes that outlive a worker, KV
# that is not kept apart, code of a model's directory.
_NOT_THEIRS = {
    "model": "model.path",
    "tokenizer": "model.path",
    "max_num_seqs": "rollout.slots",
    "max_num_active_seqs": "rollout.slots",
    "max_model_len": "rollout.vllm.context",
    "dtype": "rollout.vllm.dtype",
    "kv_cache_memory_bytes": "rollout.kv_budget_tokens",
    "num_gpu_blocks_override": "rollout.kv_budget_tokens",
    "block_size": "rollout.vllm.block_size",
    "tensor_parallel_size": "rollout.vllm.tensor_parallel_size",
    "gpu_memory_utilization": "rollout.vllm.gpu_memory_utilization",
    "enforce_eager": "rollout.vllm.enforce_eager",
    "long_prefill_token_threshold": "rollout.prefill_chunk",
    "data_parallel_size": None,
    "distributed_executor_backend": None,
    "enable_lora": "model.lora",
    "max_loras": "rollout.version_slots",
    "max_cpu_loras": "rollout.version_slots",
    "max_lora_rank": "model.lora.rank",
    "lora_target_modules": "model.lora.target_modules",
    "lora_dtype": "rollout.vllm.dtype",
    "default_mm_loras": None,
    "fully_sharded_loras": None,
    "enable_prefix_caching": None,
    "kv_transfer_config": None,
    "load_format": None,
    "pipeline_parallel_size": None,
    "seed": None,
    "stream_interval": None,
    "trust_remote_code": None,
    "watermark_config": None,
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
        default=None, ge=LEAST_TOKENS, description="the longest sequence; else the model's context"
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
            if name in _NOT_THEIRS:
                other = _NOT_THEIRS[name]
                instead = f"Set {other}" if other else "Leave it out"
                raise ValueError(f"vLLM's `{name}` is set by the engine: `{name}`. {instead}.")
        return arguments


def sampling_refusal(temperature: float, top_p: float, min_p: float) -> str | None:
    """What vLLM would do otherwise than asked, without saying so; None if there is nothing."""
    if 0 < temperature < _LEAST_TEMPERATURE:
        return (
            f"temperature must be 0, for greedy, or at least {_LEAST_TEMPERATURE}, which vLLM "
            f"takes for less: `{temperature}`."
        )
    if min_p > 0 and top_p < 1:
        return (
            f"min_p `{min_p}` and top_p `{top_p}` cannot go together: vLLM takes the share of "
            "top_p from what min_p leaves, and not the other way round. Use one of them."
        )
    return None
