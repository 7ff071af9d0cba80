"""One run, whatever carries it: its configuration, its directory, its core and its listeners.

A runtime takes a session, brings the parts, and calls `run`. Everything is checked before the
first file is written.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

import msgspec

from dora_rl.algorithms.filters import judge
from dora_rl.config import dump_toml
from dora_rl.core.audit import Audit, AuditReport
from dora_rl.core.commands import Command
from dora_rl.core.events import Event, WeightsPublished
from dora_rl.core.journal import JournalWriter
from dora_rl.core.orchestrator import Orchestrator
from dora_rl.observe.metrics import Collector, Summary
from dora_rl.observe.placements import Placements
from dora_rl.observe.timeline import Timeline
from dora_rl.observe.trace import TraceFile
from dora_rl.runtime import evaluation
from dora_rl.runtime.config import RunConfig
from dora_rl.runtime.evaluation import EvalRecord, EvalWatcher, Examiner
from dora_rl.runtime.leftover import RESUME_FILE, Leftover, read_journal_again
from dora_rl.runtime.listening import Listener
from dora_rl.runtime.recording import Recorder, StepRecord, Watcher
from dora_rl.store.rundir import JOURNAL, METRICS_OF_STEPS, TRACE, RunDirectory
from dora_rl.tasks.task import Task

_SPARE_JOURNAL = f".{JOURNAL}.resuming"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be run: checked, and nothing written yet."""

    config: RunConfig
    model: Path
    task: Task
    out: Path
    resumed: Leftover | None = None


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a run ended; `interrupted` if it can be resumed."""

    ok: bool
    reason: str
    interrupted: bool = False


class _Observer(Listener):
    """Wants the stream of the core alone."""

    def __init__(self, observe: Callable[[float, Event, Sequence[Command]], object]) -> None:
        self._observe = observe

    def observed(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        self._observe(now, event, commands)


class _Journal(Listener):
    """Writes the journal; a step on the disk at the latest when its version is published."""

    def __init__(self, writer: JournalWriter, flush: Callable[[], object]) -> None:
        self._writer = writer
        self._flush = flush

    def observed(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        self._writer.handled(now, event, commands)
        if isinstance(event, WeightsPublished):
            self._flush()

    def refused(self, now: float, event: Event, reason: str) -> None:
        self._writer.refused(now, event, reason)


class Session:
    """The files and books of one run. A context manager: the files are open inside."""

    def __init__(
        self,
        plan: Plan,
        watch: Sequence[Watcher] = (),
        *,
        watch_evaluations: Sequence[EvalWatcher] = (),
        listeners: Sequence[Listener] = (),
        warmup_steps: int = 0,
    ) -> None:
        self.plan = plan
        self.config = plan.config
        settings = plan.config.settings()
        self.orchestrator = Orchestrator(settings)
        self.audit = Audit(settings)
        self.recorder = Recorder(self.orchestrator, [self._write_record, *watch])
        self._watch_evaluations = [self._write_record, *watch_evaluations]
        self.collector = Collector(settings.group_size, warmup_steps, self.recorder.reading)
        self.listeners: list[Listener] = [
            self.recorder,
            _Observer(self.audit.observe),
            _Observer(self.collector.observe),
            *listeners,
        ]
        self.directory: RunDirectory
        self._spare = False  # the journal is not the run's yet
        self._stack = ExitStack()
        self._metrics: TextIO
        self._journal: TextIO

    def __enter__(self) -> Self:
        try:
            self._open()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _open(self) -> None:
        resumed = self._spare = self.plan.resumed is not None
        make = RunDirectory if resumed else RunDirectory.create
        self.directory = make(self.plan.out)
        self.exchange.mkdir(exist_ok=True)
        # A resumed run writes its journal again, and only then replaces the old one.
        name = _SPARE_JOURNAL if resumed else JOURNAL
        self._journal = self._stack.enter_context(self.directory.lines(name, again=resumed))
        self._metrics = self._stack.enter_context(
            self.directory.lines(METRICS_OF_STEPS, append=resumed)
        )
        meta = {"model": str(self.plan.model), "seed": self.config.run.seed}
        self._start_timeline()
        self._writer = JournalWriter(self._journal.write, self.orchestrator.settings, meta)
        self.listeners.append(_Journal(self._writer, self.flush))
        if resumed:
            read_journal_again(self.plan.out, self.orchestrator, self.listeners)
        else:
            self.directory.write_config(dump_toml(self.config))

    def take_over(self) -> None:
        """A resumed run goes on: its journal replaces the old one, and what was left is spent."""
        self.flush()
        self.directory.rename(_SPARE_JOURNAL, JOURNAL)
        (self.plan.out / RESUME_FILE).unlink()
        self._spare = False

    def _start_timeline(self) -> None:
        trace = self._stack.enter_context(self.directory.lines(TRACE, again=True))
        placements = Placements()
        name = str(self.orchestrator.settings.paradigm)
        timeline = Timeline(TraceFile(trace.write), name, placements)
        self._stack.callback(timeline.end)
        self.listeners += [_Observer(placements.observe), _Observer(timeline.observe)]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        shutil.rmtree(self.exchange, ignore_errors=True)
        self._stack.close()
        if self._spare:  # the run is as it was
            (self.plan.out / _SPARE_JOURNAL).unlink(missing_ok=True)

    @property
    def weights(self) -> Path:
        """The weight store's root."""
        return self.plan.out / "weights"

    @property
    def exchange(self) -> Path:
        """Where instances put what moves between them."""
        return self.plan.out / "exchange"

    @property
    def checkpoints(self) -> Path:
        return self.plan.out / "checkpoints"

    @property
    def checkpoint_to_resume(self) -> Path | None:
        resumed = self.plan.resumed
        return None if resumed is None else self.checkpoints / resumed.checkpoint

    def judge(self, rewards: Sequence[float]) -> str | None:
        return judge(self.config.algorithm, rewards)

    def flush(self) -> None:
        self._journal.flush()
        self._metrics.flush()

    def close(self, ending: Ending, wall_s: float) -> tuple[Summary, AuditReport]:
        """End the books: the journal's last line, and what the run came to."""
        self._writer.close(ending.reason)
        self.flush()
        report = self.audit.report()
        summary = self.collector.summary(report, ok=ending.ok, end=ending.reason, wall_s=wall_s)
        if not self._spare:
            self.directory.write_metrics({**summary.to_json(), "wall_s": wall_s})
        return summary, report

    def examiner(
        self, outside: evaluation.Outside, post: Callable[[Event], None]
    ) -> Examiner | None:
        """Who evaluates, if there is something to evaluate with."""
        if self.plan.task.eval_stream is None:
            return None
        return Examiner(
            self.plan.task,
            outside,
            post,
            timeout_s=self.config.orchestration.trajectory_timeout_s,
            watch=self._watch_evaluations,
        )

    def _write_record(self, record: StepRecord | EvalRecord) -> None:
        self._metrics.write(json.dumps(msgspec.to_builtins(record)) + "\n")
