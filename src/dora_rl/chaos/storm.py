"""A real run, struck by faults at random moments, resumed as often as it ends, then audited."""

import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dora_rl.chaos.faults import FAULTS, Target, available
from dora_rl.chaos.life import Life
from dora_rl.chaos.wounds import Wounds
from dora_rl.config import dump_toml, merged
from dora_rl.core.audit import AuditReport, audit_journal
from dora_rl.core.errors import UserError
from dora_rl.machine.fast_paths import on_linux
from dora_rl.runtime.errors import RunFailed
from dora_rl.runtime.recording import StepRecord, read_records
from dora_rl.runtime.train import read_config
from dora_rl.store.ledger import Ledger
from dora_rl.store.rundir import JOURNAL, LEDGER, METRICS_OF_STEPS, JournalFile, check_free

Progress = Callable[[str], None]
_ENDLESS = 1_000_000  # steps: the storm says when it is over
_MOST_FAILURES = 5  # lives in a row that ended by themselves
_END_S = 300.0  # for the last step and its checkpoint
_FEW = 5  # steps at either end, whose rewards are compared
_STORMY: dict[str, dict[str, Any]] = {
    "orchestration": {"heartbeat_timeout_s": 5.0, "max_losses": 1000},
    "runtime": {"train_silence_s": 8.0},
    "run": {"steps": _ENDLESS, "checkpoint_every": 10, "save_every_s": 1.0},
    "task": {"reward_timeout_s": 2.0},
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be endured; refuses what cannot be."""

    config: Mapping[str, Any]
    out: Path
    faults: tuple[str, ...] = tuple(FAULTS)
    minutes: float = 5.0
    every_s: float = 8.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not on_linux():
            raise UserError("dora-rl chaos finds the processes of a run in /proc: it needs Linux.")
        for name in self.faults:
            if name not in FAULTS:
                raise UserError(f"no such fault: `{name}`. There are {', '.join(FAULTS)}.")
            if name not in available():
                raise UserError(
                    f"`{name}` needs Linux 5.5 on x86-64 or ARM. Name the others with --faults."
                )
        if not self.faults:
            raise UserError("--faults must name one at least.")
        for option, value in (("minutes", self.minutes), ("every", self.every_s)):
            if not 0 < value < float("inf"):
                raise UserError(f"--{option} must be > 0: `{value}`.")
        check_free(self.out)


@dataclass(slots=True)
class Result:
    """What was done to the run, and what became of it."""

    plan: Plan
    faults: Counter[str] = field(default_factory=Counter)
    resumed: int = 0
    refused: int = 0
    """Resumes that named a damaged file, which was then mended."""
    steps: int = 0
    states: dict[str, int] = field(default_factory=dict)
    rewards: tuple[float, float] = (0.0, 0.0)
    audit: AuditReport | None = None

    @property
    def ok(self) -> bool:
        return self.audit is not None and self.audit.ok and self.steps > 0

    def to_json(self) -> dict[str, Any]:
        assert self.audit is not None
        return {
            "ok": self.ok,
            "seed": self.plan.seed,
            "minutes": self.plan.minutes,
            "faults": dict(self.faults),
            "resumed": self.resumed,
            "refused": self.refused,
            "steps": self.steps,
            "trajectories": self.states,
            "reward": {"first": self.rewards[0], "last": self.rewards[1]},
            "audit": self.audit.to_json(),
        }

    def summary(self) -> list[str]:
        assert self.audit is not None
        struck = ", ".join(f"{name} {count}" for name, count in sorted(self.faults.items()))
        states = ", ".join(f"{count} {state}" for state, count in sorted(self.states.items()))
        first, last = self.rewards
        return [
            f"{sum(self.faults.values())} faults: {struck}",
            f"{self.steps} steps; resumed {self.resumed} times; {self.refused} times it refused a "
            "damaged file by its name",
            f"trajectories: {states}",
            f"reward {first:.3f} (first {_FEW} steps) -> {last:.3f} (last {_FEW})",
            *self.audit.summary(),
        ]


def brave(plan: Plan, progress: Progress = lambda _: None) -> Result:
    """Run, strike, resume, and audit."""
    return _Storm(plan, progress).run()


class _Storm:
    def __init__(self, plan: Plan, progress: Progress) -> None:
        self._plan = plan
        self._tell = progress
        self._random = random.Random(plan.seed)
        self._result = Result(plan)
        self._failures = 0  # lives in a row that ended by themselves before they took a step
        self._log = plan.out.with_name(f"{plan.out.name}.log")
        hospital = plan.out.with_name(f"{plan.out.name}.damaged")
        self._wounds = Wounds(plan.out, hospital)
        self._life = self._start()

    def run(self) -> Result:
        try:
            self._weather()
            self._end()
        finally:
            self._life.kill(self._plan.out)
        return self._conclude()

    def _weather(self) -> None:
        end = time.monotonic() + 60 * self._plan.minutes
        strike_at = time.monotonic() + self._pause()
        while time.monotonic() < end:
            time.sleep(0.2)
            self._look()
            if time.monotonic() >= strike_at and self._result.steps:
                strike_at = time.monotonic() + self._pause()
                self._strike()

    def _pause(self) -> float:
        return self._random.expovariate(1 / self._plan.every_s)

    def _strike(self) -> None:
        name = self._random.choice(self._plan.faults)
        target = Target(self._plan.out, self._life, self._wounds, self._random)
        done = FAULTS[name][0](target)
        if done is not None:
            self._result.faults[name] += 1
            number = sum(self._result.faults.values())
            self._tell(f"fault {number}, step {self._result.steps}: {done}")

    # The run's lives

    def _start(self) -> Life:
        plan = self._plan
        data = merged(plan.config, _STORMY, {"run": {"out": str(plan.out)}})
        config = plan.out.with_name(f"{plan.out.name}.toml")
        config.parent.mkdir(parents=True, exist_ok=True)
        config.write_text(dump_toml(read_config(data)), encoding="utf-8")
        return self._live(str(config))

    def _live(self, *arguments: str) -> Life:
        self._wounds.life_begins()
        return Life(["train", *arguments, "--plain"], self._log, self._plan.seed)

    def _look(self) -> None:
        """See how far the run is, and resume it if it has ended."""
        if self._life.ended:
            self._examine()
            if not (self._plan.out / LEDGER).is_file():
                raise RunFailed(f"the run ended before it began: see {self._log}")
            self._life.close()
            self._result.resumed += 1
            self._life = self._live("--resume", str(self._plan.out))
            return
        if self._wounds.open and not self._life.works:
            return  # what we would read may be damaged
        steps = self._steps()
        if steps > self._result.steps:
            self._result.steps = steps
            self._failures = 0
            self._wounds.outlived()

    def _examine(self) -> None:
        """A life that ended by itself must say which file was damaged; then that is mended."""
        if not self._life.failed:
            return
        named = self._wounds.heal_those_named(
            self._life.complaint, as_input=self._life.refused_input
        )
        if named:
            self._result.refused += 1
            self._tell(f"refused, and mended: {', '.join(path.name for path in named)}")
            return
        self._failures += 1
        if self._failures > _MOST_FAILURES:
            damaged = ", ".join(str(wound.path) for wound in self._wounds.open)
            why = f", and did not say that {damaged} is damaged" if damaged else ""
            raise RunFailed(
                f"the run ended {self._failures} times without a step{why}: {self._log}"
            )

    def _steps(self) -> int:
        """Trained and committed."""
        if not (self._plan.out / LEDGER).is_file():
            return 0
        known = self._result.steps
        with Ledger.read(self._plan.out / LEDGER) as ledger:
            return known + sum(row.state == "trained" for row in ledger.batches(after=known - 1))

    def _end(self) -> None:
        """The storm is over: the run goes on for a step, saves, and ends."""
        self._tell("the storm is over: the run goes on for a step, and ends")
        self._life.disk.be_well()
        deadline = time.monotonic() + _END_S
        before = self._result.steps
        while self._result.steps <= before:
            self._look()
            if time.monotonic() > deadline:
                raise RunFailed(f"no step was trained after the storm: see {self._log}")
            time.sleep(0.2)
        self._life.ask_to_end(_END_S)

    def _conclude(self) -> Result:
        result, out = self._result, self._plan.out
        result.audit = audit_journal(JournalFile(out.name, out / JOURNAL).lines())
        with Ledger.read(out / LEDGER) as ledger:
            result.states = ledger.counts()
            result.steps = sum(row.state == "trained" for row in ledger.batches())
        records = read_records(out / METRICS_OF_STEPS)
        rewards = [record.reward_mean for record in records if isinstance(record, StepRecord)]
        if rewards:
            result.rewards = statistics.fmean(rewards[:_FEW]), statistics.fmean(rewards[-_FEW:])
        return result
