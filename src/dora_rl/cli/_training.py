"""The words of `dora-rl train`: what is going to happen, how it goes, and what came of it."""

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import click
import msgspec

from dora_rl.core.commands import Command
from dora_rl.core.errors import DoraError, UserError
from dora_rl.core.events import Event
from dora_rl.core.paradigms import PARADIGMS
from dora_rl.core.types import InstanceId
from dora_rl.machine.fast_paths import FAST_PATHS, Trial
from dora_rl.observe.live import LiveDisplay, Status, duration
from dora_rl.observe.placements import Placements
from dora_rl.runtime import messages as ms
from dora_rl.runtime.config import RunConfig
from dora_rl.runtime.evaluation import EvalRecord, EvalWatcher
from dora_rl.runtime.listening import Listener
from dora_rl.runtime.recording import StepRecord, Watcher
from dora_rl.runtime.session import Plan
from dora_rl.runtime.train import Run, execute, prepare, read_config, resume
from dora_rl.store.rundir import TRACE, check_free

INTERRUPTED = 130  # as a shell reports a program that Ctrl-C ended
_LABEL = 11


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
    check_free(plan.out)
    _try_task(plan)
    return plan


def resumed(
    run: Path,
    config: Path | None,
    overrides: Sequence[str],
    out: Path | None,
    steps: int | None,
    accepted: Sequence[str],
) -> Plan:
    """The rest of a run that was stopped or killed: as it was configured."""
    given = {"CONFIG": config, "--out": out, "--steps": steps}
    extra = next((name for name, value in given.items() if value is not None), None)
    if extra is not None:
        raise UserError(
            f"--resume takes no {extra}: `{run}` goes on as it was configured. Leave it out."
        )
    plan = resume(run, accept_changed=accepted, secrets=overrides)
    _try_task(plan)
    return plan


def quickstart_config() -> Path:
    """The configuration that is run where none is named."""
    from dora_rl.quickstart import model_directory

    return model_directory().parent / "quickstart.toml"


def _try_task(plan: Plan) -> None:
    """Start the workers once, so that what cannot be imported is told now."""
    if plan.task.rewards:
        plan.task.score_pool().close()
    if plan.task.has_environment:
        plan.task.environment_pool().close()


# How it goes


