"""How fast the embedded engine generates, beside other engines and the machine's own limits.

Every contestant is a process that loads once and is then asked in turn: for each batch size and
repeat, ours and the others, in an order that is reversed every time. So a noisy moment hits all of
them, and only one computes at a time.

    prefill_s   time for exactly one token of every sequence of a batch, from fresh prompts
    total_s     the same for N tokens, from other fresh prompts
    decode      batch * (N - 1) / (total_s - prefill_s) tokens per second

All sample at temperature 1 from all of the vocabulary, never stop early, and give the
log-probability of every token. Rates are medians over the repeats.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from dora_rl.benchmarks import limits
from dora_rl.benchmarks.contestants import common, roster
from dora_rl.benchmarks.contestants.process import ContestantGroup, start_all
from dora_rl.benchmarks.contestants.samples import (
    WARM_TOKENS,
    Samples,
    rate,
    ratio,
    seconds_of,
    table,
    times,
)
from dora_rl.benchmarks.dtypes import DtypeChoice, open_in_best_dtype
from dora_rl.benchmarks.limits import Limits, Roofline
from dora_rl.benchmarks.models import Model, check_model, context_of
from dora_rl.benchmarks.reporting import Reporter, repeats

DEFAULT_MODEL = "smollm2"
DEFAULT_BATCHES = (1, 8, 32, 64, 128)
DEFAULT_PROMPT_TOKENS = 32
DEFAULT_NEW_TOKENS = 32
DEFAULT_REPEATS = 3
DEFAULT_PHASE_SECONDS = 120.0
# Decode rate over that of the others, and over the roofline. vLLM must be reached at every batch
# size, the other two hold at one.
GOALS = {"ours/hf": 4.0, "ours/vllm": 1.0, "roofline_share": 0.5}
GOAL_BATCH = 32  # or the largest, where that was not measured
_BUSY = 0.05  # of a processor: an idle contestant that uses more disturbs the others


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be measured; refuses what cannot be."""

    model: str = DEFAULT_MODEL
    against: tuple[str, ...] = ()
    batches: tuple[int, ...] = DEFAULT_BATCHES
    prompt_tokens: int = DEFAULT_PROMPT_TOKENS
    new_tokens: int = DEFAULT_NEW_TOKENS
    repeats: int = DEFAULT_REPEATS
    threads: int = field(default_factory=common.default_threads)
    dtype: str | None = None  # what this machine is good at
    phase_seconds: float = DEFAULT_PHASE_SECONDS  # of the repeats of a batch size

    def __post_init__(self) -> None:
        common.check_numbers("--batches", self.batches, "1,8,32")
        common.check_number("--prompt-tokens", self.prompt_tokens)
        common.check_number(
            "--new-tokens", self.new_tokens, 2, "The first one belongs to reading the prompt."
        )
        common.check_number("--repeats", self.repeats)
        common.check_threads(self.threads)
        common.check_dtype(self.dtype)
        common.check_phase(self.phase_seconds)
        roster.check_others(self.against)
        check_model(self.model)

    @property
    def names(self) -> tuple[str, ...]:
        return (roster.OURS, *self.against)

    @property
    def shape(self) -> roster.Shape:
        return roster.Shape(max(self.batches), self.prompt_tokens, self.new_tokens, self.threads)


