"""`dora-rl plan`: the split, staleness bound, depth and version slots for a cluster."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dora_rl.cli._numbers import Count, Number, expanded

if TYPE_CHECKING:
    from dora_rl.simulator.planning import Plan, Problem, Question

_EPILOG = """\b
What to plan is a SCENARIO (see dora-rl simulate --list), or --model, --devices and --batch, or
both: then the flags change the scenario. Without either, `default` is planned. Candidates are
simulated in virtual time; docs/planning.md says how they are found and what to trust.

\b
Models: qwen3-0.6b, qwen3-1.7b, qwen3-4b, qwen3-8b, qwen3-14b, qwen3-32b, qwen3-30b-a3b,
qwen3-235b-a22b, qwen2.5-0.5b, qwen2.5-1.5b, qwen2.5-3b, qwen2.5-7b, qwen2.5-14b, qwen2.5-32b,
qwen2.5-72b, llama-3.2-1b, llama-3.2-3b, llama-3-8b, llama-3.1-8b, llama-3-70b, llama-3.1-70b,
llama-3.3-70b, llama-3.1-405b, mistral-7b, mistral-small-24b, phi-4, smollm2-135m,
smollm2-360m, smollm2-1.7b, smollm3-3b, deepseek-r1-distill-qwen-1.5b,
deepseek-r1-distill-qwen-7b, deepseek-r1-distill-qwen-14b, deepseek-r1-distill-qwen-32b,
deepseek-r1-distill-llama-8b, deepseek-r1-distill-llama-70b; also as on huggingface.co, such as
Qwen/Qwen3-8B-Base; a number of parameters, such as 32.8e9 or 8B; a TOML file of figures.

\b
Numbers may end in K (1,000) or M, such as --max-length 32k.
Devices: A100, H100, H200, H800; others as a table of figures, cluster.device of a scenario.

\b
--set model.lora_rank=16 plans versions that are LoRA adapters, and says whether they pay against
full weights on the same cluster. It takes half of the budget, and nine runs more in any case.

\b
Exit code: 0 with a plan, also if it is `sync`; 2 for bad input; 1 if a simulation breaks down;
130 if interrupted (the best so far is printed).

\b
Examples:
  dora-rl plan
  dora-rl plan paper-64 --train-step-minutes 8
  dora-rl plan --model qwen2.5-32b --device H800 --devices 64 --batch 512x16
  dora-rl plan --model 32.8e9 --devices 128 --batch 512x16 --lengths lengths.txt
  dora-rl plan --model qwen3-8b --devices 16 --batch 128x8 --mean-length 4K --max-length 32k --json
  dora-rl plan default --set model.lora_rank=16
  dora-rl plan my.toml --budget 300 --out planned.toml   (then: dora-rl simulate planned.toml)
  dora-rl plan --model qwen3-8b --devices 16 --batch 64x8 --write my.toml   (and dora-rl check it)
