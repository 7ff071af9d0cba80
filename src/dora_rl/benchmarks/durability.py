"""What it costs that nothing is lost, and how soon a run works again after a death.

The quickstart with the ledger and without, in turns; then one run in which a rollout process is
killed, and one that is killed itself and resumed.
"""

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dora_rl.benchmarks.reporting import Reporter
from dora_rl.benchmarks.training import execute_told, train_once, workplace
from dora_rl.config import dump_toml, load_toml, merged
from dora_rl.core.protocol.commands import Command
from dora_rl.core.protocol.errors import UserError
from dora_rl.core.protocol.events import (
    Event,
    InstanceFailed,
    InstanceProgressed,
    InstanceStopped,
    TrajectoryFinished,
)
from dora_rl.faultlab.processes import descendants, signal_to, workers_of_run
from dora_rl.quickstart import model_directory
from dora_rl.runtime.control.listeners import Listener
from dora_rl.runtime.errors import RunFailed
from dora_rl.runtime.prepare.plan import plan_resume, prepare, read_config
from dora_rl.runtime.records.total_steps import steps_trained
from dora_rl.store.ledger import Ledger
from dora_rl.store.rundir import LEDGER

ON, OFF = "on", "off"
_END_S = 10.0  # for the processes of a killed run


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be measured; refuses what cannot be."""

    steps: int = 24
    warmup_steps: int = 4
    rounds: int = 5
    config: dict[str, Any] = field(default_factory=dict)
    """Laid over the quickstart's."""

    def __post_init__(self) -> None:
        for name, least in (("steps", 2), ("rounds", 1)):
            if getattr(self, name) < least:
                raise UserError(f"--{name} must be >= {least}: `{getattr(self, name)}`.")
        if not 0 <= self.warmup_steps < self.steps:
            raise UserError(
                f"--warmup-steps must be from 0 to {self.steps - 1}: `{self.warmup_steps}`."
            )

    def settings(self, way: str, steps: int) -> dict[str, Any]:
        quickstart = load_toml(model_directory().parent / "quickstart.toml")
        task = {"eval_prompts": None, "eval_every": None}
        run = {"steps": steps, "durable": way == ON}
        ours: dict[str, dict[str, Any]] = {"task": task, "run": run}
        data = merged(quickstart, ours, self.config)
        return {
            section: {key: value for key, value in values.items() if value is not None}
            for section, values in data.items()
        }


@dataclass(frozen=True, slots=True)
class Result:
    """What an interrupted measurement did not come to is None."""

    plan: Plan
    tokens_per_s: dict[str, list[float]]
    replaced_s: float | None
    resumed_s: float | None

    @property
    def overhead(self) -> float | None:
        """The median, over whole rounds, of the share of throughput that durability takes."""
        pairs = zip(self.tokens_per_s[ON], self.tokens_per_s[OFF], strict=False)
        shares = [1 - on / off for on, off in pairs]
        return statistics.median(shares) if shares else None

    def to_json(self) -> dict[str, Any]:
        return {
            "steps": self.plan.steps - self.plan.warmup_steps,
            "rounds": self.plan.rounds,
            "tokens_per_s": self.tokens_per_s,
            "overhead": self.overhead,
            "rollout_death_to_traffic_s": self.replaced_s,
            "resume_to_first_token_s": self.resumed_s,
        }

    def summary(self) -> list[str]:
        lines = []
        for way, rates in self.tokens_per_s.items():
            if rates:
                rate = statistics.median(rates)
                lines.append(f"durability {way}: {rate:.0f} tokens/s (median of {len(rates)} runs)")
        if self.overhead is not None:
            lines.append(f"overhead {self.overhead:.1%} (median of {self.plan.rounds} rounds)")
        for taken, what in (
            (self.replaced_s, "from the death of a rollout process to new tokens"),
            (self.resumed_s, "from --resume of a killed run to new tokens"),
        ):
            if taken is not None:
                lines.append(f"{what}: {taken:.1f} s")
        return lines


