"""What a resume costs after a short run and after a long one: the same, if it is as it should be.

Histories are made by the cheap world of `bench orchestrator`, but through the real files: a
session with its journal, ledger, snapshots and metrics, which then dies. What is timed is the real
way back: everything between the plan of a resumed run and the first command that it performs anew.
"""

import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dora_rl.benchmarks.reporting import Reporter
from dora_rl.benchmarks.training import workplace
from dora_rl.benchmarks.world import GROUP_SIZE, SLOTS, World
from dora_rl.config import load_toml, merged
from dora_rl.core.protocol.errors import UserError
from dora_rl.core.protocol.events import BatchTrained, WeightsPublished
from dora_rl.quickstart import model_directory
from dora_rl.runtime.control import messages as ms
from dora_rl.runtime.prepare.plan import Plan as RunPlan
from dora_rl.runtime.prepare.plan import prepare, read_config
from dora_rl.runtime.records.run_files import RunFiles
from dora_rl.store.rundir import JOURNAL, checkpoint_path

GOAL = 1.5  # times the cost after the shortest history
_INSTANCES = 32
_COMMIT = 500  # events between two commits
_CHECKPOINT = 20  # steps
_STEPS = 10_000_000  # never taken


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be measured; refuses what cannot be."""

    events: tuple[int, ...] = (10_000, 1_000_000)
    repeats: int = 5

    def __post_init__(self) -> None:
        if len(self.events) < 2 or min(self.events) < 1:
            shown = ",".join(map(str, self.events))
            raise UserError(f"--events must be two numbers or more, each >= 1: `{shown}`.")
        if self.repeats < 1:
            raise UserError(f"--repeats must be >= 1: `{self.repeats}`.")


@dataclass(frozen=True, slots=True)
class History:
    """One run that died, and the times that its resumes took."""

    events: int
    steps: int
    replayed: int
    """Events after the last snapshot."""
    journal_bytes: int
    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)


@dataclass(frozen=True, slots=True)
class Result:
    histories: tuple[History, ...]

    @property
    def ratio(self) -> float | None:
        """The longest history against the shortest: the median over rounds of both side by side."""
        first, last = self.histories[0].seconds, self.histories[-1].seconds
        pairs = list(zip(first, last, strict=False))
        return statistics.median(b / a for a, b in pairs) if pairs else None

    def to_json(self) -> dict[str, Any]:
        return {
            "ratio": self.ratio,
            "goal": GOAL,
            "histories": [
                {
                    "events": history.events,
                    "steps": history.steps,
                    "replayed": history.replayed,
                    "journal_bytes": history.journal_bytes,
                    "seconds": list(history.seconds),
                }
                for history in self.histories
            ],
        }

    def summary(self) -> list[str]:
        lines = [
            f"after {h.events} events ({h.steps} steps, journal {h.journal_bytes / 1e6:.0f} MB): "
            f"{h.median_s:.3f} s, {h.replayed} events replayed"
            for h in self.histories
            if h.seconds
        ]
        if self.ratio is not None:
            first, last = self.histories[0].events, self.histories[-1].events
            lines.append(
                f"{last} events against {first}: {self.ratio:.2f} times (goal: {GOAL} at most)"
            )
        return lines


def measure(plan: Plan, reporter: Reporter | None = None) -> Result:
    reporter = reporter or Reporter()
    made: list[tuple[History, RunPlan]] = []
    times: dict[int, list[float]] = {}

    def result() -> Result:
        return Result(tuple(replace(h, seconds=tuple(times[h.events])) for h, _ in made))

    with workplace() as place:
        for events in sorted(plan.events):
            reporter.phase(f"a history of {events} events")
            made.append(_make(place / str(events), events, reporter))
            times[made[-1][0].events] = []
        reporter.collects(lambda: result() if any(times.values()) else None)
        reporter.phase("resuming")
        for number in range(plan.repeats):
            reporter.step(f"round {number + 1} of {plan.repeats}")
            for history, run in made:
                began = time.perf_counter()
                with RunFiles(run) as files:
                    files.take_over()
                    times[history.events].append(time.perf_counter() - began)
    return result()


def _plan(out: Path) -> RunPlan:
    quickstart = load_toml(model_directory().parent / "quickstart.toml")
    ours: dict[str, dict[str, Any]] = {
        "task": {"eval_prompts": None, "eval_every": None},
        "run": {"steps": _STEPS, "out": str(out), "checkpoint_every": _CHECKPOINT},
        "orchestration": {
            "groups_per_step": _INSTANCES * SLOTS // GROUP_SIZE,
            "group_size": GROUP_SIZE,
        },
        "runtime": {"instances": 1},
    }
    data = merged(quickstart, ours)
    settings = {
        section: {key: value for key, value in values.items() if value is not None}
        for section, values in data.items()
    }
    return prepare(read_config(settings))


def _make(out: Path, events: int, reporter: Reporter) -> tuple[History, RunPlan]:
    """A run of so many events, and then half as many as lie between two snapshots."""
    plan = _plan(out)
    half = plan.config.run.snapshot_every // 2
    with RunFiles(plan) as files:
        world = World(_INSTANCES)
        world.core = files.orchestrator
        number = 0
        while number < events + half:
            _one(world, files)
            number += 1
            if number % _COMMIT == 0:
                files.committer.commit()
            if number % 50_000 == 0:
                reporter.step(f"event {number}")
        files.committer.commit()
        _publish_live(files)
        row = files.ledger.snapshot()
        replayed = number - (0 if row is None else row.records)
        size = (out / JOURNAL).stat().st_size
        steps = files.orchestrator.state.trainer.step
    resumed = replace(plan, resumed=True, first_steps=plan.config.run.steps)
    return History(number, steps, replayed, size, ()), resumed


def _one(world: World, files: RunFiles) -> None:
    """One event of the world, told to all as a driver does it."""
    event = world.next_event()
    if isinstance(event, BatchTrained):
        files.recorder.trained(world.now, ms.Trained(event.step, 0, 1.0, {}), [])
    commands = world.core.handle(world.now, event)
    for listener in files.listeners:
        listener.observed(world.now, event, commands)
    world.obey(commands)
    if isinstance(event, WeightsPublished) and event.version and event.version % _CHECKPOINT == 0:
        checkpoint_path(files.checkpoints, event.version).mkdir(parents=True)
        files.committer.checkpointed(event.version)


def _publish_live(files: RunFiles) -> None:
    """A resume looks for the weights of every version that is leased."""
    import torch

    from dora_rl.transports.weights.shared_directory import WeightStore

    store = WeightStore(files.weights)
    for version in files.orchestrator.state.versions.live:
        store.publish(version, {"weight": torch.zeros(1)})
