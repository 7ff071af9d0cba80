"""A plan as text and as JSON."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tomli_w

from dora_rl.cli._comparison import WIDTH
from dora_rl.cli._interrupts import INCOMPLETE
from dora_rl.runtime.prepare.planned_config import Recommendation
from dora_rl.simulator.planning import Plan, Problem, Question
from dora_rl.simulator.planning.reasons import devices
from dora_rl.simulator.planning.search import Trial

_CUT = {
    "budget": "The budget ended the search: this is the best of {count} candidates; a larger "
    "--budget looks further.",
    "interrupted": "Interrupted: this is the best of {count} candidates.",
}


def to_json(name: str, problem: Problem, plan: Plan) -> dict[str, Any]:
    """Everything that the same seed and budget reproduce."""
    scenario = problem.scenario
    cluster, settings = scenario.cluster, scenario.orchestration
    about = {
        "problem": {
            "name": name,
            "title": scenario.scenario.title,
            "seed": scenario.run.seed,
            "devices": cluster.devices,
            "devices_per_instance": cluster.devices_per_instance,
            "slots": scenario.rollout.slots,
            "parameters": scenario.model.parameters,
            "groups_per_step": settings.groups_per_step,
            "group_size": settings.group_size,
            "mean_length": scenario.workload.mean_response_tokens(),
            "max_length": scenario.workload.response_tokens.upper,
            "train_efficiency": scenario.efficiency.train_efficiency,
        }
    }
    if scenario.model.lora_rank is not None:
        about["problem"]["lora_rank"] = scenario.model.lora_rank
        about["problem"]["adapter_parameters"] = scenario.model.adapter_parameters
    return about | plan.to_json()


def recommendation(
    command: str, question: Question, problem: Problem, plan: Plan
) -> Recommendation:
    """The plan as a run can have it; `command` is the command line."""
    best, scenario = plan.best, problem.scenario
    model = question.model
    known = model is not None and ("/" in model or Path(model).is_dir()) and ".toml" not in model
    return Recommendation(
        command=command,
        model=model if known else None,
        paradigm=best.paradigm,
        groups_per_step=scenario.orchestration.groups_per_step,
        group_size=scenario.orchestration.group_size,
        max_staleness=best.candidate.max_staleness,
        pipeline_depth=best.pipeline_depth,
        slots=scenario.rollout.slots,
        version_slots=best.candidate.version_slots,
        max_tokens=int(scenario.workload.response_tokens.upper),
        instances=best.rollout_instances,
        devices_per_instance=scenario.cluster.devices_per_instance,
        train_devices=best.train_devices,
        lora_rank=scenario.model.lora_rank,
        gain=plan.gain(best) if plan.pays else None,
        notes=plan.notes,
    )


def print_plan(name: str, problem: Problem, plan: Plan) -> None:
    """The recommendation, its reason, the front and the comparison."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=False)
    console.width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    if plan.cut == "interrupted":
        console.print(Text(INCOMPLETE, "bold"))
    title = problem.scenario.scenario.title
    console.print(Text(name if title == "planned" else f"{name}: {title}", "bold"))
    console.print(Text(_facts(problem)))
    console.print()
    console.print(Text(_headline(plan), "bold"))
    console.print()
    if plan.decided:
        console.print(Text(tomli_w.dumps(plan.settings).strip()))
        console.print()
    console.print(Text(plan.reason))
    if plan.fixed_costs is not None:
        depends = plan.fixed_costs.decide
        console.print()
        console.print(Text(plan.fixed_costs.describe(), "bold" if depends else ""))
    if plan.adapters is not None:
        console.print()
        console.print(Text(plan.adapters.describe(), "bold" if plan.adapters.depends else ""))
    console.print()
    console.print(Text("Throughput against staleness: nothing simulated beats these in both"))
    console.print(_table(plan, plan.front))
    console.print()
    console.print(Text("The best of each paradigm"))
    console.print(_table(plan, plan.comparison.values()))
    console.print()
    for note in _notes(plan):
        console.print(Text(f"- {note}"))


def _facts(problem: Problem) -> str:
    scenario = problem.scenario
    cluster, settings = scenario.cluster, scenario.orchestration
    lengths = scenario.workload
    return (
        f"{devices(cluster.devices)} in instances of {cluster.devices_per_instance} with "
        f"{scenario.rollout.slots} slots; {settings.groups_per_step} x {settings.group_size} "
        f"responses a step, of {lengths.mean_response_tokens():,.0f} tokens on average and "
        f"{lengths.response_tokens.upper:,.0f} at most."
    )


def _headline(plan: Plan) -> str:
    best = plan.best
    if not plan.decided:
        return "No recommendation yet."
    word = "Best so far" if plan.cut == "interrupted" else "Recommended"
    if not plan.pays:
        return f"{word}: sync, every device for generation and training in turn."
    costs, span = plan.fixed_costs, ""
    if costs is not None and costs.ranges:
        span = f" ({costs.least:.2f} to {costs.most:.2f} x over the uncertain fixed costs)"
    return (
        f"{word}: {best.paradigm}, {devices(best.train_devices)} for training and "
        f"{best.rollout_devices} for rollout, K = {best.candidate.max_staleness}: "
        f"{plan.gain(best):.2f} x sync{span}."
    )


def _table(plan: Plan, trials: Iterable[Trial]) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("paradigm")
    for label in ("train/rollout", "K", "depth", "versions", "tokens/s", "over sync"):
        table.add_column(label, justify="right")
    table.add_column("staleness", justify="right")
    table.add_column("lost", justify="right")
    for trial in trials:
        candidate, summary = trial.candidate, trial.summary
        chosen = trial is plan.best
        table.add_row(
            f"{trial.paradigm}{' *' if chosen else ''}",
            f"{trial.train_devices}/{trial.rollout_devices}" if trial.train_devices else "shared",
            str(candidate.max_staleness),
            str(trial.pipeline_depth) if trial.pipeline_depth else "auto",
            str(candidate.version_slots),
            f"{trial.tokens_per_s:,.0f}",
            f"{plan.gain(trial):.2f} x",
            f"{summary.mean_staleness:.2f}/{summary.max_staleness:g}",
            f"{100 * trial.lost_share:.0f} %",
            style="bold" if chosen else "",
        )
    return table


def _notes(plan: Plan) -> list[str]:
    notes = [*plan.notes, plan.reduction.describe()]
    notes = [f"{note[0].upper()}{note[1:]}." for note in notes]
    notes.append(
        "Columns: * is recommended; versions are those that one instance may hold; staleness is "
        "mean/max; lost is device time that a schedule without waits would not need."
    )
    if plan.cut is not None:
        notes.append(_CUT[plan.cut].format(count=len(plan.trials)))
    return notes
