"""Measures the parts of a train step of one configuration, in a process of its own."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dora_rl.benchmarks.contestants.process import Contestant, Start
from dora_rl.benchmarks.floors import Parts
from dora_rl.benchmarks.reporting import Reporter
from dora_rl.runtime.launchers.local.processes import worker_environment

_CONTESTANT = Path(__file__).with_name("contestants") / "step_parts.py"
_DECODE_S = 0.4  # of one batch size
_TRAIN_STEPS = 6  # the best counts: the first is slower, and so is one beside other work


def measure_parts(
    config: Mapping[str, Any], groups: int, cores: int, work: Path, reporter: Reporter
) -> Parts:
    """Decode with batches up to the slots, and train batches of so many groups by some threads."""
    work.mkdir(parents=True, exist_ok=True)
    start = Start(
        "step parts",
        [sys.executable, "-P"],
        _CONTESTANT,
        {"config": dict(config), "work": str(work)},
        worker_environment(cores, None),
    )
    reporter.phase("the parts of a step")
    slots = config["rollout"]["slots"]
    batches = [rows for rows in (1, 4, 16, 64, 128, 256) if rows < slots] + [slots]
    with Contestant(start, work) as child:
        child.load()
        decode = {}
        for rows in batches:
            reporter.step(f"decoding {rows} rows")
            done = child.ask("decode", rows=rows, seconds=_DECODE_S)
            decode[rows] = done["core_s"] / max(1, done["tokens"])
        seconds, core_s = {}, {}
        for threads in sorted({1, cores}):
            reporter.step(f"training by {threads} threads")
            done = child.ask("train", groups=groups, threads=threads, steps=_TRAIN_STEPS)
            seconds[threads], core_s[threads] = done["token_s"], done["token_core_s"]
    return Parts(seconds, core_s, decode)
