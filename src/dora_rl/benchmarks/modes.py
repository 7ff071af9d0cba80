"""The five paradigms as real training on this machine: same model, prompts, seeds and lengths.

Each paradigm gets its own best split of threads and instances, found by a short search. Then
they take turns, several rounds, each a run of its own whose first steps do not count; the median
round of each is shown. Lengths are long-tailed by the task itself. An engine that holds one
version at a time gets several instances for several versions; with adapters (`lora`) one engine
serves them all, and every paradigm trains an adapter.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from dora_rl.benchmarks.models import LORA_RANK
from dora_rl.benchmarks.reporting import Reporter
from dora_rl.benchmarks.training import train_once, workplace
from dora_rl.config import merged
from dora_rl.core.protocol.errors import UserError
from dora_rl.core.protocol.paradigms import PARADIGMS
from dora_rl.core.protocol.settings import Elastic, ParadigmName
from dora_rl.engines.registry import EngineName, most_versions
from dora_rl.machine.processor import cores
from dora_rl.runtime.execution import Run

OURS = ParadigmName.MULTI_VERSION


class Split(NamedTuple):
    """How the cores are shared out, and how many trajectories run at once on all instances."""

    instances: int
    rollout_threads: int
    train_threads: int
    slots: int

    def __str__(self) -> str:
        rollout = f"{self.instances} x {self.rollout_threads}"
        return f"{rollout} rollout, {self.train_threads} train, {self.slots} slots"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be measured; refuses what cannot be."""

    paradigms: tuple[ParadigmName, ...] = tuple(ParadigmName)
    steps: int = 16
    warmup_steps: int = 4
    rounds: int = 3
    search_steps: int = 6  # 0: no search, the first split is taken
    max_staleness: int = 3
    groups_per_step: int = 64
    group_size: int = 4
    slots: tuple[int, ...] = (32, 64, 128)
    max_terms: int = 96
    tail: float = 1.2
    seed: int = 0
    cores: int = field(default_factory=cores)
    engine: EngineName = EngineName.EMBEDDED
    lora: bool = False  # versions are adapters of one base
    elastic: Elastic = Elastic.OFF  # for the paradigms that can lend devices

    def __post_init__(self) -> None:
        if not self.paradigms:
            raise UserError("--paradigms must name one at least.")
        if not self.slots or min(self.slots) < self.cores:
            raise UserError(f"--slots must be >= {self.cores}, one a core: `{self.slots}`.")
        least = {"steps": 1, "rounds": 1, "search_steps": 0, "group_size": 1, "groups_per_step": 1}
        for name, wanted in least.items():
            if getattr(self, name) < wanted:
                option = name.replace("_", "-")
                raise UserError(f"--{option} must be >= {wanted}: `{getattr(self, name)}`.")
        if not 0 <= self.warmup_steps < self.steps:
            raise UserError(
                f"--warmup-steps must be from 0 to {self.steps - 1}, so that a step is left to "
                f"measure: `{self.warmup_steps}`."
            )

    def splits(self, paradigm: ParadigmName) -> list[Split]:
        """What the search tries first: the cores, with a middling number of slots."""
        cores, slots = self.cores, self.slots[len(self.slots) // 2]
        half = max(1, cores // 2)
        if PARADIGMS[paradigm].colocated:
            found = [(1, cores, cores), (cores, 1, cores), (cores, 1, 1)]
        elif paradigm is OURS and most_versions(self.engine, 2, lora=self.lora) == 1:
            # Several versions need several instances, though they share their cores.
            found = [(max(2, half), 1, half), (max(4, half), 1, half)]
        else:
            found = [(1, half, half), (half, 1, half), (cores - half or 1, 1, half)]
        return [Split(*each, slots) for each in dict.fromkeys(found)]

    def config(self, paradigm: ParadigmName, split: Split, steps: int) -> dict[str, Any]:
        longest = 6 * self.max_terms + 16  # characters of the longest right response
        options = {"max_terms": self.max_terms, "tail": self.tail}
        return merged(
            {
                "model": {"path": "quickstart", **self._lora()},
                "task": {
                    "prompts": "dora_rl.tasks.chains:row",
                    "reward": "dora_rl.tasks.chains:reward",
                    "options": options,
                    "reward_workers": 1,
                },
                "train": {"learning_rate": 1e-4},
                "rollout": {
                    "engine": str(self.engine),
                    "slots": split.slots // split.instances,
                    "max_tokens": longest,
                },
                "orchestration": {
                    "paradigm": str(paradigm),
                    "groups_per_step": self.groups_per_step,
                    "group_size": self.group_size,
                    "max_staleness": self.max_staleness,
                    "install_estimate_s": 0.05,
                    "migration_estimate_s": 0.05,
                    "rebalance_period_s": 2.0,
                    "elastic": str(self.elastic),
                    "switch_estimate_s": 0.01,
                },
                "runtime": {
                    "instances": split.instances,
                    "rollout_threads": split.rollout_threads,
                    "train_threads": split.train_threads,
                },
                "run": {"steps": steps, "seed": self.seed},
            }
        )

    def _lora(self) -> dict[str, Any]:
        return {"lora": {"rank": LORA_RANK, "alpha": 2.0 * LORA_RANK}} if self.lora else {}


class Reading(NamedTuple):
    """One run of one paradigm, past its warm-up."""

    tokens_per_s: float
    step_s: float
    rollout_only_s: float
    train_s: float
    bubble_share: float
    mean_staleness: float
    max_staleness: float
    mean_length: float
    max_length: float
    reread_tokens: int
    audit: str

    @classmethod
    def of(cls, run: Run, warmup_steps: int) -> "Reading":
        summary = run.summary
        step_s = 60 * summary.step_minutes
        steps = run.steps[warmup_steps:]
        return cls(
            summary.tokens_per_s,
            step_s,
            summary.rollout_only_share * step_s,
            statistics.fmean(step.train_s for step in steps),
            summary.bubble_share,
            summary.mean_staleness,
            summary.max_staleness,
            run.audit.lengths.finished.mean,
            run.audit.lengths.finished.max,
            summary.reprefilled_tokens,
            summary.audit,
        )


@dataclass(frozen=True, slots=True)
class Result:
    """An interrupted measurement has fewer paradigms, or the search alone."""

    plan: Plan
    searched: dict[ParadigmName, dict[Split, float]]
    chosen: dict[ParadigmName, Split]
    readings: dict[ParadigmName, list[Reading]]

    def median(self, paradigm: ParadigmName) -> Reading:
        """The round whose throughput is in the middle."""
        ordered = sorted(self.readings[paradigm])
        return ordered[len(ordered) // 2]

    def lengths(self) -> dict[str, float] | None:
        """Of the first paradigm's median round, and the longest of all."""
        if not self.readings:
            return None
        longest = max(r.max_length for readings in self.readings.values() for r in readings)
        return {"mean": self.median(next(iter(self.readings))).mean_length, "max": longest}

    def ratios(self) -> dict[str, dict[str, float]]:
        """Ours over each of the others."""
        if OURS not in self.readings:
            return {}
        ours = self.median(OURS)
        found = {}
        for name in self.readings:
            if name is not OURS:
                other = self.median(name)
                found[f"{OURS}/{name}"] = {
                    "tokens_per_s": _ratio(ours.tokens_per_s, other.tokens_per_s),
                    "rollout_only_s": _ratio(ours.rollout_only_s, other.rollout_only_s),
                }
        return found

    def to_json(self) -> dict[str, Any]:
        plan = self.plan
        return {
            "steps": plan.steps - plan.warmup_steps,
            "rounds": plan.rounds,
            "engine": str(plan.engine),
            "lora_rank": LORA_RANK if plan.lora else None,
            "elastic": str(plan.elastic),
            "cores": plan.cores,
            "groups_per_step": plan.groups_per_step,
            "group_size": plan.group_size,
            "slots": list(plan.slots),
            "lengths": self.lengths(),
            "search": {
                name: {str(split): rate for split, rate in tried.items()}
                for name, tried in self.searched.items()
            },
            "modes": {
                name: {
                    "split": str(self.chosen[name]),
                    **self.median(name)._asdict(),
                    "tokens_per_s_of_rounds": [r.tokens_per_s for r in self.readings[name]],
                }
                for name in self.readings
            },
            "ratios": self.ratios(),
        }

    def summary(self) -> list[str]:
        lines = []
        if self.searched:
            lines.append("The search for each one's best split (tokens/s):")
        for name, tried in self.searched.items():
            shown = "; ".join(f"{split}: {rate:.0f}" for split, rate in tried.items())
            lines.append(f"  {name:<14} {shown}")
        return [*lines, "", *self._table()] if lines else self._table()

    def _table(self) -> list[str]:
        plan, lengths = self.plan, self.lengths()
        if lengths is None:
            return ["No round was measured."]
        lines = [
            f"{plan.engine}{', versions are adapters' if plan.lora else ''}"
            f"{f', elastic: {plan.elastic}' if plan.elastic is not Elastic.OFF else ''}, "
            f"{plan.groups_per_step} groups of {plan.group_size} a step, "
            f"{plan.cores} cores; lengths {lengths['mean']:.0f} mean, {lengths['max']:.0f} max; "
            f"{plan.steps - plan.warmup_steps} steps after warm-up, median of {plan.rounds} rounds",
            f"{'':<14} {'tokens/s':>9} {'step s':>7} {'rollout-only s':>14} {'train s':>8} "
            f"{'bubbles':>8} {'staleness':>10}  audit",
        ]
        for name in self.readings:
            r = self.median(name)
            staleness = f"{r.mean_staleness:.2f}/{r.max_staleness:.0f}"
            lines.append(
                f"{name:<14} {r.tokens_per_s:>9.0f} {r.step_s:>7.2f} {r.rollout_only_s:>14.2f} "
                f"{r.train_s:>8.2f} {r.bubble_share:>8.1%} {staleness:>10}  {r.audit}"
            )
        for pair, values in self.ratios().items():
            lines.append(
                f"{pair}: {values['tokens_per_s']:.2f} x tokens/s, "
                f"{values['rollout_only_s']:.2f} x rollout-only time"
            )
        return lines


def measure(plan: Plan, reporter: Reporter | None = None) -> Result:
    """Search the splits, then let the paradigms take turns."""
    reporter = reporter or Reporter()
    searched: dict[ParadigmName, dict[Split, float]] = {}
    chosen = {name: plan.splits(name)[0] for name in plan.paradigms}
    readings: dict[ParadigmName, list[Reading]] = {name: [] for name in plan.paradigms}

    def result() -> Result:
        tried = {name: dict(rates) for name, rates in searched.items() if rates}
        measured = {name: list(found) for name, found in readings.items() if found}
        return Result(plan, tried, dict(chosen), measured)

    reporter.collects(lambda: result() if any([*searched.values(), *readings.values()]) else None)
    with workplace() as place:
        if plan.search_steps:
            for name in plan.paradigms:
                searched[name] = {}
                chosen[name] = _search(plan, name, place / "search", reporter, searched[name])
        for number in range(plan.rounds):
            for name in _turns(plan.paradigms, number):
                reporter.phase(f"round {number + 1} of {plan.rounds}: {name}")
                out = place / f"{number}-{name}"
                config = plan.config(name, chosen[name], plan.steps)
                run = train_once(config, out, reporter, warmup_steps=plan.warmup_steps)
                readings[name].append(Reading.of(run, plan.warmup_steps))
    return result()


def _search(
    plan: Plan, name: ParadigmName, place: Path, reporter: Reporter, found: dict[Split, float]
) -> Split:
    """The best split over a few steps: first the cores, then the slots.

    The tokens per second of each are added to `found`.
    """

    def attempt(split: Split) -> None:
        if split in found:
            return
        reporter.phase(f"search: {name} with {split}")
        config = plan.config(name, split, plan.search_steps)
        warmup = min(2, plan.search_steps - 1)
        run = train_once(config, place / f"{name}-{len(found)}", reporter, warmup_steps=warmup)
        found[split] = run.summary.tokens_per_s

    def best() -> Split:
        return max(found, key=lambda split: found[split])

    for split in plan.splits(name):
        attempt(split)
    middling = best()
    for slots in plan.slots:
        attempt(middling._replace(slots=slots))
    return best()


def _turns(names: Sequence[ParadigmName], number: int) -> list[ParadigmName]:
    """Every other round in the reverse order."""
    return list(names) if number % 2 == 0 else list(reversed(names))


def _ratio(ours: float, other: float) -> float:
    return ours / other if other else 0.0