class _Follower(Listener):
    """Passes on what happens to the status."""

    def __init__(self, plan: Plan) -> None:
        config = plan.config
        settings = config.settings()
        self._placements = Placements()
        self._fell_back: set[str] = set()
        self.tell: Callable[[str], object] = lambda line: None
        self.status = Status(
            title=f"{_model_name(config)} · {config.algorithm.preset} · {_paradigm(config)}",
            steps=config.run.steps,
            max_staleness=PARADIGMS[settings.paradigm].max_staleness(settings),
            instances=config.runtime.instances,
            slots=config.rollout.slots,
            groups_per_step=settings.groups_per_step,
            placements=self._placements,
            resumed=plan.resumed,
        )

    def observed(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        self._placements.observe(now, event, commands)
        self.status.observe(now, event, commands)

    def replaced(self, now: float, why: str) -> None:
        self.tell(f"{why}; it is replaced")

    def tried(self, now: float, trials: Mapping[str, Trial]) -> None:
        for name, trial in trials.items():
            if not trial.in_force and name not in self._fell_back:
                self._fell_back.add(name)
                self.tell(f"{name} is not in force here: {FAST_PATHS[name].otherwise}")

    def must_end(self, now: float, why: str) -> None:
        self.status.stopping = True
        self.tell(f"stopping: the step is finished, then all is saved. {why}")

    def used(self, now: float, instance: InstanceId, used: ms.Used) -> None:
        self.status.used(now, instance, used.tokens)


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
    follower = _Follower(plan)
    lines = plain or not stream.isatty()

    def stopping() -> None:
        follower.status.stopping = True
        if lines:
            click.echo("stopping: the step is finished, then all is saved", err=True)

    try:
        with _shown(follower, stream, say, lines=lines) as (step, evaluation):
            run = execute(
                plan,
                watch=[step],
                watch_evaluations=[evaluation],
                listeners=[follower],
                stopping=stopping,
            )
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


@contextmanager
def _shown(
    follower: _Follower, stream: TextIO, say: Callable[[str], object], *, lines: bool
) -> Iterator[tuple[Watcher, EvalWatcher]]:
    """The display on a terminal; else a line for each step. Gives who is to be told."""
    status = follower.status

    def evaluated(record: EvalRecord) -> None:
        status.evaluated(record.version, record.reward_mean)
        if lines:
            say(evaluation_line(record))

    def stepped(record: StepRecord) -> None:
        status.stepped(record)
        if lines:
            say(step_line(record, status))

    if lines:
        follower.tell = say
        yield stepped, evaluated
        return
    from rich.console import Console

    with LiveDisplay(status, Console(file=stream)) as display:
        follower.tell = display.say
        yield stepped, evaluated


# Words


def introduction(plan: Plan) -> list[str]:
    """What is going to happen."""
    from dora_rl.models.config import read_config as read_model

    config = plan.config
    core, task, threads = config.settings(), config.task, config.threads()
    model = read_model(plan.model)
    size = sum(math.prod(shape) for shape in model.tensors().values())
    scored = [
        part.function if isinstance(part.function, str) else part.name for part in plan.task.rewards
    ]
    if plan.task.has_environment:
        scored.append(f"environment {task.environment}")
    inline = config.runtime.kind == "inline"
    where = "in this process, on a logical clock" if inline else f"trainer x {threads.train} thread"
    count = f"{config.runtime.instances} x {threads.rollout} thread, {config.rollout.slots} slots"
    until = f"{config.run.steps} steps" + (" (resumed)" if plan.resumed else "")
    rows = {
        "model": f"{_model_name(config)}: {model.family}, {human(size)} parameters",
        "task": f"{task.prompts or 'given prompts'}, scored by {', '.join(scored)}",
        "algorithm": f"{config.algorithm.preset}, {core.groups_per_step} groups of "
        f"{core.group_size} a step, learning rate {config.train.learning_rate:g}",
        "paradigm": _paradigm(config),
        "runtime": f"{config.runtime.kind}: rollout {count}; {where}",
        "run": f"{plan.out}, {until}",
    }
    if plan.task.gaps:
        rows["rewards"] = f"not kept from them here: {'; '.join(plan.task.gaps)}"
    return [f"{name:<{_LABEL}}{value}" for name, value in rows.items()]


def step_line(record: StepRecord, status: Status) -> str:
    """One step in one line."""
    left = "" if status.eta_s is None else f"  {duration(status.eta_s)} left"
    return (
        f"step {record.step + 1}/{status.steps}  reward {record.reward_mean:.3f}  "
        f"staleness {record.staleness_mean:.2f} max {record.staleness_max}  "
        f"versions {record.versions_live}  tokens/s {record.tokens_per_s:.0f}  "
        f"bubble {record.bubble_share:.0%}  step {record.step_s:.1f} s "
        f"(train {record.train_s:.1f} s){left}"
    )


def evaluation_line(record: EvalRecord) -> str:
    """One evaluation in one line."""
    failed = f", {record.failed} failed" if record.failed else ""
    return (
        f"evaluation of version {record.version}  reward {record.reward_mean:.3f}  "
        f"({record.responses} responses{failed}, {record.seconds:.1f} s)"
    )


def conclusion(run: Run) -> list[str]:
    """What came of it, and what to try next."""
    summary, rewards = run.summary, reward_span(run.steps)
    lines = [f"{len(run.steps)} steps in {duration(summary.wall_s)}: {run.ending.reason}"]
    if rewards is not None:
        lines.append(
            f"{'reward':<{_LABEL}}{rewards[0]:.3f} -> {rewards[1]:.3f} "
            "(means of the first and the last fifth of the steps)"
        )
    if run.evaluations:
        ends = (run.evaluations[:1] if len(run.evaluations) > 1 else ()) + run.evaluations[-1:]
        shown = " -> ".join(f"{end.reward_mean:.3f} (version {end.version})" for end in ends)
        lines.append(f"{'evaluation':<{_LABEL}}{shown}")
    if summary.steps:
        lines += [
            f"{'rollout':<{_LABEL}}{summary.tokens_per_s:,.0f} trained tokens/s, "
            f"bubble {summary.bubble_share:.1%}",
            f"{'staleness':<{_LABEL}}mean {summary.mean_staleness:.2f}, "
            f"max {summary.max_staleness:g} (K = {run.audit.max_staleness})",
        ]
    lines += ["", "audit of " + run.audit.summary()[0], *run.audit.summary()[1:], ""]
    if run.checkpoint is not None:
        lines += [
            f"checkpoint {run.checkpoint}",
            f"  AutoModelForCausalLM.from_pretrained({str(run.checkpoint)!r})",
        ]
    lines += [
        "next",
        f"  dora-rl audit {run.directory}",
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


def reward_span(steps: Sequence[StepRecord]) -> tuple[float, float] | None:
    """Mean rewards of the first and of the last fifth of the steps."""
    if not steps:
        return None
    count = max(1, len(steps) // 5)
    ends = steps[:count], steps[-count:]
    first, last = (sum(record.reward_mean for record in part) / count for part in ends)
    return first, last


def human(count: int) -> str:
    """`593 k`, `135 M`, `1.2 B`."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            value = count / size
            return f"{value:.0f} {unit}" if value >= 10 else f"{value:.1f} {unit}"
    return str(count)


def _model_name(config: RunConfig) -> str:
    return config.model.path


def _paradigm(config: RunConfig) -> str:
    settings = config.settings()
    return f"{settings.paradigm}, K = {PARADIGMS[settings.paradigm].max_staleness(settings)}"
