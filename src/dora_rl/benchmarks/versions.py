"""What several live versions cost: decode rates of one batch whose rows are of several versions.

One engine holds all versions, with different weights, or with different LoRA adapters of one base;
then a second one with the base alone shows what it costs to have adapters at all. The batch size
stays the same, its rows are split evenly. The numbers of versions take turns, in an order that is
reversed every time. Times are defined as in `engine`.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dora_rl.benchmarks.contestants import common, roster
from dora_rl.benchmarks.contestants.process import Contestant, Start, start_all
from dora_rl.benchmarks.contestants.samples import (
    WARM_TOKENS,
    Samples,
    rate,
    ratio,
    seconds_of,
    times,
)
from dora_rl.benchmarks.dtypes import DtypeChoice, open_in_best_dtype
from dora_rl.benchmarks.models import LORA_RANK, Model, check_model, context_of
from dora_rl.benchmarks.reporting import Reporter, repeats
from dora_rl.core.protocol.errors import UserError
from dora_rl.engines import registry
from dora_rl.engines.registry import EngineName
from dora_rl.weights.adapter import MAX_RANK

DEFAULT_MODEL = "smollm2"
DEFAULT_BATCH = 32
DEFAULT_VERSIONS = (1, 2, 4)
DEFAULT_PROMPT_TOKENS = 32
DEFAULT_NEW_TOKENS = 32
DEFAULT_REPEATS = 5
DEFAULT_PHASE_SECONDS = 300.0
NO_ADAPTER = 0  # versions of the turn that serves the base alone
_COMMAND = "dora-rl bench versions"


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
    engine: EngineName = EngineName.EMBEDDED
    lora: bool = False
    lora_rank: int | None = None  # 16, with `lora`

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
        self._check_lora()

    def _check_lora(self) -> None:
        if registry.most_versions(self.engine, 2, lora=self.lora) < 2:
            raise UserError(
                f"--engine {self.engine} holds one full set of weights, so that it serves several "
                "versions only as LoRA adapters. Add --lora."
            )
        if self.lora_rank is None:
            return
        if not self.lora:
            raise UserError(f"--lora-rank is of adapters: `{self.lora_rank}`. Add --lora.")
        if not 1 <= self.lora_rank <= MAX_RANK:
            raise UserError(f"--lora-rank must be from 1 to {MAX_RANK}: `{self.lora_rank}`.")

    @property
    def rank(self) -> int | None:
        """Of the adapters that versions are, if they are."""
        return (self.lora_rank or LORA_RANK) if self.lora else None

    @property
    def turns(self) -> list[int]:
        """The numbers of versions that take turns."""
        return sorted(self.versions) + ([NO_ADAPTER] if self.lora else [])

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
    no_adapter: Samples | None = None

    def ratio(self, versions: int) -> float | None:
        """Decode rate with so many versions, over that with one."""
        one = self.samples[1].decode_tokens_per_s  # is measured first
        return ratio(self.samples[versions].decode_tokens_per_s, one)

    def to_no_adapter(self, versions: int) -> float | None:
        """Decode rate with so many adapters, over that of the base in an engine without them."""
        if self.no_adapter is None:
            return None
        base = self.no_adapter.decode_tokens_per_s
        return ratio(self.samples[versions].decode_tokens_per_s, base)

    def to_json(self) -> dict[str, Any]:
        plan = self.plan
        ratios = {f"{count}/1": self.ratio(count) for count in self.samples if count != 1}
        if self.no_adapter is not None:
            ratios |= {f"{count}/no_adapter": self.to_no_adapter(count) for count in self.samples}
        return {
            "model": self.model.to_json(),
            "engine": str(plan.engine),
            "lora_rank": plan.rank,
            "dtype_choice": self.choice.to_json(),
            "threads": plan.threads,
            "batch": plan.batch,
            "prompt_tokens": plan.prompt_tokens,
            "new_tokens": plan.new_tokens,
            "repeats": plan.repeats,
            "versions": {str(count): s.to_json() for count, s in self.samples.items()},
            "no_adapter": self.no_adapter and self.no_adapter.to_json(),
            "ratios": ratios,
            "notes": list(self.notes),
        }

    def summary(self) -> list[str]:
        plan = self.plan
        what = f"LoRA adapters of rank {plan.rank}, " if plan.lora else ""
        lines = [
            f"{self.model.title}, {self.model.config.dtype}, {plan.engine} engine, {what}"
            f"{plan.threads} threads, batch {plan.batch}, {plan.prompt_tokens} tokens read and "
            f"{plan.new_tokens} generated, median of {plan.repeats}",
            f"{'versions':>10} {'rows each':>9} {'decode tokens/s':>15} {'to 1 version':>12} "
            + (f"{'to no adapter':>13} " if plan.lora else "")
            + f"{'prefill tokens/s':>16}",
        ]
        for count, samples in self.samples.items():
            of_base = f"{times(self.to_no_adapter(count)):>13} " if plan.lora else ""
            lines.append(
                f"{count:>10} {plan.batch // count:>9} {rate(samples.decode_tokens_per_s):>15} "
                f"{times(self.ratio(count)):>12} {of_base}{rate(samples.prefill_tokens_per_s):>16}"
            )
        if (base := self.no_adapter) is not None:
            lines.append(
                f"{'no adapter':>10} {plan.batch:>9} {rate(base.decode_tokens_per_s):>15} "
                f"{'':>12} {times(1.0):>13} {rate(base.prefill_tokens_per_s):>16}"
            )
        return lines + [f"Note: {note}" for note in self.notes]


def measure(plan: Plan, reporter: Reporter | None = None) -> Result:
    """Start an engine with as many versions as the most, and let the numbers take turns."""
    reporter = reporter or Reporter()
    with common.ready(_COMMAND) as (work, notes), ExitStack() as stack:
        longest = plan.prompt_tokens + plan.new_tokens
        common.check_context(context_of(plan.model), longest, "--prompt-tokens and --new-tokens")
        needs_fingerprints = roster.check_engine(plan.engine, _COMMAND, "train", "lora")
        model, choice = open_in_best_dtype(plan.model, plan.dtype, work, reporter)
        notes += [choice.reason] if choice.reason else []
        if plan.lora:
            _publish(plan, model, work, needs_fingerprints, reporter)
        engines = start_all(stack, _starts(plan, model, work), work, reporter)
        taken: dict[int, list[tuple[float, float]]] = {count: [] for count in plan.turns}

        def result() -> Result:
            samples = {
                count: Samples(plan.batch, plan.prompt_tokens, plan.new_tokens, list(seconds))
                for count, seconds in taken.items()
                if seconds
            }
            no_adapter = samples.pop(NO_ADAPTER, None)
            return Result(plan, model, choice, samples, notes, no_adapter)

        reporter.collects(lambda: result() if any(taken.values()) else None)
        reporter.phase("warming up")
        for count in plan.turns:
            reporter.step(_told(count))
            _ask(plan, model, engines, count, "warm", min(WARM_TOKENS, plan.new_tokens))
        done = 0
        reporter.phase("measuring")
        for repeat in repeats(plan.repeats, plan.phase_seconds):
            for count in plan.turns if repeat % 2 == 0 else reversed(plan.turns):
                reporter.step(f"repeat {repeat + 1} of {plan.repeats}: {_told(count)}")
                prefill_s = _ask(plan, model, engines, count, f"{repeat}/prefill", 1)
                total_s = _ask(plan, model, engines, count, f"{repeat}/total", plan.new_tokens)
                taken[count].append((prefill_s, total_s))
            done += 1
        if done < plan.repeats:
            notes.append(common.fewer(done, plan.repeats, plan.phase_seconds))
        return result()


def _publish(plan: Plan, model: Model, work: Path, fingerprints: bool, reporter: Reporter) -> None:
    with ExitStack() as stack:
        (publisher,) = start_all(stack, [roster.publisher(plan.threads)], work, reporter)
        reporter.phase("publishing adapters")
        common_settings = {"directory": str(model.directory), "fingerprints": fingerprints}
        publisher.ask("publish_model", weights=str(work / "base"), **common_settings)
        publisher.ask(
            "publish_adapters",
            weights=str(work / "adapters"),
            versions=max(plan.versions),
            rank=plan.rank,
            **common_settings,
        )


def _starts(plan: Plan, model: Model, work: Path) -> list[Start]:
    """The engine with all versions; with adapters also one with the base alone."""
    most = max(plan.versions)
    if not plan.lora:
        return [roster.ours(model, plan.shape, work, versions=most)]
    return [
        roster.engine(
            name, plan.engine, model, plan.shape, work / name, versions=versions, lora_rank=rank
        )
        for name, versions, rank in (("adapters", most, plan.rank), ("base", 1, None))
    ]


def _told(versions: int) -> str:
    return "no adapter" if versions == NO_ADAPTER else f"{versions} versions"


def _ask(
    plan: Plan,
    model: Model,
    engines: Sequence[Contestant],
    versions: int,
    what: str,
    new_tokens: int,
) -> float:
    """Seconds for one batch of fresh prompts."""
    engine = engines[-1] if versions == NO_ADAPTER else engines[0]
    prompts = common.prompts(f"{versions}/{what}", model.config, plan.batch, plan.prompt_tokens)
    done = engine.ask("generate", prompts=prompts, new_tokens=new_tokens, versions=versions or 1)
    if len(engines) > 1:
        engine.settle()  # threads that spin after their work would slow the other engine's
    return seconds_of(engine.name, done, plan.batch * new_tokens)
