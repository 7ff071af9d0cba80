"""Whole training against TRL's `GRPOTrainer` on the CPU: tokens trained per second of wall time.

Same model, questions, reward, learning rate, group size, lengths and loss; every processor for
each, one after the other. Each side takes its own best way of working, which a short search finds:

    trl    float32, autocast or bfloat16; sequences in one forward pass
    ours   training and rollout in turns, or at once on shares of the processors

Steps are counted from the end of the one before. Where ours works ahead, warm-up fills its
pipeline and a few more steps follow, so that what is measured neither finds work done nor leaves
work undone.
"""

import os
import random
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import dora_rl
from dora_rl.benchmarks.contestants import arena
from dora_rl.benchmarks.contestants.process import (
    Contestant,
    ContestantFailed,
    Start,
    start_all,
)
from dora_rl.benchmarks.contestants.trl_process import DTYPES
from dora_rl.benchmarks.models import TINY, Model, check_model, open_model
from dora_rl.core.errors import UserError

if TYPE_CHECKING:
    from dora_rl.runtime.recording import StepRecord

DEFAULT_MODEL = "smollm2"
DEFAULT_STEPS = 5
DEFAULT_PROMPTS = 4
DEFAULT_GROUP_SIZE = 8
DEFAULT_MAX_TOKENS = 128
GOAL = 5.0  # times as many tokens per second
LEARNING_RATE = 1e-6
SEED = 0
TRL, OURS = "trl", "ours"
_FILE = Path(__file__).with_name("contestants") / "trl_process.py"
_REWARD = "dora_rl.benchmarks.contestants.trl_process:reward"
_SEARCH_STEPS = 2  # measured steps of ours for each candidate
_STEP_TIMEOUT_S = 1800.0  # of TRL; a step of the default size takes one to two minutes
_FIRST_PER_DEVICE = 8  # sequences in one forward pass: TRL's default
_ENV = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TQDM_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be measured; refuses what cannot be."""

    model: str = DEFAULT_MODEL
    steps: int = DEFAULT_STEPS
    prompts: int = DEFAULT_PROMPTS
    group_size: int = DEFAULT_GROUP_SIZE
    max_tokens: int = DEFAULT_MAX_TOKENS
    trl_python: str | None = None

    def __post_init__(self) -> None:
        arena.check_number("--steps", self.steps)
        arena.check_number("--prompts", self.prompts)
        arena.check_number("--group-size", self.group_size, 2, "GRPO compares within a group.")
        arena.check_number("--max-tokens", self.max_tokens)
        if self.model == TINY:
            raise UserError(f"`{TINY}` has no tokenizer. Use smollm2, or a model directory.")
        check_model(self.model)

    @property
    def batch(self) -> int:
        """Completions of a step."""
        return self.prompts * self.group_size


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
        """Steps after the measured ones, for which work goes on while those are measured."""
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


Way = TypeVar("Way", Split, Choice)


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


@dataclass(frozen=True, slots=True)
class Side:
    """What one side reached, how, and what else was tried."""

    trained: Trained
    best: Split | Choice
    tried: Sequence[tuple[Split | Choice, float]]
    """With tokens per second, in short runs."""

    def to_json(self) -> dict[str, Any]:
        searched = [{**way.to_json(), "tokens_per_s": rate} for way, rate in self.tried]
        return {**self.trained.to_json(), **self.best.to_json(), "searched": searched}


@dataclass(frozen=True, slots=True)
class Result:
    plan: Plan
    model: Model
    threads: int
    version: str  # of TRL
    trl: Side
    ours: Side
    notes: Sequence[str]

    @property
    def ratio(self) -> float:
        """How many times as many tokens per second ours trains."""
        return self.ours.trained.tokens_per_s / self.trl.trained.tokens_per_s

    def to_json(self) -> dict[str, Any]:
        plan = self.plan
        return {
            "model": self.model.to_json(),
            "threads": self.threads,
            "prompts": plan.prompts,
            "group_size": plan.group_size,
            "max_tokens": plan.max_tokens,
            "trl": {**self.trl.to_json(), "version": self.version},
            "ours": {**self.ours.to_json(), "dtype": "float32"},
            "ratio": self.ratio,
            "goal": GOAL,
            "notes": list(self.notes),
        }

    def summary(self) -> list[str]:
        plan = self.plan
        lines = [
            f"{self.model.title}, {self.threads} threads, {plan.prompts} prompts x "
            f"{plan.group_size} responses of at most {plan.max_tokens} tokens a step",
            f"{'':>5} {'tokens/s':>9} {'step s':>8} {'steps':>6} {'tokens':>8}  way of working",
        ]
        for name, side in ((TRL, self.trl), (OURS, self.ours)):
            trained = side.trained
            lines.append(
                f"{name:>5} {trained.tokens_per_s:>9.1f} "
                f"{trained.seconds / len(trained.step_s):>8.2f} {len(trained.step_s):>6} "
                f"{sum(trained.tokens):>8,}  {side.best.title}"
            )
        lines.append(f"Ratio {self.ratio:.2f} (goal {GOAL:g}), TRL {self.version}.")
        for name, side in ((TRL, self.trl), (OURS, self.ours)):
            tried = "; ".join(f"{way.title}: {rate:.1f}" for way, rate in side.tried)
            lines.append(f"Searched for {name}, tokens/s: {tried}.")
        return lines + [f"Note: {note}" for note in self.notes]


def trl_python(named: str | None = None) -> Path:
    """The interpreter of the environment that has TRL."""
    if named is not None:
        if not os.access(named, os.X_OK) or not Path(named).is_file():
            raise UserError(
                f"--trl-python is not a program: `{named}`. Name the Python that has TRL, or leave "
                "it out and run: make venv-trl"
            )
        return Path(named)
    # Beside the sources, or beside the environment that this runs in.
    for root in (Path(dora_rl.__file__).parents[2], Path(sys.prefix).parent):
        python = root / ".venv-trl" / "bin" / "python"
        if os.access(python, os.X_OK):
            return python
    raise UserError(
        "TRL has an environment of its own, .venv-trl, and it is not there. Run: make venv-trl "
        "(or name a Python that has TRL with --trl-python)."
    )


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


def splits(cores: int) -> list[Split]:
    """Ways of working to try: in turns; at once on halves; at once, each wanting every core."""
    half = max(1, cores // 2)
    ways = [
        Split("sync", 0, cores, cores),
        Split("multi_version", 1, cores - half or 1, half),
        Split("multi_version", 1, cores, cores),
        Split("multi_version", 3, cores, cores),
    ]
    return list(dict.fromkeys(ways))


def measure(plan: Plan, progress: arena.Progress = lambda _: None) -> Result:
    """Search on both sides, then measure both."""
    python = trl_python(plan.trl_python)
    with arena.ready("dora-rl bench trl") as (work, notes):
        model = open_model(plan.model, None, work)
        _check(plan, model)
        threads = arena.processors()
        run = _Ours(plan, model, work, progress)
        with ExitStack() as stack:
            start = _start(python, model, work, threads)
            (child,) = start_all(stack, [start], work, progress)
            version = str(child.ask("about")["version"])
            trl = _measure_trl(_Trl(plan, child, run.encode, progress))
        ours = _measure_ours(run, splits(threads))
        return Result(plan, model, threads, version, trl, ours, notes)


def _check(plan: Plan, model: Model) -> None:
    if not (model.directory / "tokenizer.json").is_file():
        raise UserError(f"no tokenizer.json in `{model.directory}`. Give a model with a tokenizer.")
    arena.check_context(model.config, plan.max_tokens, "--max-tokens")


def _start(python: Path, model: Model, work: Path, threads: int) -> Start:
    settings = {"directory": str(model.directory), "work": str(work), "threads": threads}
    # Caches go with the directory of the run.
    env = {**_ENV, "OMP_NUM_THREADS": str(threads), "HF_HOME": str(work / "huggingface")}
    return Start(TRL, [str(python), "-I"], _FILE, settings, env)


def _measure_trl(run: "_Trl") -> Side:
    """First the numbers, then the size of a pass, one step each; then the best of all."""
    batch = run.plan.batch
    sizes = [size for size in range(1, batch + 1) if batch % size == 0]
    first = max(size for size in sizes if size <= _FIRST_PER_DEVICE)
    tried = {Choice(dtype, first): 0.0 for dtype in DTYPES}
    for way in tried:
        tried[way] = run.train(way, 1, 0).tokens_per_s
    dtype = _best(tried).dtype
    for size in _beside(sizes, first):
        way = Choice(dtype, size)
        tried[way] = run.train(way, 1, 0).tokens_per_s
    best = _best(tried)
    return Side(run.train(best, run.plan.steps, 1), best, list(tried.items()))


def _beside(sizes: Sequence[int], first: int) -> list[int]:
    """The next smaller size, and the next two larger ones."""
    place = sizes.index(first)
    return [*sizes[max(0, place - 1) : place], *sizes[place + 1 : place + 3]]


def _measure_ours(run: "_Ours", ways: Sequence[Split]) -> Side:
    tried = {way: run.train(way, _SEARCH_STEPS).tokens_per_s for way in ways}
    best = _best(tried)
    return Side(run.train(best, run.plan.steps), best, list(tried.items()))


def _best(tried: Mapping[Way, float]) -> Way:
    return max(tried, key=lambda way: tried[way])


class _Trl:
    """Runs of TRL, and a look at each: whether it did what was asked."""

    def __init__(
        self,
        plan: Plan,
        child: Contestant,
        encode: Callable[[str], list[int]],
        progress: arena.Progress,
    ) -> None:
        self.plan = plan
        self._child, self._encode, self._progress = child, encode, progress

    def train(self, way: Choice, steps: int, warmup: int) -> Trained:
        plan = self.plan
        self._progress(f"{TRL}: {steps} of {way.title}")
        asked = questions(plan.prompts * (warmup + steps))
        self._child.send(
            "train",
            questions=asked,
            num_steps=warmup + steps,
            group_size=plan.group_size,
            batch=plan.batch,
            per_device=way.per_device,
            max_tokens=plan.max_tokens,
            learning_rate=LEARNING_RATE,
            dtype=way.dtype,
            seed=SEED,
        )
        done = self._child.receive(_STEP_TIMEOUT_S * (warmup + steps))
        if done["completions"] != [plan.batch] * (warmup + steps):
            raise ContestantFailed(
                f"{TRL} trained {done['completions']} completions in its steps, not {plan.batch} "
                f"in each of {warmup + steps}."
            )
        if done["prompts"] != [self._encode(question) for question in asked]:
            raise ContestantFailed(f"{TRL} reads other tokens than ours in the same prompts.")
        return Trained(done["step_s"][warmup:], done["tokens"][warmup:])


class _Ours:
    """Runs of ours in the `local` runtime: the driver here, rollout and trainer as processes."""

    def __init__(self, plan: Plan, model: Model, work: Path, progress: arena.Progress) -> None:
        from dora_rl.tasks.encoding import Encoder
        from dora_rl.tasks.settings import TaskSettings

        self.plan = plan
        self._model, self._work, self._progress = model, work, progress
        self._encoder = Encoder(model.directory, TaskSettings())
        self._runs = 0

    def encode(self, question: str) -> list[int]:
        from dora_rl.tasks.prompts import Prompt

        return self._encoder.encode(Prompt(position=0, text=question))

    def train(self, way: Split, steps: int) -> Trained:
        from dora_rl.runtime.train import execute, prepare, read_config

        self._runs += 1
        self._progress(f"{OURS}: {steps} of {way.title}")
        total = way.warmup + steps + way.tail
        out = self._work / f"run-{self._runs}"
        config = read_config(self._config(way, total, out))
        rows = [{"prompt": question} for question in questions(self.plan.prompts * total)]
        run = execute(prepare(config, prompts=rows))
        shutil.rmtree(out, ignore_errors=True)  # weights and a checkpoint each
        if run.ending.interrupted:
            raise KeyboardInterrupt
        if not run.ok:
            raise ContestantFailed(f"a run of {OURS} ({way.title}) failed: {run.ending.reason}.")
        return _measured(way, steps, self.plan.batch, run.steps)

    def _config(self, way: Split, steps: int, out: Path) -> dict[str, Any]:
        plan = self.plan
        return {
            "model": {"path": str(self._model.directory)},
            "task": {"shuffle": False, "reward": _REWARD, "reward_workers": 1},
            "algorithm": {"preset": "grpo"},
            "train": {"learning_rate": LEARNING_RATE},
            "rollout": {"slots": plan.batch, "max_tokens": plan.max_tokens},
            "orchestration": {
                "paradigm": way.paradigm,
                "groups_per_step": plan.prompts,
                "group_size": plan.group_size,
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
