"""`dora-rl bench`: measurements, as ratios within one run."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from dora_rl.cli import _bench_help as about
from dora_rl.cli import _benching as benching
from dora_rl.cli._logged import LoggedGroup
from dora_rl.cli._output import check_output


@click.group(cls=LoggedGroup, epilog=about.EXAMPLES)
def command() -> None:
    """Measure the orchestrator, the embedded engine and whole training."""


@command.command(epilog=about.ORCHESTRATOR)
@click.option(
    "--instances",
    callback=benching.numbers("64,512"),
    default="64,512,4096,8192",
    show_default=True,
    metavar="N,N,…",
    help="Numbers of instances to measure, in one run.",
)
@click.option(
    "--events",
    type=click.IntRange(min=1),
    default=150_000,
    show_default=True,
    help="Events to measure at each size, at least.",
)
@benching.measured
def orchestrator(instances: tuple[int, ...], events: int) -> benching.Measurement:
    """Events per second of the deciding core alone, on fleets of several sizes.

    Shows the cost per event, how it grows from the smallest to the largest fleet, and how
    long a full rebalance takes.
    """
    from dora_rl.benchmarks.orchestrator import check_sizes, measure

    return benching.Measurement(partial(measure, check_sizes(instances), events))


@command.command(epilog=about.CONTROL)
@click.option(
    "--instances", type=int, default=1000, show_default=True, help="Instances of the fleet."
)
@click.option(
    "--slots", type=int, default=64, show_default=True, help="Trajectories at once on each."
)
@click.option(
    "--tokens", type=int, default=12_000, show_default=True, help="Mean length of a response."
)
@click.option(
    "--report-period",
    type=float,
    default=10.0,
    show_default=True,
    help="Seconds between two reports of an instance: runtime.report_period_s.",
)
@click.option(
    "--save-period",
    type=float,
    default=60.0,
    show_default=True,
    help="Seconds between two times that it saves what its trajectories have: run.save_every_s.",
)
@click.option(
    "--seconds", type=float, default=110.0, show_default=True, help="Time to measure, once warm."
)
@benching.measured
def control(**options: Any) -> benching.Measurement:
    """What a large fleet costs the driver: share of a core, latency of decisions, memory."""
    from dora_rl.benchmarks.control import Plan, measure

    return benching.Measurement(partial(measure, Plan(**options)))


@command.command(epilog=about.ENGINE)
@click.option(
    "--against",
    callback=benching.names,
    default="",
    metavar="hf,vllm",
    help="Other engines to measure in the same run.  [default: none]",
)
@click.option(
    "--batches",
    callback=benching.numbers("1,8,32"),
    default="1,8,32,64,128",
    show_default=True,
    metavar="N,N,…",
    help="Batch sizes to measure.",
)
@benching.lengths
@benching.of_an_engine(repeats=3, phase_seconds=120, phase="a batch size")
@benching.measured
def engine(**options: Any) -> benching.Measurement:
    """Tokens per second of the embedded engine, against others and the machine's limits."""
    from dora_rl.benchmarks.engine import Plan, measure

    return benching.Measurement(partial(measure, Plan(**options)))


@command.command(epilog=about.MIGRATION)
@click.option(
    "--tokens",
    callback=benching.numbers("500,1000"),
    default="500,1000,2000,4000",
    show_default=True,
    metavar="N,N,…",
    help="Tokens that the trajectory has in the KV when it moves.",
)
@benching.engine
@benching.of_an_engine(repeats=5, phase_seconds=120, phase="a length")
@benching.measured
def migration(**options: Any) -> benching.Measurement:
    """Time to move a running trajectory: by its KV, and by reading its tokens again."""
    from dora_rl.benchmarks.migration import Plan, measure

    return benching.Measurement(partial(measure, Plan(**options)))


@command.command(epilog=about.VERSIONS)
@click.option(
    "--batch", type=int, default=32, show_default=True, help="Rows of the batch, in all versions."
)
@click.option(
    "--versions",
    callback=benching.numbers("1,2,4"),
    default="1,2,4",
    show_default=True,
    metavar="N,N,…",
    help="Numbers of live versions to measure; 1 must be among them.",
)
@click.option("--lora", is_flag=True, default=False, help="Versions are LoRA adapters of one base.")
@click.option(
    "--lora-rank",
    type=int,
    default=None,
    metavar="N",
    help="Rank of the adapters, with --lora.  [default: 16]",
)
@benching.engine
@benching.lengths
@benching.of_an_engine(repeats=5, phase_seconds=300, phase="all numbers")
@benching.measured
def versions(**options: Any) -> benching.Measurement:
    """Tokens per second of one engine that holds several versions at once."""
    from dora_rl.benchmarks.versions import Plan, measure

    return benching.Measurement(partial(measure, Plan(**options)))


