"""How much memory a run needs at least, from its configuration and the model's shape alone.

Processes, activations and checkpoints come on top of it; KV counts as if every slot were full,
within what the engine takes, or as the budget that it allocates at once. Free of torch.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from dora_rl.core.protocol.errors import UserError
from dora_rl.engines.kv_room import memory_share, token_bytes
from dora_rl.engines.registry import has_own_environment, reserves_kv
from dora_rl.models.config import ModelConfig
from dora_rl.runtime.config import RunConfig
from dora_rl.runtime.control import memory
from dora_rl.trainer.settings import LoraSettings

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_TRAINED = 16  # bytes a parameter: weights, gradients and two moments of AdamW, all float32
_FROZEN = 4  # without those: the base of an adapter, an adapter in an engine
_GB = 1e9


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes by what needs them."""

    trainer: int
    versions: int
    kv: int
    num_versions: int  # in one engine, at least: one that is served, and one that comes in
    lora: bool = False  # they are adapters, and their base counts as one version

    @property
    def total(self) -> int:
        return self.trainer + self.versions + self.kv

    def __str__(self) -> str:
        trained = " of the adapter" if self.lora else ""
        versions = f"{self.num_versions} version{'s' * (self.num_versions != 1)}"
        return (
            f"{_size(self.total)}: {_size(self.trainer)} for the trainer (weights in float32, "
            f"gradients and AdamW{trained}), {_size(self.versions)} for "
            f"{'the adapters and their base' if self.lora else versions}, {_size(self.kv)} for KV"
        )


def _size(count: int) -> str:
    return f"{count / _GB:.1f} GB" if count >= _GB else f"{math.ceil(count / 1e6)} MB"


def footprint(config: RunConfig, model: ModelConfig) -> Footprint:
    """What a run of this configuration needs at least."""
    parameters = sum(math.prod(shape) for shape in model.tensors().values())
    rollout, lora = config.rollout, config.model.lora
    instances = config.runtime.instances + config.elastic_instances
    # Without a spare slot, the old version goes first.
    num_versions = min(1 + rollout.spare_version_slot, config.version_slots)
    stored = _BYTES[config.train.publish_dtype or model.dtype]
    trainer = _TRAINED * parameters
    adapters = 0
    if lora is not None:
        num_versions, stored = 1, _BYTES[model.dtype]
        size = adapter_parameters(lora, model)
        trainer = _FROZEN * parameters + _TRAINED * size
        adapters = _FROZEN * size * config.version_slots * instances
    if config.deterministic:  # a float32 copy in every engine
        versions = num_versions * 4 * parameters * instances
    elif has_own_environment(rollout.engine):  # which loads what it serves into its own memory
        versions = num_versions * stored * parameters * instances
    else:  # mapped from files, which engines share
        versions = num_versions * stored * parameters
    kv = _kv(config, model) * instances
    return Footprint(trainer, versions + adapters, kv, num_versions, lora is not None)


def _kv(config: RunConfig, model: ModelConfig) -> int:
    """Of one engine: what its slots can fill, or a budget that is allocated at once."""
    rollout, budget = config.rollout, config.rollout.kv_budget_tokens
    if budget is not None and reserves_kv(rollout.engine, rollout.device):
        dtype = rollout.engine_options.get("dtype") or model.dtype
        return budget * token_bytes(model, dtype)
    tokens = rollout.slots * min(model.context, rollout.max_tokens)
    if budget is not None:
        tokens = min(tokens, budget)
    return min(tokens * token_bytes(model, rollout.kv_dtype), memory_share())


def adapter_parameters(lora: LoraSettings, model: ModelConfig) -> int:
    """Of an adapter: a row and a column of each target for every rank."""
    return lora.rank * sum(map(sum, model.linears(lora.target_modules).values()))


def check(
    config: RunConfig, model: ModelConfig, read: Callable[[], memory.Left | None] | None = None
) -> Footprint:
    """Refuse a run that cannot fit into what the machine and its cgroups leave, as `read` tells."""
    needed = footprint(config, model)
    if read is None and memory.memory_watch().in_force:
        read = memory.left
    left = read() if read is not None and config.runtime.min_free_memory_mb else None
    if left is not None and needed.total > left.size:
        raise UserError(
            f"the run needs at least {needed}; {left}: `{config.model.path}`. Use a smaller model, "
            "lower rollout.slots, rollout.max_tokens, rollout.kv_budget_tokens or "
            "runtime.instances, or free memory "
            "(runtime.min_free_memory_mb=0: not checked)."
        )
    return needed
