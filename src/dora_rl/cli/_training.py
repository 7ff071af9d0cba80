"""The words of `dora-rl train`: what is going to happen, and what came of it."""

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from dora_rl.core.protocol.errors import DoraError, UserError
from dora_rl.runtime.display.progress import execute_shown, paradigm_of
from dora_rl.runtime.display.summary import first_line, labelled, outcome_rows, reward_span
from dora_rl.runtime.execution import Run
from dora_rl.runtime.prepare.plan import Plan, plan_resume, prepare, read_config
from dora_rl.runtime.prepare.preflight import preflight
from dora_rl.store.rundir import TRACE

INTERRUPTED = 130  # as a shell reports a program that Ctrl-C ended


# What is to be run


def planned(
    config: Path | None, overrides: Sequence[str], out: Path | None, steps: int | None
) -> Plan:
    """A new run, checked; nothing is written."""
    more = list(overrides)
    if steps is not None:
        more.append(f"run.steps={steps}")
    if out is not None:
        more.append(f"run.out={json.dumps(str(out), ensure_ascii=False)}")
    plan = prepare(read_config(config or quickstart_config(), more))
    preflight(plan)
    return plan


def resumed(
    run: Path,
    config: Path | None,
    overrides: Sequence[str],
    out: Path | None,
    steps: int | None,
    accepted: Sequence[str],
) -> Plan:
    """The rest of a run that was stopped or killed, or more steps of it: as it was configured."""
    given = {"CONFIG": config, "--out": out}
    extra = next((name for name, value in given.items() if value is not None), None)
    if extra is not None:
        raise UserError(
            f"--resume takes no {extra}: `{run}` continues as it was configured. Leave it out."
        )
    plan = plan_resume(run, steps=steps, accept_changed=accepted, secrets=overrides)
    preflight(plan)
    return plan


def quickstart_config() -> Path:
    """The configuration that is run where none is named."""
    from dora_rl.quickstart import model_directory

    return model_directory().parent / "quickstart.toml"


# How it goes


def carry_out(plan: Plan, *, as_json: bool, plain: bool) -> int:
    """Run a plan with words around it; returns the exit code."""
    # With --json, stdout is for the JSON alone.
    stream = sys.stderr if as_json else sys.stdout

    def say(line: str) -> None:
        click.echo(line, file=stream)

    for line in introduction(plan):
        say(line)
    for warning in plan.config.warnings():
        click.echo(f"warning: {warning}", err=True)
    say("")
    try:
        run = execute_shown(plan, stream, plain=plain)
    except UserError:
        raise
    except DoraError as error:
        reason = str(error).rstrip(".")
        raise click.ClickException(f"the run failed: {reason}. {_how_to_resume(plan)}.") from error
    except KeyboardInterrupt:
        click.echo(f"ended at once. {_how_to_resume(plan)}", err=True)
        raise
    if as_json:
        click.echo(json.dumps(to_json(run), indent=2, allow_nan=False))
    else:
        say("")
        for line in conclusion(run):
            say(line)
    if run.ending.interrupted:
        click.echo(f"stopped. {_how_to_resume(plan)}", err=True)
        return INTERRUPTED
    if not run.ending.ok:
        click.echo(f"error: the run failed: {run.ending.reason}. {_how_to_resume(plan)}", err=True)
    elif not run.audit.ok:
        click.echo(f"error: a promise was broken. See: dora-rl audit {plan.out}", err=True)
    return 0 if run.ok else 1


def _how_to_resume(plan: Plan) -> str:
    return f"Resume with: dora-rl train --resume {plan.out}"


# Words


def introduction(plan: Plan) -> list[str]:
    """What is going to happen."""
    from dora_rl.models.config import read_config as read_model

    config = plan.config
    core, task, threads = config.settings(), config.task, config.threads()
    model = read_model(plan.model)
    size = sum(math.prod(shape) for shape in model.tensors().values())
    scored = [
        reward.function if isinstance(reward.function, str) else reward.name
        for reward in plan.task.rewards
    ]
    if plan.task.has_environment:
        scored.append(f"environment {task.environment}")
    inline = config.runtime.kind == "inline"
    where = "in this process, on a logical clock" if inline else f"trainer x {threads.train} thread"
    count = f"{config.runtime.instances} x {threads.rollout} thread, {config.rollout.slots} slots"
    until = f"{config.run.steps} steps" + (" (resumed)" if plan.resumed else "")
    rows = {
        "model": f"{config.model.path}: {model.family}, {human(size)} parameters",
        "task": f"{task.prompts or 'given prompts'}, scored by {', '.join(scored)}",
        "algorithm": f"{config.algorithm.preset}, {core.groups_per_step} groups of "
        f"{core.group_size} a step, learning rate {config.train.learning_rate:g}",
        "paradigm": paradigm_of(config),
        "runtime": f"{config.runtime.kind}: rollout {count}; {where}",
        "run": f"{plan.out}, {until}",
    }
    if plan.task.gaps:
        rows["rewards"] = (
            f"sandbox gaps on this kernel: reward workers can access {'; '.join(plan.task.gaps)}"
        )
    return labelled(rows)


def conclusion(run: Run) -> list[str]:
    """What came of it, and after a run that ended well what to try next."""
    lines = [first_line(run), *labelled(outcome_rows(run))]
    audit = run.audit.brief()
    lines += ["", f"audit of {audit[0]}", *audit[1:], ""]
    if run.checkpoint is not None:
        lines += [
            f"checkpoint {run.checkpoint}",
            f"  AutoModelForCausalLM.from_pretrained({str(run.checkpoint)!r})",
        ]
    if not run.ok:
        return lines
    lines += [
        "next",
        f"  dora-rl audit {run.directory} --verbose",
        f"  dora-rl replay {run.directory}",
        f"  {run.directory / TRACE} in ui.perfetto.dev",
    ]
    if run.audit.paradigm != "sync":
        lines.append("  dora-rl train --set orchestration.paradigm=sync    (to compare with)")
    return lines


def to_json(run: Run) -> dict[str, Any]:
    """What came of it, for programs."""
    rewards = reward_span(run.steps)
    return {
        "ok": run.ok,
        "end": run.ending.reason,
        "interrupted": run.ending.interrupted,
        "directory": str(run.directory),
        "checkpoint": None if run.checkpoint is None else str(run.checkpoint),
        "steps": len(run.steps),
        "reward": None if rewards is None else {"first": rewards[0], "last": rewards[1]},
        "first_step": msgspec.to_builtins(run.steps[0]) if run.steps else None,
        "last_step": msgspec.to_builtins(run.steps[-1]) if run.steps else None,
        "evaluations": [msgspec.to_builtins(record) for record in run.evaluations],
        "wall_s": run.summary.wall_s,
        "summary": run.summary.to_json(),
        "audit": run.audit.to_json(),
    }


def human(count: int) -> str:
    """`593 k`, `135 M`, `1.2 B`."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            value = count / size
            return f"{value:.0f} {unit}" if value >= 10 else f"{value:.1f} {unit}"
    return str(count)