@dataclass(frozen=True, slots=True)
class Result:
    """Of an interrupted measurement it has what there is: batch sizes, and contestants in each."""

    plan: Plan
    model: Model
    choice: DtypeChoice
    limits: Limits
    batches: Mapping[int, Mapping[str, Samples]]
    about: Mapping[str, Mapping[str, Any]]
    idle_shares: Mapping[str, float]
    notes: Sequence[str]

    def roofline(self, batch: int, dtype: str | None = None) -> Roofline:
        """The limit of decoding; operations at the peak of the model's numbers, or of others."""
        config = self.model.config
        tokens = limits.mean_kv_tokens(self.plan.prompt_tokens, self.plan.new_tokens)
        work = limits.decode_work(config, batch, tokens)
        return limits.roofline(work, self.limits, dtype or config.dtype)

    def roofline_share(self, batch: int) -> float | None:
        return ratio(self._decode(batch, roster.OURS), self.roofline(batch).tokens_per_s)

    def ratio(self, batch: int, other: str) -> float | None:
        """Decode rate of ours, over that of another."""
        return ratio(self._decode(batch, roster.OURS), self._decode(batch, other))

    def prefill_ratio(self, batch: int, other: str) -> float | None:
        return ratio(self._prefill(batch, roster.OURS), self._prefill(batch, other))

    def goals(self) -> dict[str, dict[str, Any]]:
        at = GOAL_BATCH if GOAL_BATCH in self.batches else max(self.batches)
        measured: dict[str, float | None] = {"roofline_share": self.roofline_share(at)}
        if "hf" in self.plan.against:
            measured["ours/hf"] = self.ratio(at, "hf")
        if "vllm" in self.plan.against:
            ratios = [self.ratio(batch, "vllm") for batch in self.batches]
            measured["ours/vllm"] = _least(ratios)
        return {
            name: {
                "wanted": GOALS[name],
                "measured": value,
                "met": value is not None and value >= GOALS[name],
            }
            for name, value in measured.items()
        }

    def to_json(self) -> dict[str, Any]:
        plan = self.plan
        return {
            "model": self.model.to_json(),
            "dtype_choice": self.choice.to_json(),
            "threads": plan.threads,
            "prompt_tokens": plan.prompt_tokens,
            "new_tokens": plan.new_tokens,
            "repeats": plan.repeats,
            "limits": self.limits.to_json(),
            "batches": {str(batch): self._batch_json(batch) for batch in self.batches},
            "goals": self.goals(),
            "contestants": {
                name: {**about, "idle_cpu_share": self.idle_shares[name]}
                for name, about in self.about.items()
            },
            "notes": self._notes(),
        }

    def summary(self) -> list[str]:
        plan, names = self.plan, self.plan.names
        lines = [
            f"{self.model.title}, {self.model.config.dtype}, {plan.threads} threads, "
            f"{plan.prompt_tokens} tokens read and {plan.new_tokens} generated, "
            f"median of {plan.repeats}",
        ]
        columns = [
            ("", ["batch"]),
            ("decode tokens/s", names),
            ("", [f"ours/{other}" for other in plan.against]),
            ("roofline", ["tokens/s", "share"]),
            ("prefill tokens/s", names),
        ]
        rows = [
            [
                str(batch),
                *(rate(self._decode(batch, name)) for name in names),
                *(times(self.ratio(batch, other)) for other in plan.against),
                rate(self.roofline(batch).tokens_per_s),
                times(self.roofline_share(batch)),
                *(rate(self._prefill(batch, name)) for name in names),
            ]
            for batch in self.batches
        ]
        lines += table(columns, rows)
        peaks = ", ".join(f"{v / 1e9:.0f} in {k}" for k, v in self.limits.mm_flops_per_s.items())
        lines.append(
            f"The machine: {self.limits.bandwidth_bytes_per_s / 1e9:.1f} GB/s read, "
            f"GFLOP/s of torch.mm: {peaks}."
        )
        for name, goal in self.goals().items():
            met = "met" if goal["met"] else "not met"
            lines.append(f"Goal {name} >= {goal['wanted']:g}: {times(goal['measured'])}, {met}.")
        return lines + [f"Note: {note}." for note in self._notes()]

    def _decode(self, batch: int, name: str) -> float | None:
        samples = self.batches[batch].get(name)
        return None if samples is None else samples.decode_tokens_per_s

    def _prefill(self, batch: int, name: str) -> float | None:
        samples = self.batches[batch].get(name)
        return None if samples is None else samples.prefill_tokens_per_s

    def _batch_json(self, batch: int) -> dict[str, Any]:
        best, against = self.roofline(batch), self.plan.against
        return {
            **{name: samples.to_json() for name, samples in self.batches[batch].items()},
            "roofline_tokens_per_s": best.tokens_per_s,
            "roofline_share": self.roofline_share(batch),
            # By the numbers that the operations are done in; the bytes are the model's.
            "rooflines": {
                dtype: self.roofline(batch, dtype).to_json() for dtype in self.limits.mm_flops_per_s
            },
            "ratios": {f"ours/{other}": self.ratio(batch, other) for other in against},
            "prefill_ratios": {
                f"ours/{other}": self.prefill_ratio(batch, other) for other in against
            },
        }

    def _notes(self) -> list[str]:
        said = [f"{name}: {note}" for name, a in self.about.items() for note in a["notes"]]
        busy = [
            f"{name} used {share:.0%} of a processor while another one was measured"
            for name, share in self.idle_shares.items()
            if share > _BUSY
        ]
        noisy = [
            f"batch {batch}, {name}: {samples.lost} of {len(samples.seconds)} repeats do not "
            "count: one token took longer than all of them"
            for batch, row in self.batches.items()
            for name, samples in row.items()
            if samples.lost
        ]
        return [note.rstrip(".") for note in (*self.notes, *said, *busy, *noisy)]


