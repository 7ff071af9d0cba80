"""Engines as a configuration describes them."""

from pathlib import Path

from dora_rl.engines.base import Engine, Sampling
from dora_rl.runtime.config import RunConfig


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


def make_engine(config: RunConfig, model: Path) -> Engine:
    """An engine with room for one version more than the core may ask it to serve.

    So a new version is whole in memory before the old one goes, and a failed install changes
    nothing.
    """
    from dora_rl.engines.embedded.engine import EmbeddedEngine
    from dora_rl.engines.embedded.settings import EngineSettings

    rollout = config.rollout
    settings = EngineSettings(
        slots=rollout.slots,
        version_slots=config.settings().version_slots + 1,
        kv_budget_tokens=rollout.kv_budget_tokens,
        kv_dtype=rollout.kv_dtype,
        prefill_chunk=rollout.prefill_chunk,
        deterministic=config.deterministic,
    )
    return EmbeddedEngine.for_model(model, settings)
