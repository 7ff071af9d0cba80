"""The engines that a configuration can name, how each is made, and where. Free of torch.

To add one: a name and an entry here, and a function of its package that takes `EngineOptions` and
gives an `Engine`. One that needs an environment of its own has a module that finds it. Nothing else
in the project asks for an engine's name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, cast

from dora_rl.engines.base import Engine
from dora_rl.engines.speculation import Speculation
from dora_rl.machine.gpus import may_have_gpu


class EngineName(StrEnum):
    """What `rollout.engine` may be."""

    EMBEDDED = "embedded"
    VLLM = "vllm"


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
    native_kernels: bool | None = None
    bf16_products: bool = True
    speculation: Speculation = Speculation.AUTO
    device: str = "auto"
    lora_rank: int | None = None
    """Versions are LoRA adapters of this rank, of the weights in `model`."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Of the engine's own section of the configuration, such as `[rollout.vllm]`."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """One engine, as far as it is known without its libraries."""

    module: str  # with `create`
    gpu: bool  # else it is for CPUs
    most_versions: int | None = None  # full sets of weights at once, if there is a limit
    deterministic: bool = True  # it can be bit-exact whatever the batch
    speculation: bool = True  # it proposes tokens when it is asked to
    reserves_kv: bool = False  # a KV budget is allocated as a whole when it starts
    environment: str | None = None  # the module with `find_python`, `check` and `variables`
    settings: str | None = None  # the module with `LEAST_TOKENS` and `sampling_refusal`


_ENTRIES = {
    EngineName.EMBEDDED: _Entry("dora_rl.engines.embedded.create", gpu=False),
    EngineName.VLLM: _Entry(
        "dora_rl.engines.vllm.create",
        gpu=True,
        most_versions=1,
        deterministic=False,
        speculation=False,
        reserves_kv=True,
        environment="dora_rl.engines.vllm.environment",
        settings="dora_rl.engines.vllm.settings",
    ),
}


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


def most_versions(name: EngineName, wanted: int, *, lora: bool) -> int:
    """As many versions at once as are wanted, as far as this engine holds them."""
    most = None if lora else _ENTRIES[name].most_versions
    return min(wanted, most or wanted)


def can_be_deterministic(name: EngineName) -> bool:
    return _ENTRIES[name].deterministic


def can_speculate(name: EngineName) -> bool:
    return _ENTRIES[name].speculation


def reserves_kv(name: EngineName, device: str) -> bool:
    """Whether all of a KV budget is taken from this machine's memory as soon as it starts.

    With `auto` that is so where there is no GPU, whose own memory it would be.
    """
    on_gpu = device.startswith("cuda") or (device == "auto" and may_have_gpu())
    return _ENTRIES[name].reserves_kv and not on_gpu


def has_own_environment(name: EngineName) -> bool:
    """Whether it runs in another Python than this one, and so in processes of its own."""
    return _ENTRIES[name].environment is not None


def sampling_refusal(
    name: EngineName, temperature: float, top_p: float, min_p: float
) -> str | None:
    """Why this engine does not sample so; None if it does."""
    module = _ENTRIES[name].settings
    if module is None:
        return None
    found: str | None = import_module(module).sampling_refusal(temperature, top_p, min_p)
    return found


def least_kv_tokens(name: EngineName) -> int:
    """The smallest KV budget that this engine runs with."""
    module = _ENTRIES[name].settings
    return 1 if module is None else int(import_module(module).LEAST_TOKENS)


class Interpreter(NamedTuple):
    """The Python of an engine's workers, and what it reads from its environment."""

    python: Path
    variables: dict[str, str]
    imports: tuple[str, ...] = ()  # modules that take long to import, and that every worker needs


def own_interpreter(
    name: EngineName, options: Mapping[str, Any], device: str
) -> Interpreter | None:
    """Of an engine that needs another environment than this one; refused if there is none."""
    module = _ENTRIES[name].environment
    if module is None:
        return None
    environment = import_module(module)
    python = environment.find_python(options.get("python"))
    return Interpreter(python, environment.variables(device), environment.IMPORTS)


def check_interpreter(name: EngineName, options: Mapping[str, Any], device: str) -> None:
    """Refuse an engine whose environment is not there, or does not have what is asked of it."""
    found = own_interpreter(name, options, device)
    if found is not None:
        import_module(str(_ENTRIES[name].environment)).check(found.python, options)