def measure(plan: Plan, reporter: Reporter | None = None) -> Result:
    reporter = reporter or Reporter()
    rates: dict[str, list[float]] = {ON: [], OFF: []}
    recoveries: dict[str, float] = {}

    def result() -> Result:
        copied = {way: list(found) for way, found in rates.items()}
        return Result(plan, copied, recoveries.get("replaced"), recoveries.get("resumed"))

    reporter.collects(lambda: result() if any(rates.values()) else None)
    with workplace() as place:
        for number in range(plan.rounds):
            for way in (ON, OFF) if number % 2 == 0 else (OFF, ON):
                reporter.phase(f"round {number + 1} of {plan.rounds}: durability {way}")
                data = plan.settings(way, plan.steps)
                out = place / f"{number}-{way}"
                run = train_once(data, out, reporter, warmup_steps=plan.warmup_steps)
                rates[way].append(run.summary.tokens_per_s)
        reporter.phase("a rollout process dies")
        recoveries["replaced"] = _time_replacement(plan, place / "replaced", reporter)
        reporter.phase("the run dies")
        recoveries["resumed"] = _time_resume(plan, place / "resumed", reporter)
    return result()


class _Stopwatch(Listener):
    """From `began` to the first new tokens after an event of this kind."""

    def __init__(self, kind: type, began: float = 0.0) -> None:
        self.began = began
        self.took: float | None = None
        self._kind = kind
        self._armed = False

    def observed(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        self._armed |= isinstance(event, self._kind)
        grown = isinstance(event, InstanceProgressed) and event.lengths
        if self._armed and self.took is None and grown:
            self.took = time.monotonic() - self.began


class _Killer(_Stopwatch):
    """Kills the rollout process after some trajectories, and times its successor."""

    def __init__(self, out: Path, after: int) -> None:
        super().__init__(InstanceFailed)
        self._out = out
        self._left = after

    def observed(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        super().observed(now, event, commands)
        self._left -= isinstance(event, TrajectoryFinished)
        if self._left <= 0 and not self.began:
            self.began = time.monotonic()
            if (pid := workers_of_run(self._out).get("rollout-0")) is None:
                raise RunFailed("no rollout process was found to be killed")
            os.kill(pid, signal.SIGKILL)


def _time_replacement(plan: Plan, out: Path, reporter: Reporter) -> float:
    """Killed when a third of all trajectories is finished."""
    data = merged(plan.settings(ON, plan.steps), {"run": {"out": str(out)}})
    config = read_config(data)
    core = config.orchestration
    killer = _Killer(out, after=plan.steps * core.groups_per_step * core.group_size // 3)
    execute_told(prepare(config), reporter, listeners=[killer])
    return _taken(killer)


def _time_resume(plan: Plan, out: Path, reporter: Reporter) -> float:
    """Killed in the middle: half of its steps are to be taken again."""
    config = out.with_suffix(".toml")
    data = merged(plan.settings(ON, plan.steps), {"run": {"out": str(out)}})
    config.write_text(dump_toml(read_config(data)), encoding="utf-8")
    command = [sys.executable, "-m", "dora_rl", "train", str(config), "--plain"]
    # Ctrl-C is for us: the run must not say on the terminal that it stops.
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        while (done := _steps(out)) < plan.steps // 2 and process.poll() is None:
            reporter.step(f"train step {done} of {plan.steps // 2}")
            time.sleep(0.1)
    finally:
        _kill_run(process)
    stopwatch = _Stopwatch(InstanceStopped, began=time.monotonic())
    reporter.phase("the run resumes")
    execute_told(plan_resume(out), reporter, listeners=[stopwatch])
    return _taken(stopwatch)


def _kill_run(process: "subprocess.Popen[bytes]") -> None:
    """Returns when its workers are gone too, which end with it: they write where it runs."""
    workers = descendants(process.pid)
    process.kill()
    process.wait()
    deadline = time.monotonic() + _END_S
    while any(signal_to(pid, 0) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.02)


def _steps(out: Path) -> int:
    if not (out / LEDGER).is_file():
        return 0
    with Ledger.read(out / LEDGER) as ledger:
        return steps_trained(ledger)


def _taken(stopwatch: _Stopwatch) -> float:
    if stopwatch.took is None:
        raise RunFailed("the run ended before it worked again: take more --steps")
    return stopwatch.took
