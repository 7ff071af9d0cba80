"""How a run goes, shown as it happens: a live display on a terminal, else lines.

A listener and two watchers. What they are told is put into words here, and decides nothing.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import TextIO

from dora_rl.core.protocol.commands import Command
from dora_rl.core.protocol.events import Event
from dora_rl.core.protocol.paradigms import PARADIGMS
from dora_rl.core.protocol.types import InstanceId
from dora_rl.core.state.run import State
from dora_rl.machine.fast_paths import FAST_PATHS, Trial
from dora_rl.observe.live import LiveDisplay, Status, duration
from dora_rl.observe.placements import Placements
from dora_rl.runtime.config import RunConfig
from dora_rl.runtime.control import messages as ms
from dora_rl.runtime.control.evaluator import EvalRecord, EvalWatcher
from dora_rl.runtime.control.listeners import Listener
from dora_rl.runtime.execution import Run, execute
from dora_rl.runtime.prepare.plan import Plan
from dora_rl.runtime.records.sample_log import sample_lines, sampled
from dora_rl.runtime.records.step_metrics import StepRecord, Watcher, records_up_to
from dora_rl.samples import SampleRef
from dora_rl.store.rundir import METRICS_OF_STEPS, TRAJECTORIES
from dora_rl.transports.samples.shared_directory import SampleReader


class Follower(Listener):
    """Passes on what happens to the status."""

    def __init__(self, plan: Plan) -> None:
        config = plan.config
        settings = config.settings()
        self._placements = Placements()
        self._task, self._show_every = plan.task, config.run.show_sample_every
        self._samples = SampleReader(plan.out / TRAJECTORIES)
        self._fell_back: set[str] = set()
        self.tell: Callable[[str], object] = lambda line: None
        self.status = Status(
            title=f"{config.model.path} · {config.algorithm.preset} · {paradigm_of(config)}",
            steps=config.run.steps,
            max_staleness=PARADIGMS[settings.paradigm].max_staleness(settings),
            instances=config.runtime.instances,
            slots=config.rollout.slots,
            groups_per_step=settings.groups_per_step,
            placements=self._placements,
            resumed=plan.resumed,
        )
        if plan.resumed:  # it takes a while until its journal is replayed
            self.status.version = plan.steps_trained
            self._show(records_up_to(plan.out / METRICS_OF_STEPS, plan.steps_trained))

    def resumed(
        self, records: Sequence[StepRecord | EvalRecord], state: State, placements: Placements
    ) -> None:
        self._placements = deepcopy(placements)
        self.status.resuming(self._placements, state.work.num_ready)
        self._show(records)

    def _show(self, records: Sequence[StepRecord | EvalRecord]) -> None:
        steps = [record for record in records if isinstance(record, StepRecord)]
        evaluations = [
            (record.version, record.reward_mean)
            for record in records
            if isinstance(record, EvalRecord)
        ]
        self.status.resumed(steps, evaluations)

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

    def trained(self, now: float, report: ms.Trained, samples: Sequence[SampleRef]) -> None:
        if self._show_every and report.step % self._show_every == 0:
            for record in sampled(report, samples, 1, self._samples, self._task.encoder.decode):
                for line in sample_lines(record):
                    self.tell(line)

    def must_end(self, now: float, why: str) -> None:
        self.status.stopping = True
        self.tell(f"stopping: the step is finished, then all is saved. {why}")

    def used(self, now: float, instance: InstanceId, used: ms.Used) -> None:
        self.status.used(now, instance, used.tokens)


def execute_shown(
    plan: Plan, stream: TextIO, *, plain: bool = False, watch: Sequence[Watcher] = ()
) -> Run:
    """Run a plan to its end, with its progress on a stream.

    A terminal gets the display; anything else, and with `plain` a terminal too, a line for each
    step.
    """
    follower = Follower(plan)
    lines = plain or not stream.isatty()

    def stopping() -> None:
        follower.status.stopping = True
        if lines:
            print("stopping: the step is finished, then all is saved", file=sys.stderr, flush=True)

    with _shown(follower, stream, lines=lines) as (step, evaluation):
        return execute(
            plan,
            watch=[step, *watch],
            watch_evaluations=[evaluation],
            listeners=[follower],
            stopping=stopping,
        )


@contextmanager
def _shown(
    follower: Follower, stream: TextIO, *, lines: bool
) -> Iterator[tuple[Watcher, EvalWatcher]]:
    """Gives who is to be told of steps and of evaluations."""
    status = follower.status

    encoding = getattr(stream, "encoding", None) or "utf-8"

    def writable(line: str) -> str:
        """A policy writes what not every terminal can show."""
        return line.encode(encoding, "backslashreplace").decode(encoding)

    def say(line: str) -> None:
        print(writable(line), file=stream, flush=True)

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
        follower.tell = lambda line: display.say(writable(line))
        yield stepped, evaluated


def step_line(record: StepRecord, status: Status) -> str:
    """One step in one line."""
    left = "" if status.eta_s is None else f"  {duration(status.eta_s)} left"
    return (
        f"step {record.step}/{status.steps}  reward {record.reward_mean:.3f}  "
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


def paradigm_of(config: RunConfig) -> str:
    """The paradigm, and the bound that it keeps."""
    settings = config.settings()
    return f"{settings.paradigm}, K = {PARADIGMS[settings.paradigm].max_staleness(settings)}"
