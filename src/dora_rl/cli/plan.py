"""`dora-rl plan`: the split, staleness bound, depth and version slots for a cluster."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from dora_rl.simulator.planning import Plan, Problem, Question
    from dora_rl.simulator.planning.search import Candidate

_EPILOG = """\b
What to plan is a SCENARIO (see dora-rl simulate --list), or --model and --devices, or both:
then the flags change the scenario. Without either, `default` is planned. Candidates are
simulated in virtual time; docs/planning.md says how they are found and what to trust.

\b
Models: qwen2.5-1.5b, qwen2.5-7b, llama-3-8b, qwen2.5-14b, qwen2.5-32b, llama-3-70b,
qwen2.5-72b, qwen3-30b-a3b, qwen3-235b-a22b; a number of parameters; a TOML file of figures.
Devices: A100, H100, H200, H800; others as a table of figures, cluster.device of a scenario.

\b
Exit code: 0 with a plan, also if it is `sync`; 2 for bad input; 1 if a simulation breaks down;
130 if interrupted (the best so far is printed).

\b
Examples:
  dora-rl plan
  dora-rl plan paper-64 --train-step-minutes 8
  dora-rl plan --model qwen2.5-32b --device H800 --devices 64 --batch 512x16
  dora-rl plan --model 32.8e9 --devices 128 --lengths lengths.txt --max-staleness-limit 2
  dora-rl plan --model llama-3-8b --devices 16 --mean-length 800 --max-length 4000 --json
  dora-rl plan my.toml --budget 300 --out planned.toml   (then: dora-rl simulate planned.toml)
"""


def _batch(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, int] | None:
    if value is None:
        return None
    found = re.fullmatch(r"([1-9]\d{0,8})x([1-9]\d{0,8})", value.strip().lower())
    if found is None:
        raise click.BadParameter(f"`{value}` is not PROMPTSxRESPONSES, such as 512x16", ctx, param)
    return int(found[1]), int(found[2])


def _number(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    if value is not None and value != value:
        raise click.BadParameter("`nan` is not a number", ctx, param)
    return value


_POSITIVE = click.FloatRange(min=0, min_open=True)
# More could be planned, but nobody has them: a slip of the keyboard.
_DEVICES = click.IntRange(min=1, max=10_000_000)


@click.command(epilog=_EPILOG)
@click.argument("scenario", required=False)
@click.option("--model", metavar="NAME", help="A known model, its parameters, or a TOML file.")
@click.option("--device", metavar="NAME", help="The kind of device; H100 if nothing says.")
@click.option("--devices", type=_DEVICES, help="All devices of the cluster.")
@click.option(
    "--devices-per-instance",
    type=click.IntRange(min=1),
    help="Of one rollout replica; else as the weights need.",
)
@click.option(
    "--batch", callback=_batch, metavar="PxR", help="Prompts in a step, and responses to each."
)
@click.option(
    "--mean-length", type=_POSITIVE, callback=_number, help="Mean response, in tokens (2400)."
)
@click.option(
    "--max-length", type=_POSITIVE, callback=_number, help="Longest response, in tokens (30000)."
)
@click.option(
    "--length-sigma",
    type=click.FloatRange(min=0),
    callback=_number,
    help="Spread of the logarithm of lengths (1.0); 0: all alike.",
)
@click.option(
    "--lengths",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Measured lengths instead: one a line, or a JSON list.",
)
@click.option(
    "--train-step-minutes",
    type=_POSITIVE,
    callback=_number,
    help="A train step as measured on all devices.",
)
@click.option(
    "--max-staleness-limit",
    type=click.IntRange(min=0),
    help="The largest K to consider; else the scenario's, or 4.",
)
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change a value; repeatable."
)
@click.option(
    "--budget",
    type=_POSITIVE,
    callback=_number,
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="Time for the search; more of it simulates at a larger size.",
)
@click.option("--seed", type=int, help="Draw other lengths.")
@click.option("--json", "as_json", is_flag=True, help="Write the plan as JSON.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the planned scenario as TOML; replaces FILE.",
)
@click.pass_context
def command(
    ctx: click.Context,
    /,
    overrides: tuple[str, ...],
    max_staleness_limit: int | None,
    budget: float,
    as_json: bool,
    out: Path | None,
    **said: Any,
) -> None:
    """Find the split, staleness bound and depth that serve a cluster best."""
    from dora_rl.cli._output import check_output
    from dora_rl.cli._planning import print_plan, to_json
    from dora_rl.config import dump_toml
    from dora_rl.simulator.planning import Question, pose

    question = Question(overrides=overrides, **said)
    problem = pose(question)
    if out is not None:
        check_output(out, not_these=(question.scenario,))
    plan = _search(problem, max_staleness_limit, budget)
    name = _name(question)
    if as_json:
        click.echo(json.dumps(to_json(name, problem, plan), indent=2, allow_nan=False))
    else:
        print_plan(name, problem, plan)
    if out is not None:
        out.write_text(dump_toml(plan.scenario()), encoding="utf-8")
        click.echo(f"written: {out}; dora-rl simulate {out} runs it at full size", err=True)
    if plan.cut == "interrupted":
        ctx.exit(130)


def _name(question: Question) -> str:
    if question.scenario is None and question.describes_cluster:
        return f"{question.model} on {question.devices} x {question.device or 'H100'}"
    return question.scenario or "default"


def _search(problem: Problem, max_staleness: int | None, budget_s: float) -> Plan:
    from dora_rl.core.errors import DoraError, UserError
    from dora_rl.simulator.planning import make_plan

    try:
        with _progress() as progress:
            return make_plan(
                problem, max_staleness=max_staleness, budget_s=budget_s, progress=progress
            )
    except UserError:
        raise
    except DoraError as error:  # the world caught the core at something impossible
        seed = problem.scenario.scenario.seed
        raise click.ClickException(
            f"a simulation of the plan failed (seed {seed}): {error}"
        ) from error


@contextmanager
def _progress() -> Iterator[Callable[[int, Candidate], None] | None]:
    """A bar on a terminal; nothing where stderr is not one."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from dora_rl.simulator.planning.search import PLANNED_RUNS

    columns = (TextColumn("{task.description:<20}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True
    ) as bar:
        task = bar.add_task("planning", total=PLANNED_RUNS)

        def show(done: int, candidate: Candidate) -> None:
            name = f"{candidate.paradigm} K={candidate.max_staleness}"
            bar.update(task, completed=done, total=max(PLANNED_RUNS, done + 1), description=name)

        yield show
