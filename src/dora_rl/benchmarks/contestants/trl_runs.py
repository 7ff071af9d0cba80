"""Runs of both sides of `dora-rl bench trl`: the same work asked of each, and what it took.

A run that did something else than was asked ends the measurement. Which way of working is best
is not decided here.
"""

import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dora_rl.benchmarks.contestants.process import Contestant, ContestantFailed
from dora_rl.benchmarks.reporting import Reporter

if TYPE_CHECKING:
    from dora_rl.runtime.prepare.plan import Plan
    from dora_rl.runtime.records.step_metrics import StepRecord

TRL, OURS = "trl", "ours"
LEARNING_RATE = 1e-6
SEED = 0
_REWARD = "dora_rl.benchmarks.contestants.trl_process:reward"
_STEP_TIMEOUT_S = 1800.0  # of TRL; a step of the default size takes one to two minutes


@dataclass(frozen=True, slots=True)
class Work:
    """What a step is, for both."""

    prompts: int
    group_size: int
    max_tokens: int

    @property
    def batch(self) -> int:
        """Completions of a step."""
        return self.prompts * self.group_size


def questions(count: int) -> list[str]:
    """Arithmetic in words, the same list every time: a longer one begins with a shorter one."""
    source = random.Random("dora-rl bench trl")
    made = []
    for _ in range(count):
        a, b, c = (source.randrange(2, 100) for _ in range(3))
        made.append(
            f"A shop has {a} boxes with {b} apples each and sells {c} apples. How many apples are "
            "left? Explain each step, then give the number."
        )
    return made


@dataclass(frozen=True, slots=True)
class Split:
    """One way of working of ours: who has how many threads, and how far it works ahead."""

    paradigm: str
    max_staleness: int
    rollout_threads: int
    train_threads: int

    @property
    def warmup(self) -> int:
        """Steps until everything is loaded and the pipeline is as full as it gets."""
        return 1 + self.max_staleness

    @property
    def tail(self) -> int:
        """Steps after the measured ones, for which work continues while those are measured."""
        return self.max_staleness

    @property
    def title(self) -> str:
        threads = f"{self.rollout_threads} rollout + {self.train_threads} train threads"
        if self.max_staleness == 0:
            return f"{self.paradigm}, {threads} in turns"
        return f"{self.paradigm} K={self.max_staleness}, {threads}"

    def to_json(self) -> dict[str, Any]:
        return {
            "paradigm": self.paradigm,
            "max_staleness": self.max_staleness,
            "rollout_threads": self.rollout_threads,
            "train_threads": self.train_threads,
        }


@dataclass(frozen=True, slots=True)
class Choice:
    """How TRL is set."""

    dtype: str
    per_device: int

    @property
    def title(self) -> str:
        return f"{self.dtype}, {self.per_device} sequences a pass"

    def to_json(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "per_device": self.per_device}


@dataclass(frozen=True, slots=True)
class Trained:
    """The measured steps of one side."""

    step_s: Sequence[float]
    tokens: Sequence[int]

    @property
    def seconds(self) -> float:
        return sum(self.step_s)

    @property
    def tokens_per_s(self) -> float:
        return sum(self.tokens) / self.seconds

    def to_json(self) -> dict[str, Any]:
        return {
            "tokens_per_s": self.tokens_per_s,
            "step_s": self.seconds / len(self.step_s),
            "steps": len(self.step_s),
            "tokens": sum(self.tokens),
            "samples": {"step_s": list(self.step_s), "tokens": list(self.tokens)},
        }


