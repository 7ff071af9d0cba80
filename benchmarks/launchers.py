"""The quickstart by `local` and by `ray` on the cores of this machine, in turns.

    python benchmarks/launchers.py --rounds 3 --steps 20

Both have the same threads, and no evaluations. Shown for each round: tokens a second after the
warm-up, and the processor time of a step, of the driver and all that it has started. The latter
depends on other work of the machine least.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from dora_rl.benchmarks.reporting import Reporter
from dora_rl.benchmarks.training import execute_told, workplace
from dora_rl.config import load_toml, merged
from dora_rl.core.protocol.commands import Command
from dora_rl.core.protocol.events import BatchTrained, Event
from dora_rl.quickstart import model_directory
from dora_rl.runtime.control.listeners import Listener
from dora_rl.runtime.prepare.plan import prepare, read_config

KINDS = ("local", "ray")


class Reading(NamedTuple):
    tokens_per_s: float
    step_cpu_s: float
    audit: str


class ProcessorTime(Listener):
    """Of the whole tree of processes, at the end of each step. Who has died counts no more."""

    def __init__(self) -> None:
        self.at_steps: list[dict[int, float]] = []

    def observed(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        if isinstance(event, BatchTrained):
            tree = [psutil.Process(), *psutil.Process().children(recursive=True)]
            self.at_steps.append(dict(_taken(process) for process in tree))

    def per_step(self, warmup_steps: int) -> float:
        """From the end of the warm-up to the end."""
        first, last = self.at_steps[warmup_steps - 1], self.at_steps[-1]
        seconds = sum(taken - first.get(pid, 0.0) for pid, taken in last.items())
        return seconds / (len(self.at_steps) - warmup_steps)


def _taken(process: psutil.Process) -> tuple[int, float]:
    try:
        times = process.cpu_times()
        return process.pid, times.user + times.system
    except psutil.NoSuchProcess:
        return process.pid, 0.0


def settings(kind: str, steps: int, out: Path) -> dict[str, Any]:
    """The quickstart's, without its evaluations."""
    quickstart = load_toml(model_directory().parent / "quickstart.toml")
    for key in ("eval_prompts", "eval_every"):
        del quickstart["task"][key]
    threads = read_config(quickstart).threads()
    each = {"rollout": {"cpus": threads.rollout}, "trainer": {"cpus": threads.train}}
    runtime = {"kind": kind, "ray": each} if kind == "ray" else {"kind": kind}
    return merged(quickstart, {"runtime": runtime, "run": {"steps": steps, "out": str(out)}})


def measure(rounds: int, steps: int, warmup_steps: int) -> dict[str, list[Reading]]:
    found: dict[str, list[Reading]] = {kind: [] for kind in KINDS}
    with workplace() as place:
        for number in range(rounds):
            for kind in KINDS if number % 2 == 0 else KINDS[::-1]:
                plan = prepare(read_config(settings(kind, steps, place / f"{number}-{kind}")))
                time = ProcessorTime()
                run = execute_told(plan, Reporter(), listeners=[time], warmup_steps=warmup_steps)
                summary = run.summary
                reading = Reading(summary.tokens_per_s, time.per_step(warmup_steps), summary.audit)
                found[kind].append(reading)
                print(f"round {number + 1}, {kind}: {reading}", file=sys.stderr)
    return found


def summary(found: dict[str, list[Reading]]) -> dict[str, Any]:
    """The readings, and the medians over the rounds of Ray's over `local`'s."""
    pairs = list(zip(found["ray"], found["local"], strict=True))
    return {
        **{kind: [reading._asdict() for reading in readings] for kind, readings in found.items()},
        "tokens_per_s_ratio": statistics.median(r.tokens_per_s / o.tokens_per_s for r, o in pairs),
        "step_cpu_s_ratio": statistics.median(r.step_cpu_s / o.step_cpu_s for r, o in pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup-steps", type=int, default=5)
    given = parser.parse_args()
    if not 1 <= given.warmup_steps < given.steps or given.rounds < 1:
        parser.error("--rounds must be >= 1, and --warmup-steps from 1 to --steps - 1")
    print(json.dumps(summary(measure(given.rounds, given.steps, given.warmup_steps)), indent=1))


if __name__ == "__main__":
    main()
