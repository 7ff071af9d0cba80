"""Whole training runs for the benchmarks: of one configuration, in a directory that goes again."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dora_rl.runtime.errors import RunFailed
from dora_rl.runtime.train import Run, execute, prepare, read_config


def train_once(data: Mapping[str, Any], out: Path, *, warmup_steps: int = 0) -> Run:
    """Run a configuration to its end; measured is from version `warmup_steps` on."""
    run = {**data.get("run", {}), "out": str(out)}
    done = execute(prepare(read_config({**data, "run": run})), warmup_steps=warmup_steps)
    if done.ending.interrupted:
        raise KeyboardInterrupt  # whoever stops a run of a measurement means all of it
    if not done.ok:
        raise RunFailed(f"a run of the measurement failed: {done.ending.reason}")
    return done


@contextmanager
def workplace() -> Iterator[Path]:
    """A directory for runs, removed with them."""
    with tempfile.TemporaryDirectory(prefix="dora-rl-bench-") as name:
        yield Path(name)
