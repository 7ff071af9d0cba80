"""Whole training runs for the benchmarks: of one configuration, in a directory that goes again."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dora_rl.runtime.train import Run, execute, prepare, read_config


def train_once(data: Mapping[str, Any], out: Path, *, warmup_steps: int = 0) -> Run:
    """Run a configuration to its end; measured is from version `warmup_steps` on."""
    run = {**data.get("run", {}), "out": str(out)}
    plan = prepare(read_config({**data, "run": run}))
    return execute(plan, warmup_steps=warmup_steps)


@contextmanager
def workplace() -> Iterator[Path]:
    """A directory for runs, removed with them."""
    with tempfile.TemporaryDirectory(prefix="dora-rl-bench-") as name:
        yield Path(name)


def merged(*layers: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Sections laid over each other, key by key; later ones win."""
    result: dict[str, dict[str, Any]] = {}
    for layer in layers:
        for section, values in layer.items():
            result[section] = {**result.get(section, {}), **values}
    return result