def measure(plan: Plan, reporter: Reporter | None = None) -> Result:
    """Start all contestants, and ask them in turn."""
    reporter = reporter or Reporter()
    with common.ready("dora-rl bench engine") as (work, notes), ExitStack() as stack:
        longest = plan.prompt_tokens + plan.new_tokens
        common.check_context(context_of(plan.model), longest, "--prompt-tokens and --new-tokens")
        model, choice = open_in_best_dtype(plan.model, plan.dtype, work, reporter)
        starts = [
            roster.ours(model, plan.shape, work),
            *(roster.other(name, model, plan.shape) for name in plan.against),
            roster.machine(plan.threads),
        ]
        company = ContestantGroup(start_all(stack, starts, work, reporter))
        notes += [choice.reason] if choice.reason else []
        run = _Run(plan, model, choice, company, notes, reporter)
        reporter.collects(run.result)
        return run.all()


class _Run:
    """Who is asked for what, in which order; and what they took."""

    def __init__(
        self,
        plan: Plan,
        model: Model,
        choice: DtypeChoice,
        company: ContestantGroup,
        notes: list[str],
        reporter: Reporter,
    ) -> None:
        self._plan, self._model, self._choice = plan, model, choice
        self._company, self._notes, self._reporter = company, notes, reporter
        self._about = {name: company.ask(name, "about") for name in plan.names}
        self._limits: Limits | None = None
        self._taken: dict[int, dict[str, list[tuple[float, float]]]] = {}

    def all(self) -> Result:
        for batch in sorted(self._plan.batches):
            self._reporter.phase("the limits of the machine")
            seen = Limits.from_json(self._company.ask(roster.MACHINE, "limits"))
            self._limits = seen if self._limits is None else self._limits.best(seen)
            self._reporter.phase(f"batch {batch}")
            self._batch(batch)
        whole = self.result()
        assert whole is not None
        return whole

    def result(self) -> Result | None:
        """What there is so far."""
        plan = self._plan
        batches = {
            batch: {
                name: Samples(batch, plan.prompt_tokens, plan.new_tokens, list(seconds))
                for name, seconds in row.items()
                if seconds
            }
            for batch, row in self._taken.items()
            if any(row.values())
        }
        if self._limits is None or not batches:
            return None
        return Result(
            plan,
            self._model,
            self._choice,
            self._limits,
            batches,
            self._about,
            self._company.idle_shares(),
            self._notes,
        )

    def _batch(self, batch: int) -> None:
        plan, names = self._plan, self._plan.names
        taken = self._taken[batch] = {name: [] for name in names}
        for name in names:
            self._reporter.step(f"{name} warms up")
            self._ask(name, "warm", batch, min(WARM_TOKENS, plan.new_tokens))
        for repeat in repeats(plan.repeats, plan.phase_seconds):
            for name in names if repeat % 2 == 0 else reversed(names):
                self._reporter.step(f"repeat {repeat + 1} of {plan.repeats}: {name}")
                prefill_s = self._ask(name, f"{repeat}/prefill", batch, 1)
                total_s = self._ask(name, f"{repeat}/total", batch, plan.new_tokens)
                taken[name].append((prefill_s, total_s))
        done = len(taken[roster.OURS])
        if done < plan.repeats:
            few = common.fewer(done, plan.repeats, plan.phase_seconds)
            self._notes.append(f"batch {batch}: {few}")

    def _ask(self, name: str, what: str, batch: int, new_tokens: int) -> float:
        """Seconds for one batch; all contestants get the same prompts for the same `what`."""
        config, tokens = self._model.config, self._plan.prompt_tokens
        prompts = common.prompts(f"{batch}/{what}", config, batch, tokens)
        done = self._company.ask(name, "generate", prompts=prompts, new_tokens=new_tokens)
        return seconds_of(name, done, batch * new_tokens)


def _least(values: Sequence[float | None]) -> float | None:
    """Of values that must all be there: a goal is not met by what was not measured."""
    there = [value for value in values if value is not None]
    return min(there) if len(there) == len(values) else None