"""


def _batch(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, int] | None:
    if value is None:
        return None
    parts = [expanded(part) for part in value.lower().split("x")]
    if len(parts) != 2 or not all(re.fullmatch(r"[1-9]\d{0,8}", part) for part in parts):
        raise click.BadParameter(f"`{value}` is not PROMPTSxRESPONSES, such as 512x16", ctx, param)
    return int(parts[0]), int(parts[1])


_POSITIVE = Number(min=0, min_open=True)
# More could be planned, but nobody has them: a slip of the keyboard.
_DEVICES = Count(min=1, max=10_000_000)


@click.command(epilog=_EPILOG)
@click.argument("scenario", required=False)
@click.option("--model", metavar="NAME", help="A known model, its parameters, or a TOML file.")
@click.option(
    "--device", metavar="NAME", help="The kind of device; H100 unless the scenario names one."
)
@click.option("--devices", type=_DEVICES, help="All devices of the cluster.")
@click.option(
    "--devices-per-instance",
    type=click.IntRange(min=1),
    help="Of one rollout replica; else as the weights need.",
)
@click.option(
    "--batch",
    callback=_batch,
    metavar="PxR",
    help="Prompts in a step, and responses to each; required without a scenario.",
)
@click.option(
    "--mean-length", type=_POSITIVE, metavar="TOKENS", help="Mean response, such as 4K (2400)."
)
@click.option(
    "--max-length", type=_POSITIVE, metavar="TOKENS", help="Longest response, such as 32k (30000)."
)
@click.option(
    "--length-sigma",
    type=Number(min=0),
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
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="Time for the search, but for eleven runs that every plan makes; more of it "
    "simulates at a larger size.",
)
@click.option("--seed", type=int, help="Draw other lengths.")
@click.option("--json", "as_json", is_flag=True, help="Write the plan as JSON.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the planned scenario as TOML; replaces FILE.",
)
@click.option(
    "--write",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the recommendation as a configuration for dora-rl train.",
)
@click.option("--overwrite", is_flag=True, help="Let --write replace a file.")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    overrides: tuple[str, ...],
    max_staleness_limit: int | None,
    budget: float,
    as_json: bool,
    out: Path | None,
    write: Path | None,
    overwrite: bool,
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
        check_output(out, not_these=(question.scenario, write))
    _check_write(write, overwrite, question)
    plan = _search(problem, max_staleness_limit, budget)
    name = _name(question)
    if as_json:
        click.echo(json.dumps(to_json(name, problem, plan), indent=2, allow_nan=False))
    else:
        print_plan(name, problem, plan)
    if out is not None and plan.decided:
        out.write_text(dump_toml(plan.scenario()), encoding="utf-8")
        click.echo(f"written: {out}; dora-rl simulate {out} runs it at full size", err=True)
    if write is not None and plan.decided:
        from dora_rl.cli._planning import recommendation
        from dora_rl.runtime.prepare.planned_config import planned_config

        found = recommendation(_typed(ctx), question, problem, plan)
        write.write_text(planned_config(found), encoding="utf-8")
        click.echo(f"written: {write}; dora-rl check {write} tries it", err=True)
    if plan.cut == "interrupted":
        ctx.exit(130)


def _check_write(write: Path | None, overwrite: bool, question: Question) -> None:
    from dora_rl.cli._output import check_output
    from dora_rl.core.protocol.errors import UserError

    if write is None:
        if overwrite:
            raise UserError("--overwrite is for --write. Name the file to write.")
        return
    check_output(write, not_these=(question.scenario,))
    if write.exists() and not overwrite:
        raise UserError(f"there is a file already: `{write}`. Name another, or give --overwrite.")


def _typed(ctx: click.Context) -> str:
    """The command line, for the file that it wrote."""
    import shlex

    words = ["dora-rl", "plan"]
    for parameter in ctx.command.params:
        value, name = ctx.params.get(parameter.name or ""), parameter.opts[-1]
        if value in (None, False, ()) or parameter.name in ("write", "overwrite", "as_json", "out"):
            continue
        if value == parameter.get_default(ctx):
            continue
        values = value if parameter.multiple else (value,)
        if parameter.name == "batch":
            values = ("x".join(map(str, value)),)
        for one in values:
            shown = f"{one:g}" if isinstance(one, float) else str(one)
            words += [shown] if isinstance(parameter, click.Argument) else [name, shown]
    return shlex.join(words)


def _name(question: Question) -> str:
    if question.scenario is None and question.describes_cluster:
        return f"{question.model} on {question.devices} x {question.device or 'H100'}"
    return question.scenario or "default"


def _search(problem: Problem, max_staleness: int | None, budget_s: float) -> Plan:
    from dora_rl.cli import _progress
    from dora_rl.cli._interrupts import kills_interrupt
    from dora_rl.core.protocol.errors import DoraError, UserError
    from dora_rl.simulator.planning import make_plan
    from dora_rl.simulator.planning.search import PLANNED_RUNS

    try:
        with kills_interrupt(), _progress.shown() as progress:
            progress.say("planning", True)
            return make_plan(
                problem,
                max_staleness=max_staleness,
                budget_s=budget_s,
                progress=lambda done, what: progress.say(
                    f"planning, run {done + 1} of about {max(PLANNED_RUNS, done + 1)}: {what}",
                    False,
                ),
            )
    except UserError:
        raise
    except DoraError as error:  # the world caught the core at something impossible
        seed = problem.scenario.run.seed
        raise click.ClickException(
            f"a simulation of the plan failed (seed {seed}): {error}"
        ) from error
