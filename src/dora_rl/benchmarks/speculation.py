"""What speculation gives where few trajectories run: the tail of a step.

The responses of a group go through an engine with few slots, with speculation and without, in
turns, each prompt in an order that is reversed every time. So the later ones of a group have
siblings that ended, as stragglers have. Both must write the same tokens.

Seconds are those that the process computed, over all threads: what other work took in between is
not counted. Of the repeats of a group the fastest counts.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from dora_rl.benchmarks.contestants import common, roster
from dora_rl.benchmarks.contestants.process import Contestant, start_all
from dora_rl.benchmarks.contestants.samples import rate, ratio, table, times
from dora_rl.benchmarks.dtypes import DtypeChoice, open_in_best_dtype
from dora_rl.benchmarks.models import QUICKSTART, Model, check_model, context_of
from dora_rl.benchmarks.reporting import Reporter, repeats
from dora_rl.engines.speculation import Speculation
from dora_rl.models.tokenizer import load_tokenizer
from dora_rl.tasks import chains

DEFAULT_MODEL = "smollm2"
DEFAULT_BATCHES = (1, 2, 4, 8)
WAYS = (Speculation.OFF, Speculation.ON)
_COMMAND = "dora-rl bench speculation"
_WARM_TOKENS = 8
_ROWS = 400  # of the quickstart's task, from which the longest are taken
_QUESTIONS = (
    "Natalia sold 48 clips in April, and half as many in May. How many did she sell altogether?",
    "Write a Python function that says whether a string is a palindrome, with tests.",
    "Explain how binary search works, with the numbers 1 to 10 as an example.",
    "What are the pros and cons of working from home? Answer as a list.",
    "Summarise the plot of a story about a robot that learns to paint, in ten sentences.",
    "A train goes 60 miles an hour for 2.5 hours, then 40 for 1.5. How far? Think step by step.",
)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be measured; refuses what cannot be."""

    model: str = DEFAULT_MODEL
    batches: tuple[int, ...] = DEFAULT_BATCHES
    prompts: int = 4
    group_size: int = 8
    max_tokens: int = 256
    repeats: int = 2
    threads: int = field(default_factory=common.default_threads)
    dtype: str | None = None  # what this machine is good at
    phase_seconds: float = 120.0  # of the repeats of a batch size

    def __post_init__(self) -> None:
        common.check_numbers("--batches", self.batches, "1,2,4")
        for name in ("prompts", "group_size", "max_tokens", "repeats"):
            common.check_number(f"--{name.replace('_', '-')}", getattr(self, name))
        common.check_threads(self.threads)
        common.check_dtype(self.dtype)
        common.check_phase(self.phase_seconds)
        check_model(self.model)


@dataclass(frozen=True, slots=True)
class Sums:
    """Of one way, over all prompts of a batch size."""

    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    proposed: int = 0
    accepted: int = 0

    def plus(self, taken: Mapping[str, Any]) -> "Sums":
        return Sums(
            self.seconds + taken["seconds"],
            self.tokens + sum(map(len, taken["written"])),
            self.steps + taken["steps"],
            self.proposed + taken["proposed"],
            self.accepted + taken["accepted"],
        )

    @property
    def tokens_per_s(self) -> float | None:
        return ratio(self.tokens, self.seconds)

    def to_json(self) -> dict[str, Any]:
        return {
            "tokens_per_s": self.tokens_per_s,
            "seconds": self.seconds,
            "tokens": self.tokens,
            "steps": self.steps,
            "proposed": self.proposed,
            "accepted": self.accepted,
        }


@dataclass(frozen=True, slots=True)
class Result:
    plan: Plan
    model: Model
    choice: DtypeChoice
    batches: Mapping[int, Mapping[Speculation, Sums]]
    differing: int  # responses that did not come out the same
    notes: Sequence[str]

    def ratio(self, batch: int) -> float | None:
        """Tokens per second with speculation, over those without."""
        off, on = (self.batches[batch][way].tokens_per_s for way in WAYS)
        return ratio(on, off)

    def to_json(self) -> dict[str, Any]:
        plan = self.plan
        return {
            "model": self.model.to_json(),
            "dtype_choice": self.choice.to_json(),
            "threads": plan.threads,
            "prompts": plan.prompts,
            "group_size": plan.group_size,
            "max_tokens": plan.max_tokens,
            "repeats": plan.repeats,
            "batches": {
                str(batch): {
                    **{str(way): sums.to_json() for way, sums in ways.items()},
                    "on/off": self.ratio(batch),
                }
                for batch, ways in self.batches.items()
            },
            "differing_responses": self.differing,
            "notes": list(self.notes),
        }

    def summary(self) -> list[str]:
        plan = self.plan
        lines = [
            f"{self.model.title}, {self.model.config.dtype}, {plan.threads} threads, "
            f"{plan.prompts} prompts with {plan.group_size} responses of {plan.max_tokens} tokens "
            f"at most, best of {plan.repeats}",
        ]
        columns = [
            ("", ["batch"]),
            ("tokens/s", [str(way) for way in WAYS]),
            ("on/off", ["tokens/s", "steps"]),
            ("of a step, on", ["proposed", "accepted"]),
        ]
        lines += table(columns, [self._row(batch) for batch in self.batches])
        lines.append(f"Responses that differ with speculation: {self.differing}.")
        return lines + [f"Note: {note}" for note in self.notes]

    def _row(self, batch: int) -> list[str]:
        off, on = (self.batches[batch][way] for way in WAYS)
        return [
            str(batch),
            rate(off.tokens_per_s),
            rate(on.tokens_per_s),
            times(self.ratio(batch)),
            times(ratio(on.steps, off.steps)),
            f"{on.proposed / on.steps:.2f}",
            f"{on.accepted / on.steps:.2f}",
        ]


