"""Whole training against TRL's `GRPOTrainer` on the CPU: tokens trained per second of wall time.

Same model, questions, reward, learning rate, group size, lengths and loss; every processor for
each, one after the other. Each side takes its own best way of working, which a short search finds:

    trl    float32, autocast or bfloat16; sequences in one forward pass
    ours   training and rollout in turns, or at once on shares of the processors

Ours trains in float32 and generates in the dtype of the model's files.

Steps are counted from the end of the one before. Where ours works ahead, warm-up fills its
pipeline and a few more steps follow, so that what is measured neither finds work done nor leaves
work undone.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import dora_rl
from dora_rl import extras
from dora_rl.benchmarks.contestants import common
from dora_rl.benchmarks.contestants.process import Start, start_all
from dora_rl.benchmarks.contestants.trl_process import DTYPES
from dora_rl.benchmarks.contestants.trl_runs import (
    OURS,
    TRL,
    Choice,
    OurRuns,
    Split,
    Trained,
    TrlRuns,
    Work,
    questions,
)
from dora_rl.benchmarks.dtypes import open_in_best_dtype
from dora_rl.benchmarks.models import TINY, Model, check_model
from dora_rl.benchmarks.reporting import Reporter
from dora_rl.core.protocol.errors import UserError
from dora_rl.machine.processor import cores

DEFAULT_MODEL = "smollm2"
DEFAULT_STEPS = 5
DEFAULT_PROMPTS = 4
DEFAULT_GROUP_SIZE = 8
DEFAULT_MAX_TOKENS = 128
DEFAULT_SEARCH_STEPS = 2
USER = "dora-rl bench trl"
GOAL = 5.0  # times as many tokens per second
_FILE = Path(__file__).with_name("contestants") / "trl_process.py"
_FIRST_PER_DEVICE = 8  # sequences in one forward pass: TRL's default
Way = TypeVar("Way", Split, Choice)
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
    search_steps: int = DEFAULT_SEARCH_STEPS
    """Measured steps of ours for each candidate, TRL takes one; 0 is no search."""
    trl_python: str | None = None

    def __post_init__(self) -> None:
        common.check_number("--steps", self.steps)
        common.check_number("--prompts", self.prompts)
        common.check_number("--group-size", self.group_size, 2, "GRPO compares within a group.")
        common.check_number("--max-tokens", self.max_tokens)
        common.check_number("--search-steps", self.search_steps, 0, "0 is no search.")
        if self.model == TINY:
            raise UserError(
                f"`{TINY}` has no tokenizer. Use smollm2, quickstart, or a model directory."
            )
        check_model(self.model)

    @property
    def work(self) -> Work:
        return Work(self.prompts, self.group_size, self.max_tokens)


@dataclass(slots=True)
class Side:
    """What one side reached, how, and what else was tried; filled as the measurement goes."""

    trained: Trained | None = None
    best: Split | Choice | None = None
    tried: list[tuple[Split | Choice, float]] = field(default_factory=list)
    """With tokens per second, in short runs."""

    def to_json(self) -> dict[str, Any]:
        searched = [{**way.to_json(), "tokens_per_s": rate} for way, rate in self.tried]
        reached = {} if self.trained is None else self.trained.to_json()
        way = {} if self.best is None else self.best.to_json()
        return {**reached, **way, "searched": searched}


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
    def ratio(self) -> float | None:
        """How many times as many tokens per second ours trains."""
        if self.ours.trained is None or self.trl.trained is None:
            return None
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
            "ours": {
                **self.ours.to_json(),
                "dtype": "float32",
                "rollout_dtype": self.model.config.dtype,
            },
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
            if trained is not None and side.best is not None:
                lines.append(
                    f"{name:>5} {trained.tokens_per_s:>9.1f} "
                    f"{trained.seconds / len(trained.step_s):>8.2f} {len(trained.step_s):>6} "
                    f"{sum(trained.tokens):>8,}  {side.best.title}"
                )
        if self.ratio is not None:
            lines.append(f"Ratio {self.ratio:.2f} (goal {GOAL:g}), TRL {self.version}.")
        for name, side in ((TRL, self.trl), (OURS, self.ours)):
            tried = "; ".join(f"{way.title}: {rate:.1f}" for way, rate in side.tried)
            if tried:
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


def measure(plan: Plan, reporter: Reporter | None = None) -> Result:
    """Search on both sides, then measure both."""
    reporter = reporter or Reporter()
    python = trl_python(plan.trl_python)
    extras.require(USER, "engine", "train")
    with common.ready(USER) as (work, notes):
        threads = cores()
        model, choice = open_in_best_dtype(plan.model, None, work, reporter)
        notes += [choice.reason] if choice.reason else []
        ways = splits(threads)
        run = _ours(plan, model, work, reporter)
        for way in ways:
            run.prepare(way, plan.steps)  # what is wrong is said before TRL takes its time
        trl, ours = Side(), Side()
        with ExitStack() as stack:
            start = _start(python, model, work, threads)
            (child,) = start_all(stack, [start], work, reporter)
            result = Result(
                plan, model, threads, str(child.ask("about")["version"]), trl, ours, notes
            )
            reporter.collects(lambda: result if trl.tried or trl.trained else None)
            _measure_trl(TrlRuns(plan.work, child, run.encode, reporter), plan, trl)
        _measure_ours(run, ways, plan, ours)
        return result


def _ours(plan: Plan, model: Model, work: Path, reporter: Reporter) -> OurRuns:
    if not (model.directory / "tokenizer.json").is_file():
        raise UserError(f"no tokenizer.json in `{model.directory}`. Give a model with a tokenizer.")
    run = OurRuns(plan.work, model.directory, work, reporter)
    longest = max(len(run.encode(question)) for question in questions(plan.prompts))
    common.check_context(
        model.config.context, longest + plan.max_tokens, "the prompts and --max-tokens"
    )
    return run


def _start(python: Path, model: Model, work: Path, threads: int) -> Start:
    settings = {"directory": str(model.directory), "work": str(work), "threads": threads}
    # Caches go with the directory of the run.
    env = {**_ENV, "OMP_NUM_THREADS": str(threads), "HF_HOME": str(work / "huggingface")}
    return Start(TRL, [str(python), "-I"], _FILE, settings, env)


def _measure_trl(run: TrlRuns, plan: Plan, side: Side) -> None:
    """First the numbers, then the size of a pass, one step each; then the best of all."""
    batch = run.work.batch
    sizes = [size for size in range(1, batch + 1) if batch % size == 0]
    first = max(size for size in sizes if size <= _FIRST_PER_DEVICE)
    best = Choice("float32", first)
    if plan.search_steps:
        tried: dict[Choice, float] = {}

        def attempt(way: Choice) -> None:
            tried[way] = run.train(way, 1, 0).tokens_per_s
            side.tried.append((way, tried[way]))

        run.train(best, 1, 0)  # the first step of a process is slow: not counted
        for dtype in DTYPES:
            attempt(Choice(dtype, first))
        for size in _beside(sizes, first):
            attempt(Choice(_best(tried).dtype, size))
        best = _best(tried)
    trained = run.train(best, plan.steps, 1)
    side.best, side.trained = best, trained


def _beside(sizes: Sequence[int], first: int) -> list[int]:
    """The next smaller size, and the next two larger ones."""
    place = sizes.index(first)
    return [*sizes[max(0, place - 1) : place], *sizes[place + 1 : place + 3]]


def _measure_ours(run: OurRuns, ways: Sequence[Split], plan: Plan, side: Side) -> None:
    best = ways[0]
    if plan.search_steps:
        tried: dict[Split, float] = {}
        for way in ways:
            tried[way] = run.train(way, plan.search_steps).tokens_per_s
            side.tried.append((way, tried[way]))
        best = _best(tried)
    trained = run.train(best, plan.steps)
    side.best, side.trained = best, trained


def _best(tried: Mapping[Way, float]) -> Way:
    return max(tried, key=lambda way: tried[way])
