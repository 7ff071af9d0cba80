"""One run, whatever carries it: its configuration, its directory, its core and its listeners.

A runtime takes a session, brings the parts, and calls `run`. Everything is checked before the
first file is written.
"""

import json
import os
import platform
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TextIO

import msgspec

from dora_rl.algorithms.filters import judge
from dora_rl.config import dump_toml
from dora_rl.core.audit import Audit, AuditReport
from dora_rl.core.commands import Command, Halt
from dora_rl.core.events import Event, WeightsPublished
from dora_rl.core.journal import JournalWriter
from dora_rl.core.orchestrator import Orchestrator
from dora_rl.core.types import Version
from dora_rl.machine import processor
from dora_rl.machine.fast_paths import Trial, portable, tried
from dora_rl.observe.metrics import Collector, Summary
from dora_rl.observe.placements import Placements
from dora_rl.observe.timeline import Timeline
from dora_rl.observe.trace import TraceFile
from dora_rl.runtime import evaluation
from dora_rl.runtime import messages as ms
from dora_rl.runtime.bookkeeping import Bookkeeper
from dora_rl.runtime.config import RunConfig
from dora_rl.runtime.durability import Durability
from dora_rl.runtime.evaluation import EvalRecord, EvalWatcher, Examiner
from dora_rl.runtime.identity import identity
from dora_rl.runtime.listening import Listener
from dora_rl.runtime.recording import Recorder, StepRecord, Watcher, read_records, records_before
from dora_rl.runtime.rereading import read_journal_again
from dora_rl.store.ledger import Ledger, Position
from dora_rl.store.rundir import JOURNAL, LEDGER, METRICS_OF_STEPS, TRACE, RunDirectory
from dora_rl.tasks.task import Task

_SPARE_JOURNAL = f".{JOURNAL}.resuming"
_SPARE_TRACE = f".{TRACE}.resuming"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be run: checked, and nothing written yet."""

    config: RunConfig
    model: Path
    task: Task
    out: Path
    resumed: bool = False


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a run ended; `interrupted` if it was asked to, `paused` if it only goes on anew."""

    ok: bool
    reason: str
    interrupted: bool = False
    paused: bool = False


