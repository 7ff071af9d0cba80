"""Whole training runs for the benchmarks: of one configuration, in a directory that goes again."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dora_rl.benchmarks.reporting import Reporter
from dora_rl.runtime.control.listeners import Listener
from dora_rl.runtime.errors import RunFailed
from dora_rl.runtime.execution import Run, execute
from dora_rl.runtime.prepare.plan import Plan, prepare, read_config


def train_once(
    data: Mapping[str, Any], out: Path, reporter: Reporter, *, warmup_steps: int = 0
) -> Run:
    """Run a configuration to its end; measured is from version `warmup_steps` on."""
    run = {**data.get("run", {}), "out": str(out)}
    plan = prepare(read_config({**data, "run": run}))
    done = execute_told(plan, reporter, warmup_steps=warmup_steps)
    if not done.ok:
        raise RunFailed(f"a run of the measurement failed: {done.ending.reason}")
    return done


def execute_told(
    plan: Plan, reporter: Reporter, *, listeners: Sequence[Listener] = (), warmup_steps: int = 0
) -> Run:
    """Run a plan, and tell its steps."""
    total = plan.config.run.steps
    reporter.step("starting its processes")
    done = execute(
        plan,
        watch=[lambda step: reporter.step(f"train step {step.step} of {total}")],
        listeners=listeners,
        stopping=lambda: reporter.phase("interrupted: the run saves and ends"),
        warmup_steps=warmup_steps,
    )
    if done.ending.interrupted:
        raise KeyboardInterrupt  # whoever stops a run of a measurement means all of it
    return done


@contextmanager
def workplace() -> Iterator[Path]:
    """A directory for runs, removed with them."""
    with tempfile.TemporaryDirectory(prefix="dora-rl-bench-") as name:
        yield Path(name)
