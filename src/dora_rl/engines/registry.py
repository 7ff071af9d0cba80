"""The engines that a configuration can name, how each is made, and on what. Free of torch.

To add one: a name and an entry here, and a function of its package that takes `EngineOptions` and
gives an `Engine`. Nothing else in the project asks for an engine's name.
"""

from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import cast

from dora_rl.engines.base import Engine


class EngineName(StrEnum):
    """What `rollout.engine` may be."""

    EMBEDDED = "embedded"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What a configuration asks of any engine. What one cannot do, it refuses."""

    model: Path
    slots: int
    version_slots: int
    kv_budget_tokens: int | None
    kv_dtype: str
    prefill_chunk: int
    deterministic: bool


@dataclass(frozen=True, slots=True)
class _Entry:
    """One engine, as far as it is known without its libraries."""

    module: str  # with `create`
    gpu: bool  # else it is for CPUs


_ENTRIES = {EngineName.EMBEDDED: _Entry("dora_rl.engines.embedded.create", gpu=False)}


def create_engine(name: EngineName, options: EngineOptions) -> Engine:
    """The engine of this name; its libraries are imported here and not before."""
    return cast(Engine, import_module(_ENTRIES[name].module).create(options))


def device_refusal(name: EngineName, device: str) -> str | None:
    """Why `rollout.device` cannot be the device of this engine; None if it can."""
    if _ENTRIES[name].gpu or not device.startswith("cuda"):
        return None
    return (
        f"rollout.device is a GPU, and the {name} engine is for CPUs: `{device}`. Use `auto` or "
        "`cpu`; train.device is the trainer's."
    )
