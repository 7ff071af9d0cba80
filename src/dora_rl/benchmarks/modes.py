"""The five paradigms as real training on this machine: same model, prompts, seeds and lengths.

First the parts of a step are measured alone, for its floors and, where the workload asks for a
share of rollout, for its size. Each paradigm gets its own best split of threads and instances,
found by a short search. Then they take turns, several rounds, each a run of its own whose first
steps do not count; the median round of each is shown. An engine that holds one version at a time
gets several instances for several versions; with adapters (`lora`) one engine serves them all,
and every paradigm trains an adapter.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dora_rl.benchmarks.floors import Parts, demand_of
from dora_rl.benchmarks.modes_plan import OURS, Plan, Split
from dora_rl.benchmarks.modes_result import Limits, Reading, Result
from dora_rl.benchmarks.reporting import Reporter
from dora_rl.benchmarks.step_parts import measure_parts
from dora_rl.benchmarks.training import train_once, workplace
from dora_rl.benchmarks.workloads import describe, sized, sync_step
from dora_rl.core.protocol.settings import ParadigmName
from dora_rl.engines.registry import EngineName

_SIZING_STEPS = 6  # where there is no search to say it

__all__ = ["OURS", "Plan", "Reading", "Result", "Split", "measure"]


def measure(plan: Plan, reporter: Reporter | None = None) -> Result:
    """Search the splits, then let the paradigms take turns."""
    reporter = reporter or Reporter()
    limits: Limits | None = None
    searched: dict[ParadigmName, dict[Split, float]] = {}
    chosen = {name: plan.splits(name)[0] for name in plan.paradigms}
    readings: dict[ParadigmName, list[Reading]] = {name: [] for name in plan.paradigms}

    def result() -> Result:
        tried = {name: dict(rates) for name, rates in searched.items() if rates}
        measured = {name: list(found) for name, found in readings.items() if found}
        return Result(plan, tried, dict(chosen), measured, limits)

    reporter.collects(
        lambda: result() if limits or any([*searched.values(), *readings.values()]) else None
    )
    with workplace() as place:
        plan, limits = prepared(plan, place, reporter)
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


def prepared(plan: Plan, place: Path, reporter: Reporter) -> tuple[Plan, Limits | None]:
    """The plan with its size on this machine, and the floors of its step.

    A first size comes from the parts alone; a few synchronous steps tell what they take besides.
    """
    if plan.engine is not EngineName.EMBEDDED:
        return replace(plan, groups_per_step=plan.groups), None
    split = plan.splits(ParadigmName.SYNC)[0]
    config = plan.config(ParadigmName.SYNC, split._replace(slots=max(plan.slots)), 1)
    parts = measure_parts(config, plan.groups, plan.cores, place / "parts", reporter)
    if not plan.groups_per_step:
        plan = _sized(plan, parts, place, reporter)
    batches = plan.workload.batches(plan.groups, plan.seed)
    return plan, Limits(parts, demand_of(batches, parts.alone_token_s), describe(batches))


def _sized(plan: Plan, parts: Parts, place: Path, reporter: Reporter) -> Plan:
    workload, cores, seed = plan.workload, plan.cores, plan.seed
    plan = replace(plan, groups_per_step=sized(workload, parts, cores, seed))
    if workload.band is None:
        return plan
    reporter.phase("sizing: synchronous steps")
    steps = plan.search_steps or _SIZING_STEPS
    config = plan.config(ParadigmName.SYNC, plan.splits(ParadigmName.SYNC)[0], steps)
    warmup = min(2, steps - 1)
    run = train_once(config, place / "sizing", reporter, warmup_steps=warmup)
    found = Reading.of(run, warmup)
    expected_s, train_s = sync_step(workload, parts, cores, seed, plan.groups)
    # What a step takes besides its parts, in units of the parts' own training time.
    overhead_s = max(0.0, found.rollout_only_s * train_s / found.train_s - expected_s)
    return replace(plan, groups_per_step=sized(workload, parts, cores, seed, overhead_s))