class TrlRuns:
    """Runs of TRL, and a look at each: whether it did what was asked."""

    def __init__(
        self,
        work: Work,
        child: Contestant,
        encode: Callable[[str], list[int]],
        reporter: Reporter,
    ) -> None:
        self.work = work
        self._child, self._encode, self._reporter = child, encode, reporter

    def train(self, way: Choice, steps: int, warmup: int) -> Trained:
        work = self.work
        self._reporter.phase(f"{TRL}: {warmup + steps} steps, {way.title}")
        asked = questions(work.prompts * (warmup + steps))
        self._child.send(
            "train",
            questions=asked,
            num_steps=warmup + steps,
            group_size=work.group_size,
            batch=work.batch,
            per_device=way.per_device,
            max_tokens=work.max_tokens,
            learning_rate=LEARNING_RATE,
            dtype=way.dtype,
            seed=SEED,
        )
        done = self._child.receive(_STEP_TIMEOUT_S * (warmup + steps))
        if done["completions"] != [work.batch] * (warmup + steps):
            raise ContestantFailed(
                f"{TRL} trained {done['completions']} completions in its steps, not {work.batch} "
                f"in each of {warmup + steps}."
            )
        if done["prompts"] != [self._encode(question) for question in asked]:
            raise ContestantFailed(f"{TRL} reads other tokens than ours in the same prompts.")
        return Trained(done["step_s"][warmup:], done["tokens"][warmup:])


class OurRuns:
    """Runs of ours in the `local` runtime: the driver here, rollout and trainer as processes."""

    def __init__(self, work: Work, model: Path, folder: Path, reporter: Reporter) -> None:
        from dora_rl.tasks.encoding import Encoder
        from dora_rl.tasks.settings import TaskSettings

        self.work = work
        self._model, self._folder, self._reporter = model, folder, reporter
        self._encoder = Encoder(model, TaskSettings())
        self._runs = 0

    def encode(self, question: str) -> list[int]:
        from dora_rl.tasks.prompts import Prompt

        return self._encoder.encode(Prompt(position=0, text=question))

    def prepare(self, way: Split, steps: int) -> "Plan":
        """Check what a run would be given; nothing is written."""
        from dora_rl.runtime.prepare.plan import prepare, read_config

        total = way.warmup + steps + way.tail
        config = self._config(way, total, self._folder / f"run-{self._runs}")
        rows = [{"prompt": question} for question in questions(self.work.prompts * total)]
        return prepare(read_config(config), prompts=rows)

    def train(self, way: Split, steps: int) -> Trained:
        from dora_rl.benchmarks.training import execute_told

        self._runs += 1
        self._reporter.phase(f"{OURS}: {steps} steps, {way.title}")
        plan = self.prepare(way, steps)
        run = execute_told(plan, self._reporter)
        shutil.rmtree(plan.out, ignore_errors=True)  # weights and a checkpoint each
        if not run.ok:
            why = "the audit found a broken promise" if run.ending.ok else run.ending.reason
            raise ContestantFailed(f"a run of {OURS} failed ({way.title}): {why}.")
        return _measured(way, steps, self.work.batch, run.steps)

    def _config(self, way: Split, steps: int, out: Path) -> dict[str, Any]:
        work = self.work
        return {
            "model": {"path": str(self._model)},
            "task": {"shuffle": False, "reward": _REWARD, "reward_workers": 1},
            "algorithm": {"preset": "grpo"},
            "train": {"learning_rate": LEARNING_RATE},
            "rollout": {"slots": work.batch, "max_tokens": work.max_tokens},
            "orchestration": {
                "paradigm": way.paradigm,
                "groups_per_step": work.prompts,
                "group_size": work.group_size,
                "max_staleness": way.max_staleness,
            },
            "runtime": {
                "rollout_threads": way.rollout_threads,
                "train_threads": way.train_threads,
            },
            "run": {"steps": steps, "seed": SEED, "out": str(out)},
        }


def _measured(way: Split, steps: int, batch: int, records: Sequence["StepRecord"]) -> Trained:
    """The steps between warm-up and tail."""
    window = records[way.warmup : way.warmup + steps]
    if len(records) != way.warmup + steps + way.tail or any(
        record.trajectories != batch for record in window
    ):
        raise ContestantFailed(
            f"{OURS} trained {[r.trajectories for r in records]} trajectories in its steps, not "
            f"{batch} in each of {way.warmup + steps + way.tail}."
        )
    return Trained([r.step_s for r in window], [r.tokens for r in window])
