"""What several live versions cost: decode rates of one batch whose rows are of several versions.

One engine holds all versions, with different weights. The batch size stays the same, its rows are
split evenly. The numbers of versions take turns, in an order that is reversed every time. Times
are defined as in `engine`.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from dora_rl.benchmarks.contestants import common, roster
from dora_rl.benchmarks.contestants.process import Contestant, start_all
from dora_rl.benchmarks.contestants.samples import (
    WARM_TOKENS,
    Samples,
    rate,
    ratio,
    seconds_of,
    times,
)
from dora_rl.benchmarks.dtypes import DtypeChoice, open_in_best_dtype
from dora_rl.benchmarks.models import Model, check_model, context_of
from dora_rl.benchmarks.reporting import Reporter, repeats
from dora_rl.core.protocol.errors import UserError

DEFAULT_MODEL = "smollm2"
DEFAULT_BATCH = 32
DEFAULT_VERSIONS = (1, 2, 4)
DEFAULT_PROMPT_TOKENS = 32
DEFAULT_NEW_TOKENS = 32
DEFAULT_REPEATS = 5
DEFAULT_PHASE_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be measured; refuses what cannot be."""

    model: str = DEFAULT_MODEL
    batch: int = DEFAULT_BATCH
    versions: tuple[int, ...] = DEFAULT_VERSIONS
    prompt_tokens: int = DEFAULT_PROMPT_TOKENS
    new_tokens: int = DEFAULT_NEW_TOKENS
    repeats: int = DEFAULT_REPEATS
    threads: int = field(default_factory=common.default_threads)
    dtype: str | None = None  # what this machine is good at
    phase_seconds: float = DEFAULT_PHASE_SECONDS  # of all repeats

    def __post_init__(self) -> None:
        common.check_number("--batch", self.batch)
        common.check_numbers("--versions", self.versions, "1,2,4")
        listed = ",".join(map(str, self.versions))
        if 1 not in self.versions:
            raise UserError(
                f"--versions must name 1, which the others are compared with: `{listed}`."
            )
        for versions in self.versions:
            if self.batch % versions:
                raise UserError(
                    f"--batch must be a multiple of {versions}, as its rows are split evenly over "
                    f"so many versions: `{self.batch}`."
                )
        common.check_number("--prompt-tokens", self.prompt_tokens)
        common.check_number(
            "--new-tokens", self.new_tokens, 2, "The first one belongs to reading the prompt."
        )
        common.check_number("--repeats", self.repeats)
        common.check_threads(self.threads)
        common.check_dtype(self.dtype)
        common.check_phase(self.phase_seconds)
        check_model(self.model)

    @property
    def shape(self) -> roster.Shape:
        return roster.Shape(self.batch, self.prompt_tokens, self.new_tokens, self.threads)


@dataclass(frozen=True, slots=True)
class Result:
    plan: Plan
    model: Model
    choice: DtypeChoice
    samples: Mapping[int, Samples]  # by the number of versions, of those that were measured
    notes: Sequence[str]

    def ratio(self, versions: int) -> float | None:
        """Decode rate with so many versions, over that with one."""
        one = self.samples[1].decode_tokens_per_s  # is measured first
        return ratio(self.samples[versions].decode_tokens_per_s, one)

    def to_json(self) -> dict[str, Any]:
        plan = self.plan
        return {
            "model": self.model.to_json(),
            "dtype_choice": self.choice.to_json(),
            "threads": plan.threads,
            "batch": plan.batch,
            "prompt_tokens": plan.prompt_tokens,
            "new_tokens": plan.new_tokens,
            "repeats": plan.repeats,
            "versions": {str(count): s.to_json() for count, s in self.samples.items()},
            "ratios": {f"{count}/1": self.ratio(count) for count in self.samples if count != 1},
            "notes": list(self.notes),
        }

    def summary(self) -> list[str]:
        plan = self.plan
        lines = [
            f"{self.model.title}, {self.model.config.dtype}, {plan.threads} threads, batch "
            f"{plan.batch}, {plan.prompt_tokens} tokens read and {plan.new_tokens} generated, "
            f"median of {plan.repeats}",
            f"{'versions':>8} {'rows each':>9} {'decode tokens/s':>15} {'to 1 version':>12} "
            f"{'prefill tokens/s':>16}",
        ]
        for count, samples in self.samples.items():
            lines.append(
                f"{count:>8} {plan.batch // count:>9} {rate(samples.decode_tokens_per_s):>15} "
                f"{times(self.ratio(count)):>12} {rate(samples.prefill_tokens_per_s):>16}"
            )
        return lines + [f"Note: {note}" for note in self.notes]


def measure(plan: Plan, reporter: Reporter | None = None) -> Result:
    """Start an engine with as many versions as the most, and let the numbers take turns."""
    reporter = reporter or Reporter()
    with common.ready("dora-rl bench versions") as (work, notes), ExitStack() as stack:
        longest = plan.prompt_tokens + plan.new_tokens
        common.check_context(context_of(plan.model), longest, "--prompt-tokens and --new-tokens")
        model, choice = open_in_best_dtype(plan.model, plan.dtype, work, reporter)
        notes += [choice.reason] if choice.reason else []
        start = roster.ours(model, plan.shape, work, versions=max(plan.versions))
        (ours,) = start_all(stack, [start], work, reporter)
        counts = sorted(plan.versions)
        taken: dict[int, list[tuple[float, float]]] = {count: [] for count in counts}

        def result() -> Result:
            samples = {
                count: Samples(plan.batch, plan.prompt_tokens, plan.new_tokens, list(seconds))
                for count, seconds in taken.items()
                if seconds
            }
            return Result(plan, model, choice, samples, notes)

        reporter.collects(lambda: result() if any(taken.values()) else None)
        reporter.phase("warming up")
        for count in counts:
            reporter.step(f"{count} versions")
            _ask(plan, model, ours, count, "warm", min(WARM_TOKENS, plan.new_tokens))
        done = 0
        reporter.phase("measuring")
        for repeat in repeats(plan.repeats, plan.phase_seconds):
            for count in counts if repeat % 2 == 0 else reversed(counts):
                reporter.step(f"repeat {repeat + 1} of {plan.repeats}: {count} versions")
                prefill_s = _ask(plan, model, ours, count, f"{repeat}/prefill", 1)
                total_s = _ask(plan, model, ours, count, f"{repeat}/total", plan.new_tokens)
                taken[count].append((prefill_s, total_s))
            done += 1
        if done < plan.repeats:
            notes.append(common.fewer(done, plan.repeats, plan.phase_seconds))
        return result()


def _ask(
    plan: Plan, model: Model, ours: Contestant, versions: int, what: str, new_tokens: int
) -> float:
    """Seconds for one batch of fresh prompts."""
    prompts = common.prompts(f"{versions}/{what}", model.config, plan.batch, plan.prompt_tokens)
    done = ours.ask("generate", prompts=prompts, new_tokens=new_tokens, versions=versions)
    return seconds_of(ours.name, done, plan.batch * new_tokens)
