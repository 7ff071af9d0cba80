"""Who takes part, and how each is started: interpreter, file, environment, settings."""

import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dora_rl import extras
from dora_rl.benchmarks.contestants.process import Start
from dora_rl.benchmarks.limits import DTYPE_BYTES
from dora_rl.benchmarks.models import Model
from dora_rl.core.protocol.errors import UserError
from dora_rl.engines.registry import (
    EngineName,
    check_interpreter,
    has_own_environment,
    own_interpreter,
)
from dora_rl.engines.vllm.environment import find_python
from dora_rl.machine import run_module

OURS = "ours"
PUBLISHER = "publisher"
OTHERS = ("hf", "vllm")
MACHINE = "machine"
_HERE = Path(__file__).parent
_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TQDM_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
DEVICE = "auto"  # of an engine that runs on others than CPUs
_GB = 1 << 30


@dataclass(frozen=True, slots=True)
class Shape:
    """What every contestant must be able to hold."""

    batch: int  # the largest
    prompt_tokens: int
    new_tokens: int
    threads: int


def check_others(names: Sequence[str]) -> None:
    """Refuse whoever is not known or cannot run here; torch and vLLM are not imported for it."""
    for name in names:
        if name not in OTHERS:
            raise UserError(f"no such contestant: `{name}`. Use one of: {', '.join(OTHERS)}.")
    if len(set(names)) < len(names):
        raise UserError(f"a contestant is given twice: `{','.join(names)}`. Name each once.")
    if "hf" in names and importlib.util.find_spec("transformers") is None:
        extras.require("dora-rl bench engine --against hf", "smollm2")
    if "vllm" in names:
        find_python()


def check_engine(kind: EngineName, user: str, *needed: str) -> bool:
    """Refuse an engine that cannot run here; whether its versions need fingerprints.

    An engine of another environment has its own form of the weights, and proves them by that.
    `needed` are extras for fingerprints; `user` is a command.
    """
    if not has_own_environment(kind):
        return False
    extras.require(f"{user} --engine {kind}", *needed)
    check_interpreter(kind, {}, DEVICE)
    return True


def ours(model: Model, shape: Shape, work: Path, versions: int | None = None) -> Start:
    return _of_this_python(OURS, shape.threads, _settings_of_ours(model, shape, work, versions))


def engine(
    name: str,
    kind: EngineName,
    model: Model,
    shape: Shape,
    weights: Path,
    *,
    versions: int,
    lora_rank: int | None,
) -> Start:
    """An engine of this project, in its own environment if it has one, with published versions."""
    settings = {
        **_settings_of_ours(model, shape, weights.parent, versions),
        "engine": str(kind),
        "weights": str(weights),
        "lora_rank": lora_rank,
    }
    return _of_its_python(name, kind, shape.threads, settings, OURS)


def publisher(threads: int) -> Start:
    return _of_this_python(PUBLISHER, threads, {"threads": threads})


def _settings_of_ours(
    model: Model, shape: Shape, work: Path, versions: int | None
) -> dict[str, Any]:
    return {
        "directory": str(model.directory),
        "work": str(work),
        "threads": shape.threads,
        "slots": shape.batch,
        "prompt_tokens": shape.prompt_tokens,
        "new_tokens": shape.new_tokens,
        "versions": versions,
    }


def siblings(model: Model, threads: int, work: Path) -> Start:
    """Engines with speculation and without."""
    settings = {"directory": str(model.directory), "work": str(work), "threads": threads}
    return _of_this_python("siblings", threads, settings)


def machine(threads: int) -> Start:
    return _of_this_python(MACHINE, threads, {"threads": threads})


def mover(
    name: str, kind: EngineName, model: Model, weights: Path, *, threads: int, tokens: int, fd: int
) -> Start:
    """One side of a migration, with a published version; `fd` is a socket to the other side."""
    settings = {
        "directory": str(model.directory),
        "weights": str(weights),
        "threads": threads,
        "tokens": tokens,
        "fd": fd,
        "engine": str(kind),
    }
    return replace(_of_its_python(name, kind, threads, settings, "mover"), pass_fds=(fd,))


def other(name: str, model: Model, shape: Shape) -> Start:
    """One of `OTHERS`."""
    settings: dict[str, Any] = {"directory": str(model.directory), "dtype": model.config.dtype}
    if name == "hf":
        settings["threads"] = shape.threads
        return _of_this_python(name, shape.threads, settings)
    settings |= {"slots": shape.batch, "context": shape.prompt_tokens + shape.new_tokens}
    python = find_python()
    env = {
        **_threads(shape.threads),
        **_OFFLINE,
        **_intel_openmp(python),
        "VLLM_CPU_KVCACHE_SPACE": str(_kv_gb(model, shape)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # as many threads as asked for, as for the others
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    return Start(name, [str(python), "-I"], _HERE / "vllm.py", settings, env)


def _of_this_python(
    name: str, threads: int, settings: dict[str, Any], file: str | None = None
) -> Start:
    env = {**_threads(threads), **_OFFLINE}
    return Start(name, [sys.executable, "-P"], _HERE / f"{file or name}.py", settings, env)


def _of_its_python(
    name: str, kind: EngineName, threads: int, settings: dict[str, Any], file: str
) -> Start:
    """In the engine's own environment, if it has one."""
    interpreter = own_interpreter(kind, {}, DEVICE)
    if interpreter is None:
        return _of_this_python(name, threads, settings, file)
    return Start(
        name,
        [str(interpreter.python), "-I"],
        _HERE / f"{file}.py",
        settings,
        {**_threads(threads), **_OFFLINE, **interpreter.variables},
        serving=(run_module.__file__, f"{__package__}.serving"),
    )


def _threads(threads: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(threads)}


def _kv_gb(model: Model, shape: Shape) -> int:
    """Room for every sequence, and as much again: vLLM gives it out in blocks."""
    config = model.config
    token = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    tokens = shape.batch * (shape.prompt_tokens + shape.new_tokens)
    return 1 + 2 * token * DTYPE_BYTES[config.dtype] * tokens // _GB


def _intel_openmp(python: Path) -> dict[str, str]:
    """As vLLM recommends for the best speed, and as it sets for the processes it starts itself.

    Its threads spin for 5 ms after their work and then sleep.
    """
    library = python.parent.parent / "lib" / "libiomp5.so"
    if not library.is_file():
        return {}
    preload = ":".join(filter(None, (str(library), os.environ.get("LD_PRELOAD"))))
    return {"LD_PRELOAD": preload, "KMP_BLOCKTIME": "5", "KMP_TPAUSE": "0"}