class _Observer(Listener):
    """Wants the stream of the core alone."""

    def __init__(self, observe: Callable[[float, Event, Sequence[Command]], object]) -> None:
        self._observe = observe

    def observed(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        self._observe(now, event, commands)


class _Publications(Listener):
    """Wants to know of each published version alone: by the first, the workers are open."""

    def __init__(self, tell: Callable[[], object]) -> None:
        self._tell = tell

    def published(self, now: float, report: ms.Published) -> None:
        self._tell()


class _Machine(Listener):
    """The machine, and which fast paths were in force on it, in any process of the run."""

    def __init__(self) -> None:
        self._trials: dict[str, Trial] = {}

    def tried(self, now: float, trials: Mapping[str, Trial]) -> None:
        self._trials.update(trials)

    def to_json(self) -> dict[str, Any]:
        trials = {**tried(), **self._trials}
        return {
            "system": platform.platform(),
            "processor": processor.model_name(),
            "instructions": processor.telling_flags(),
            "cores": processor.cores(),
            "portable": portable(),
            "fast_paths": {name: trial._asdict() for name, trial in sorted(trials.items())},
        }


class _Journal(Listener):
    """Writes the journal; readable up to a step at the latest when its version is published."""

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
        # As it was opened: paths mean the same to a resume from elsewhere.
        self.config = plan.config.model_copy(update={"task": plan.task.settings})
        settings = plan.config.settings()
        self.orchestrator = Orchestrator(settings)
        self.audit = Audit(settings)
        self.recorder = Recorder(self.orchestrator, [self._write_record, *watch])
        self._watch_evaluations = [self._write_record, *watch_evaluations]
        self.collector = Collector(settings.group_size, warmup_steps, self.recorder.reading)
        self.books = Bookkeeper(self.orchestrator)
        self._machine = _Machine()
        self.listeners: list[Listener] = [
            self.recorder,
            _Observer(self.audit.observe),
            _Observer(self.collector.observe),
            self.books,
            _Publications(self._tell_gaps),
            self._machine,
            *listeners,
        ]
        self.halted: Halt | None = None
        """How a resumed run was halted already: only what follows a halt is left to do."""
        self.directory: RunDirectory
        self.ledger: Ledger
        self._durability: Durability
        self._told_gaps = False
        self._stack = ExitStack()
        self._metrics: TextIO | None = None
        self._journal: TextIO

    def __enter__(self) -> Self:
        try:
            if self.plan.resumed:
                self._open_again()
            else:
                self._open()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _open(self) -> None:
        self.directory = RunDirectory.create(self.plan.out)
        self._open_files(JOURNAL)
        self.directory.write_config(dump_toml(self.config, hide_secrets=True))
        facts = identity(self.config, self.plan.task, self.plan.model)
        if not self.config.run.durable:  # an empty ledger: there is no other life than this
            facts["ended"] = "run.durable is off"
        self._keep(Ledger.create(self.plan.out / LEDGER, facts))

    def _open_again(self) -> None:
        """A resumed run writes its journal again, and only then replaces the old one."""
        self.directory = RunDirectory(self.plan.out)
        self._keep(Ledger.open(self.plan.out / LEDGER))
        self._durability.check_files()
        self._open_files(_SPARE_JOURNAL)
        self.halted = read_journal_again(
            self.plan.out, self.ledger.position, self.orchestrator, self.listeners
        )
        self.books.recall(self.ledger)

    def _keep(self, ledger: Ledger) -> None:
        self.ledger = self._stack.enter_context(ledger)
        self._durability = Durability(
            self.config,
            ledger,
            self.books,
            self._sync,
            weights=self.weights,
            checkpoints=self.checkpoints,
            ours=not self.plan.resumed,
        )

    def _open_files(self, journal: str) -> None:
        again = self.plan.resumed
        self.exchange.mkdir(exist_ok=True)
        self._journal = self._stack.enter_context(self.directory.lines(journal, again=again))
        if not again:
            self._open_metrics()
        meta = {"model": str(self.plan.model), "seed": self.config.run.seed}
        self._start_timeline()
        self._writer = JournalWriter(self._journal.write, self.orchestrator.settings, meta)
        self.listeners.append(_Journal(self._writer, self.flush))

    def _open_metrics(self) -> None:
        lines = self.directory.lines(METRICS_OF_STEPS, append=self.plan.resumed)
        self._metrics = self._stack.enter_context(lines)

    def take_over(self) -> None:
        """A resumed run goes on: from here on its files change."""
        self.flush()
        os.fsync(self._journal.fileno())
        self.directory.rename(_SPARE_JOURNAL, JOURNAL)
        self.directory.rename(_SPARE_TRACE, TRACE)
        state = self.orchestrator.state
        self._durability.drop_what_did_not_happen(state.versions.newest)
        metrics = records_before(self.plan.out / METRICS_OF_STEPS, state.trainer.step)
        self.directory.write_bytes(METRICS_OF_STEPS, metrics)
        self._open_metrics()
        self._durability.ours = True
        self._accept_changes()
        self.commit()
        self._tell_gaps()

    def _accept_changes(self) -> None:
        """What was accepted as changed is what the run has from here on."""
        parts = identity(self.config, self.plan.task, self.plan.model)["parts"]
        if parts != self.ledger.facts["parts"]:
            self.ledger.set_facts({**self.ledger.facts, "parts": parts})

    def _start_timeline(self) -> None:
        name = _SPARE_TRACE if self.plan.resumed else TRACE
        trace = self._stack.enter_context(self.directory.lines(name, again=True))
        placements = Placements()
        paradigm = str(self.orchestrator.settings.paradigm)
        timeline = Timeline(TraceFile(trace.write), paradigm, placements)
        self._stack.callback(timeline.end)
        self.listeners += [_Observer(placements.observe), _Observer(timeline.observe)]

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.exchange, ignore_errors=True)
        self._stack.close()
        for name in (_SPARE_JOURNAL, _SPARE_TRACE):  # of a resume that came to nothing
            (self.plan.out / name).unlink(missing_ok=True)

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

    def judge(self, rewards: Sequence[float]) -> str | None:
        return judge(self.config.algorithm, rewards)

    def flush(self) -> None:
        self._journal.flush()
        if self._metrics is not None:
            self._metrics.flush()

    # What is durable: see `Durability`

    def _sync(self) -> Position:
        """The journal as far as it is written, on the disk if the run is to last."""
        self.flush()
        if self.config.run.durable:
            os.fsync(self._journal.fileno())
        written, now = self._writer.written, self.orchestrator.state.now
        return Position(written.records, written.bytes, now, written.sha256)

    def commit(self) -> None:
        self._durability.commit()

    def commit_if_due(self) -> None:
        self._durability.commit_if_due()

    def commit_in_s(self) -> float | None:
        return self._durability.commit_in_s()

    def delete(self, version: Version) -> None:
        self._durability.delete(version)

    def checkpointed(self, directory: Path) -> None:
        self._durability.checkpointed(directory)

    @property
    def last_checkpoint(self) -> Path | None:
        return self._durability.last_checkpoint

    def close(self, ending: Ending, wall_s: float) -> tuple[Summary, AuditReport]:
        """End the books: the journal's last line, and what the run came to."""
        self._writer.close(ending.reason)
        self.flush()
        report = self.audit.report()
        summary = self.collector.summary(report, ok=ending.ok, end=ending.reason, wall_s=wall_s)
        # Before the ledger says that it has ended, for nobody comes back to a run that has.
        shutil.rmtree(self.exchange, ignore_errors=True)
        if self._durability.ours:
            about = {"wall_s": wall_s, "machine": self._machine.to_json()}
            self.directory.write_metrics({**summary.to_json(), **about})
            if ending.ok and not ending.interrupted and not ending.paused:
                self.ledger.set_facts({**self.ledger.facts, "ended": ending.reason})
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

    @property
    def last_evaluated(self) -> Version:
        """The newest version that has been evaluated in an earlier life, or -1."""
        records = read_records(self.plan.out / METRICS_OF_STEPS)
        return max((r.version for r in records if isinstance(r, EvalRecord)), default=-1)

    def _tell_gaps(self) -> None:
        """Once, where the logs are, what the workers are not kept from; they are open by then."""
        gaps = self.plan.task.gaps
        if not gaps or self._told_gaps:
            return
        self._told_gaps = True
        logs = self.plan.out / "logs"
        with suppress(OSError):  # a run does not end for a note
            logs.mkdir(exist_ok=True)
            (logs / "rewards.log").write_text(
                f"rewards and environments are not kept from: {'; '.join(gaps)}\n"
            )

    def _write_record(self, record: StepRecord | EvalRecord) -> None:
        assert self._metrics is not None, "nothing is trained before the run's files are ours"
        self._metrics.write(json.dumps(msgspec.to_builtins(record)) + "\n")
