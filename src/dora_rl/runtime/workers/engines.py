"""Engines as a configuration describes them."""

from pathlib import Path

from dora_rl.engines import kv_room
from dora_rl.engines.base import Engine, Sampling
from dora_rl.engines.registry import EngineOptions, create_engine
from dora_rl.models.config import ModelConfig
from dora_rl.runtime.config import RunConfig
from dora_rl.tasks.long_prompts import WhyTooLong


def sampling_of(config: RunConfig, *, evaluation: bool = False) -> Sampling:
    """How the policy is sampled in training, or in an evaluation."""
    rollout = config.rollout
    return Sampling(
        temperature=config.task.eval_temperature if evaluation else rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        min_p=rollout.min_p,
        max_tokens=rollout.max_tokens,
        stop=rollout.stop,
    )


def why_too_long(config: RunConfig, model: ModelConfig) -> WhyTooLong:
    """What an engine of this configuration says of a prompt's length, before there is one.

    KV memory counts where the configuration sets it: which prompts are left out must not depend on
    the machine. What an engine refuses for want of memory fails at once.
    """
    rollout = config.rollout

    context = min(model.context, rollout.engine_options.get("context") or model.context)
    block = rollout.engine_options.get("block_size", kv_room.BLOCK_TOKENS)

    def why(tokens: int) -> str | None:
        if tokens >= context:
            whose = "model" if context == model.context else "engine"
            return (
                f"the {whose}'s context is `{context}`, and a response must fit in after it. "
                "Shorten it"
            )
        if rollout.kv_budget_tokens is None:
            return None
        blocks = rollout.kv_budget_tokens // block
        needed = kv_room.blocks_needed(tokens, rollout.max_tokens, context, block)
        if needed <= blocks:
            return None
        return (
            f"with a response it may need the KV of {needed * block} tokens, and "
            f"`{blocks * block}` are there. Raise rollout.kv_budget_tokens, lower "
            "rollout.max_tokens"
        )

    return why


def make_engine(config: RunConfig, model: Path) -> Engine:
    """The engine that the configuration names, with room for the versions to serve, and a spare.

    With the spare one, a new version is whole in memory before the old one goes, and a failed
    install changes nothing. Without, the old one goes first.
    """
    rollout = config.rollout
    return create_engine(
        rollout.engine,
        EngineOptions(
            model=model,
            slots=rollout.slots,
            version_slots=config.version_slots,
            kv_budget_tokens=rollout.kv_budget_tokens,
            kv_dtype=rollout.kv_dtype,
            prefill_chunk=rollout.prefill_chunk,
            deterministic=config.deterministic,
            native_kernels=rollout.native_kernels,
            bf16_products=rollout.bf16_products,
            speculation=rollout.speculation,
            device=rollout.device,
            lora_rank=None if config.model.lora is None else config.model.lora.rank,
            extra=rollout.engine_options,
        ),
    )