@command.command(epilog=about.SPECULATION)
@click.option(
    "--batches",
    callback=benching.numbers("1,2,4"),
    default="1,2,4,8",
    show_default=True,
    metavar="N,N,…",
    help="Slots of the engine: trajectories that run at once.",
)
@click.option("--prompts", type=int, default=4, show_default=True, help="Groups to measure.")
@click.option(
    "--group-size", type=int, default=8, show_default=True, help="Responses to each prompt."
)
@click.option(
    "--max-tokens", type=int, default=256, show_default=True, help="Tokens of a response, at most."
)
@benching.of_an_engine(repeats=2, phase_seconds=120, phase="a batch size", counts="fastest")
@benching.measured
def speculation(**options: Any) -> benching.Measurement:
    """Tokens per second of a few trajectories of one engine, with speculation and without."""
    from dora_rl.benchmarks.speculation import Plan, measure

    return benching.Measurement(partial(measure, Plan(**options)))


@command.command(epilog=about.TRL)
@click.option(
    "--model",
    default="smollm2",
    show_default=True,
    metavar="NAME|DIR",
    help="smollm2 (see dora-rl fetch-model), quickstart, or a Hugging Face directory with a "
    "tokenizer.",
)
@click.option("--steps", type=int, default=5, show_default=True, help="Train steps to measure.")
@click.option("--prompts", type=int, default=4, show_default=True, help="Prompts of a step.")
@click.option(
    "--group-size", type=int, default=8, show_default=True, help="Responses to each prompt."
)
@click.option(
    "--max-tokens", type=int, default=128, show_default=True, help="Tokens of a response, at most."
)
@click.option(
    "--search-steps",
    type=int,
    default=2,
    show_default=True,
    help="Steps of a run of the search for our best way, one for TRL's; 0 is no search.",
)
@click.option(
    "--trl-python",
    metavar="PATH",
    help="A Python that has TRL.  [default: that of .venv-trl]",
)
@benching.measured
def trl(**options: Any) -> benching.Measurement:
    """Tokens per second of whole training, against GRPOTrainer of TRL."""
    from dora_rl.benchmarks.trl import Plan, measure

    return benching.Measurement(partial(measure, Plan(**options)))


@command.command(epilog=about.MODES)
@click.option(
    "--paradigms",
    callback=benching.paradigms,
    default="sync,one_step,partial,in_flight,multi_version",
    show_default=True,
    metavar="NAME,…",
    help="Paradigms to measure.",
)
@click.option(
    "--workload",
    type=click.Choice(["default", "reasoning", "long", "agentic"]),
    default="default",
    show_default=True,
    help="Lengths, tools, and how large a step is.",
)
@click.option("--steps", type=int, help="Train steps of a run.  [default: the workload's]")
@click.option("--warmup-steps", type=int, help="Of them, not measured.  [default: the workload's]")
@click.option("--rounds", type=int, default=3, show_default=True, help="Runs of each paradigm.")
@click.option(
    "--search-steps",
    type=int,
    default=6,
    show_default=True,
    help="Steps of a run of the search; 0 is no search.",
)
@click.option("--max-staleness", type=int, help="K.  [default: the workload's]")
@click.option(
    "--slots",
    callback=benching.optional(benching.numbers("32,64")),
    metavar="N,N,…",
    help="Numbers of slots, of all instances together, that the search tries.  "
    "[default: 32,64,128]",
)
@click.option(
    "--groups",
    type=int,
    help="Prompts of a step.  [default: 64, or what gives rollout the workload's share]",
)
@click.option("--group-size", type=int, help="Responses to each prompt.  [default: 4]")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--lora", is_flag=True, default=False, help="Versions are LoRA adapters of one base.")
@click.option(
    "--elastic",
    type=click.Choice(["off", "rollout", "both"]),
    default="off",
    show_default=True,
    help="Which role may borrow the other's cores, in the paradigms that can lend them.",
)
@benching.engine
@benching.measured
def modes(workload: str, groups: int | None, elastic: str, **options: Any) -> benching.Measurement:
    """The five paradigms as real training: throughput, rollout-only time, bubbles, staleness."""
    from dora_rl.benchmarks.modes import Plan, measure
    from dora_rl.benchmarks.workloads import WorkloadName
    from dora_rl.core.protocol.settings import Elastic

    name = WorkloadName(workload)
    given = click.get_current_context().get_parameter_source("groups")
    if name is not WorkloadName.DEFAULT and given is not ParameterSource.COMMANDLINE:
        groups = None  # that of --quick is for the default workload: the others are sized
    plan = Plan.of(name, groups_per_step=groups, elastic=Elastic(elastic), **options)
    return benching.Measurement(partial(measure, plan))