def measure(plan: Plan, reporter: Reporter | None = None) -> Result:
    """Start a process with engines of both kinds, and let them take turns."""
    reporter = reporter or Reporter()
    with common.ready(_COMMAND) as (work, notes), ExitStack() as stack:
        model, choice = open_in_best_dtype(plan.model, plan.dtype, work, reporter)
        notes += [choice.reason] if choice.reason else []
        prompts = _prompts(plan, model)
        longest = max(map(len, prompts)) + plan.max_tokens
        common.check_context(context_of(plan.model), longest, "--max-tokens and a prompt")
        start = roster.siblings(model, plan.threads, work)
        (contestant,) = start_all(stack, [start], work, reporter)
        run = _Run(plan, contestant, prompts)
        found: dict[int, Mapping[Speculation, Sums]] = {}

        def result() -> Result:
            return Result(plan, model, choice, dict(found), run.differing, notes)

        reporter.collects(lambda: result() if found else None)
        for batch in sorted(plan.batches):
            reporter.phase(f"batch {batch}")
            found[batch] = run.batch(batch, reporter)
        return result()


class _Run:
    """One group after another, by both ways."""

    def __init__(self, plan: Plan, contestant: Contestant, prompts: list[list[int]]) -> None:
        self._plan, self._contestant, self._prompts = plan, contestant, prompts
        self.differing = 0

    def batch(self, batch: int, reporter: Reporter) -> Mapping[Speculation, Sums]:
        for way in WAYS:
            reporter.step(f"warms up, speculation {way}")
            self._ask(self._prompts[0], batch, _WARM_TOKENS, way)
        best: dict[tuple[int, Speculation], Mapping[str, Any]] = {}
        for repeat in repeats(self._plan.repeats, self._plan.phase_seconds):
            for number, prompt in enumerate(self._prompts):
                for way in WAYS if (repeat + number) % 2 == 0 else reversed(WAYS):
                    reporter.step(f"repeat {repeat + 1}, prompt {number + 1}, speculation {way}")
                    taken = self._ask(prompt, batch, self._plan.max_tokens, way)
                    kept = best.setdefault((number, way), taken)
                    if taken["seconds"] < kept["seconds"]:
                        best[number, way] = taken
        sums = {way: Sums() for way in WAYS}
        for (_, way), taken in best.items():
            sums[way] = sums[way].plus(taken)
        for number in range(len(self._prompts)):
            off, on = (best[number, way]["written"] for way in WAYS)
            self.differing += sum(ours != theirs for ours, theirs in zip(on, off, strict=True))
        return sums

    def _ask(
        self, prompt: list[int], batch: int, max_tokens: int, way: Speculation
    ) -> Mapping[str, Any]:
        taken: Mapping[str, Any] = self._contestant.ask(
            "respond",
            prompt=prompt,
            group_size=self._plan.group_size,
            slots=batch,
            max_tokens=max_tokens,
            speculation=str(way),
        )
        return taken


def _prompts(plan: Plan, model: Model) -> list[list[int]]:
    """The longest of the quickstart's task, or questions; without a tokenizer, random tokens."""
    tokenizer = load_tokenizer(model.directory)
    if tokenizer is None:
        return common.prompts("speculation", model.config, plan.prompts, 32)
    texts: Sequence[str] = _QUESTIONS
    if plan.model == QUICKSTART:
        rows = [chains.row(position, 0) for position in range(_ROWS)]
        texts = sorted((row["prompt"] for row in rows), key=lambda text: text[-3:], reverse=True)
    return [tokenizer.encode(texts[number % len(texts)]) for number in range(plan.prompts)]