@command.command(epilog=about.RESUME)
@click.option(
    "--events",
    callback=benching.numbers("10000,100000"),
    default="10000,1000000",
    show_default=True,
    metavar="N,N,…",
    help="Events of the histories to resume after, in one run.",
)
@click.option(
    "--repeats", type=int, default=5, show_default=True, help="Resumes of each, in turns."
)
@benching.measured
def resume(**options: Any) -> benching.Measurement:
    """What a resume costs after a short and after a long history."""
    from dora_rl.benchmarks.resume import Plan, measure

    return benching.Measurement(partial(measure, Plan(**options)))


@command.command(epilog=about.DURABILITY)
@click.option("--steps", type=int, default=24, show_default=True, help="Train steps of a run.")
@click.option(
    "--warmup-steps", type=int, default=4, show_default=True, help="Of them, not measured."
)
@click.option("--rounds", type=int, default=5, show_default=True, help="Runs of each way.")
@benching.measured
def durability(**options: Any) -> benching.Measurement:
    """What it costs that nothing is lost, and how soon a run works again after a death."""
    from dora_rl.benchmarks.durability import Plan, measure

    return benching.Measurement(partial(measure, Plan(**options)))


@command.command(epilog=about.TRANSPORTS)
@click.option(
    "--transports",
    callback=benching.names,
    default="",
    metavar="NAME,…",
    help="Transports to measure; else all, those by object_store where Ray is installed.",
)
@click.option(
    "--parameters",
    callback=benching.numbers("10,100"),
    default="10,100,500",
    show_default=True,
    metavar="N,N,…",
    help="Sizes of the policy, in millions.",
)
@click.option(
    "--receivers",
    callback=benching.numbers("1,4"),
    default="1,2,4",
    show_default=True,
    metavar="N,N,…",
    help="Numbers of receivers.",
)
@click.option(
    "--changed",
    type=float,
    default=0.02,
    show_default=True,
    help="Share of the weights that a version changes.",
)
@click.option(
    "--versions", type=int, default=3, show_default=True, help="Of each case; the median counts."
)
@click.option(
    "--case-seconds",
    type=float,
    default=120.0,
    show_default=True,
    help="Bound on the versions of a case: those that would begin later are left out.",
)
@benching.measured
def transports(**options: Any) -> benching.Measurement:
    """Seconds and bytes of a version on its way to the engines, by each transport."""
    from dora_rl.benchmarks.transports import Plan, measure

    return benching.Measurement(partial(measure, Plan(**options)))


@command.command(epilog=about.CONVERGENCE)
@click.option(
    "--ways",
    callback=benching.names,
    default="sync,multi_version:1,multi_version:3,in_flight",
    show_default=True,
    metavar="WAY,…",
    help="Which are compared; a number is K.",
)
@click.option("--seeds", type=int, default=5, show_default=True, help="Runs of each way.")
@click.option("--steps", type=int, default=60, show_default=True, help="Train steps of a run.")
@click.option(
    "--eval-size", type=int, default=512, show_default=True, help="Prompts that are held out."
)
@click.option(
    "--goal", type=float, default=0.7, show_default=True, help="Reward to which time is measured."
)
@click.option("--out", type=click.Path(path_type=Path), help="Write the measurements here as JSON.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw the curves as PNG.")
@benching.measured
def convergence(
    ways: tuple[str, ...], out: Path | None, plot: Path | None, **options: Any
) -> benching.Measurement:
    """What staleness costs in learning: reward curves of several ways and seeds."""
    from dora_rl.benchmarks.convergence import Plan, Result, draw, measure, named_ways

    for file in (out, plot):
        if file is not None:
            check_output(file, not_these=[f for f in (out, plot) if f is not file])

    def save(result: Result, document: dict[str, Any]) -> None:
        if out is not None:
            out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        if plot is not None:
            draw(result, plot)

    plan = Plan(ways=named_ways(ways), **options)
    return benching.Measurement(partial(measure, plan), save)
