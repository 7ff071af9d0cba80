"""One run, whatever carries it: its configuration, its directory, its core and its listeners.

A launcher takes these files and brings the workers. Everything is checked before the first file is
written.
"""

import json
import os
import platform
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, TextIO

import msgspec

from dora_rl.algorithms.filters import judge
from dora_rl.config import dump_toml
from dora_rl.core.audit import Audit, AuditReport
from dora_rl.core.history.journal import JournalWriter, Written
from dora_rl.core.orchestrator import Orchestrator
from dora_rl.core.protocol.commands import Command, Halt
from dora_rl.core.protocol.events import Event, WeightsPublished
from dora_rl.core.protocol.types import Version
from dora_rl.machine import processor
from dora_rl.machine.fast_paths import Trial, portable, tried
from dora_rl.observe.metrics import Collector, Summary
from dora_rl.runtime.control import messages as ms
from dora_rl.runtime.control.evaluator import EvalRecord, Evaluator, EvalWatcher
from dora_rl.runtime.control.listeners import Listener
from dora_rl.runtime.control.services import Clock, EnvironmentHost, Scorer, WorkerLink
from dora_rl.runtime.prepare.given import GIVEN
from dora_rl.runtime.prepare.plan import Plan
from dora_rl.runtime.records.committer import Committer, Flushed
from dora_rl.runtime.records.history import History
from dora_rl.runtime.records.identity import identity
from dora_rl.runtime.records.journal_replay import check_header
from dora_rl.runtime.records.ledger_writer import LedgerWriter, named_records
from dora_rl.runtime.records.reward_log import RewardLog
from dora_rl.runtime.records.sample_log import SampleLog, keep_up_to
from dora_rl.runtime.records.step_metrics import (
    Recorder,
    StepRecord,
    Watcher,
    read_records,
    records_up_to,
)
from dora_rl.runtime.records.total_steps import ENDED, check_total
from dora_rl.store.ledger import Ledger, Position
from dora_rl.store.rundir import (
    CHECKPOINTS,
    EXCHANGE,
    JOURNAL,
    LEDGER,
    METRICS_OF_STEPS,
    SAMPLES,
    TRACE,
    TRAJECTORIES,
    WEIGHTS,
    RunDirectory,
)
from dora_rl.transports.kv.shared_directory import KvDirectory
from dora_rl.transports.samples.shared_directory import SampleReader, SampleStore


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a run ended, and whether it came to its end.

    `interrupted` if it was asked to stop before, `paused` if it is resumed at once.
    """

    ok: bool
    reason: str
    interrupted: bool = False
    paused: bool = False


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

    writer: JournalWriter
    """Given when the run's files may be written, before anything happens."""

    def __init__(self, flush: Callable[[], object]) -> None:
        self._flush = flush

    def observed(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        self.writer.handled(now, event, commands)
        if isinstance(event, WeightsPublished):
            self._flush()

    def refused(self, now: float, event: Event, reason: str) -> None:
        self.writer.refused(now, event, reason)


class RunFiles:
    """The files of one run, and who writes them. A context manager: the files are open inside."""

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
        # As it was opened: `task.writable` means the same to a resume from elsewhere.
        self.config = plan.config.model_copy(update={"task": plan.task.settings})
        settings = plan.config.settings()
        settings = replace(settings, max_steps=plan.first_steps or settings.max_steps)
        self.orchestrator = Orchestrator(settings)
        self.audit = Audit(settings)
        self.recorder = Recorder(self.orchestrator, [self._write_record, *watch])
        self._watch_evaluations = [self._write_record, *watch_evaluations]
        self.collector = Collector(settings.group_size, warmup_steps, self.recorder.reading)
        self.samples = SampleReader(plan.out / TRAJECTORIES)
        self.sample_store = SampleStore(plan.out / TRAJECTORIES)
        self.kv = KvDirectory(self.exchange)
        self.ledger_writer = LedgerWriter(
            self.orchestrator, self.sample_store, durable=self.config.run.durable
        )
        self._history = History(self.orchestrator, self.recorder, self.collector, self.audit)
        self.reward_log = RewardLog(plan.out / "logs" / "rewards.log")
        self._sample_log = SampleLog(
            self.config.run.samples_per_step,
            self.samples,
            lambda tokens: plan.task.encoder.decode(tokens),
        )
        self._machine = _Machine()
        self._recorded = _Journal(self.flush)
        self.listeners: list[Listener] = [
            self.recorder,
            self._history,
            self._sample_log,
            self.ledger_writer,
            _Publications(self._tell_gaps),
            self._machine,
            self._recorded,  # before the rest: a commit finds the event in the journal
            *listeners,
        ]
        self.halted: Halt | None = None
        """How a resumed run was halted already: only what follows a halt is left to do."""
        self.directory: RunDirectory
        self.ledger: Ledger
        self._committer: Committer | None = None
        self._told_gaps = False
        self._stack = ExitStack()
        self._records: list[StepRecord | EvalRecord] = []  # of a resumed run, before it went on
        self._metrics: TextIO | None = None
        self._unsynced = False  # a record of a step is not known to be on the disk
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
        """Of two runs that find a directory empty, the one that makes the journal has it."""
        facts = identity(self.config, self.plan.task, self.plan.model)
        facts[GIVEN] = list(self.plan.given)
        self.directory = RunDirectory.create(self.plan.out, shared=self.config.run.shared)
        lines = self.directory.lines(JOURNAL)
        self._write_journal(self._stack.enter_context(lines))
        self._open_lines()
        self._draw()
        self.directory.write_config(dump_toml(self.config, hide_secrets=True))
        if not self.config.run.durable:  # an empty ledger: it is never resumed
            facts[ENDED] = "run.durable is off"
        self._keep(Ledger.create(self.plan.out / LEDGER, facts))

    def _open_again(self) -> None:
        """A resumed run reads what it wrote; its files change when it takes over."""
        self.directory = RunDirectory(self.plan.out)
        self._keep(Ledger.open(self.plan.out / LEDGER))
        self.committer.check_files()
        if self.ledger.position.bytes:
            self._recall()
        check_total(self.plan.out, self.config, self.orchestrator.settings.max_steps)
        self.ledger_writer.recall(self.ledger)
        self.committer.check_records()
        state = self.orchestrator.state
        self._records = records_up_to(self.plan.out / METRICS_OF_STEPS, state.trainer.step)
        for listener in self.listeners:
            listener.resumed(self._records, state, self._history.placements)

    def _recall(self) -> None:
        """The core and its history, as they were when the run was last committed."""
        out, until = self.plan.out, self.ledger.position
        since = check_header(out, self.orchestrator.settings)
        since = self.committer.restore() or since
        self._history.replay(out, since, until)
        self.halted = self._history.halted

    def _keep(self, ledger: Ledger) -> None:
        """The ledger has the run's lock: what is cleaned up is ours only while it is open."""
        self.ledger = self._stack.enter_context(ledger)
        self._stack.callback(self._clean_up)
        self._clean_up()  # of an incarnation that was killed
        self.exchange.mkdir()
        self.sample_store.create()
        self._committer = Committer(
            self.config,
            ledger,
            self.ledger_writer,
            self._flushed,
            self._history,
            self.sample_store,
            out=self.plan.out,
            weights=self.weights,
            checkpoints=self.checkpoints,
            ours=not self.plan.resumed,
        )

    def _write_journal(self, file: TextIO, after: Written | None = None) -> None:
        meta = {"model": str(self.plan.model), "seed": self.config.run.seed}
        settings = self.orchestrator.settings
        self._journal = file
        self._recorded.writer = JournalWriter(file.write, settings, meta, after=after)

    def _append_to_journal(self) -> None:
        """What the ledger does not count did not happen, and is cut off."""
        place = self.ledger.position
        path = self.plan.out / JOURNAL
        if place.bytes or path.exists():  # else the run was killed before its first commit
            os.truncate(path, place.bytes)
        self._write_journal(
            self._stack.enter_context(self.directory.lines(JOURNAL, append=True)),
            Written(place.records, place.bytes, place.sha256) if place.bytes else None,
        )

    def _draw(self) -> None:
        self._stack.callback(self._history.end)
        self._history.draw_into(self.plan.out / TRACE)

    def _open_lines(self) -> None:
        """What has lines of every step."""
        lines = self.directory.lines(METRICS_OF_STEPS, append=self.plan.resumed)
        self._metrics = self._stack.enter_context(lines)
        if self.config.run.samples_per_step:
            lines = self.directory.lines(SAMPLES, append=self.plan.resumed)
            self._sample_log.write_to(self._stack.enter_context(lines))

    def take_over(self) -> None:
        """A resumed run continues: from here on its files change."""
        self._append_to_journal()
        self._draw()
        state = self.orchestrator.state
        self.committer.drop_what_did_not_happen(state.versions.newest)
        metrics = b"".join(msgspec.json.encode(record) + b"\n" for record in self._records)
        self.directory.write_bytes(METRICS_OF_STEPS, metrics)
        keep_up_to(self.directory, state.trainer.step)
        self._open_lines()
        self.committer.ours = True
        self._accept_changes()
        if self.config.run.steps != self.orchestrator.settings.max_steps:
            self.directory.write_config(dump_toml(self.config, hide_secrets=True))
        self.committer.commit()
        self._tell_gaps()

    def _accept_changes(self) -> None:
        """What was accepted as changed is what the run has from here on; and it has not ended."""
        parts = identity(self.config, self.plan.task, self.plan.model)["parts"]
        facts = {key: fact for key, fact in self.ledger.facts.items() if key != ENDED}
        if {**facts, "parts": parts} != self.ledger.facts:
            self.ledger.set_facts({**facts, "parts": parts})

    def __exit__(self, *_: object) -> None:
        try:
            if self._committer is not None:
                self._committer.close()
        finally:
            self._stack.close()

    def _clean_up(self) -> None:
        shutil.rmtree(self.exchange, ignore_errors=True)

    @property
    def committer(self) -> Committer:
        assert self._committer is not None, "the files are open"
        return self._committer

    @property
    def weights(self) -> Path:
        """The weight store's root."""
        return self.plan.out / WEIGHTS

    @property
    def exchange(self) -> Path:
        """Where instances put what moves between them."""
        return self.plan.out / EXCHANGE

    @property
    def checkpoints(self) -> Path:
        return self.plan.out / CHECKPOINTS

    def judge(self, rewards: Sequence[float]) -> str | None:
        return judge(self.config.algorithm, rewards)

    def flush(self) -> None:
        self._journal.flush()
        self._history.flush()
        if self._metrics is not None:
            self._metrics.flush()
        self._sample_log.flush()

    # What is durable: see `committer`

    def _flushed(self) -> Flushed:
        """The journal and the records of steps so far, and which files the disk has yet to have."""
        self.flush()
        files = [self._journal.fileno()]
        if self._unsynced and self._metrics is not None:
            files.append(self._metrics.fileno())
            self._unsynced = False
        written, now = self._recorded.writer.written, self.orchestrator.state.now
        return Flushed(Position(written.records, written.bytes, now, written.sha256), files)

    def close(self, ending: Ending, wall_s: float) -> tuple[Summary, AuditReport]:
        """End the records: the journal's last line, and what the run came to."""
        self.committer.complete()
        if self.committer.ours:
            self._recorded.writer.close(ending.reason)
            self.flush()
        report = self.audit.report()
        summary = self.collector.summary(report, ok=ending.ok, end=ending.reason, wall_s=wall_s)
        # Before the ledger says that it has ended, for nobody comes back to a run that has.
        shutil.rmtree(self.exchange, ignore_errors=True)
        if not self.config.run.durable:  # nobody can refer to what it holds
            shutil.rmtree(self.plan.out / TRAJECTORIES, ignore_errors=True)
        if self.committer.ours:
            about = {"wall_s": wall_s, "machine": self._machine.to_json()}
            self.directory.write_metrics({**summary.to_json(), **about})
            if ending.ok or ending.interrupted:
                self.sample_store.sweep(named_records(self.ledger))
            if ending.ok and not ending.paused:
                self.ledger.set_facts({**self.ledger.facts, ENDED: ending.reason})
        return summary, report

    def evaluator(
        self,
        post: Callable[[Event], None],
        *,
        clock: Clock,
        workers: WorkerLink,
        scorer: Scorer,
        environments: EnvironmentHost,
    ) -> Evaluator | None:
        """Who evaluates, if there is something to evaluate with."""
        if self.plan.task.eval_stream is None:
            return None
        core = self.config.orchestration
        return Evaluator(
            self.plan.task,
            post,
            timeout_s=max(core.trajectory_timeout_s, core.install_timeout_s),
            watch=self._watch_evaluations,
            clock=clock,
            workers=workers,
            samples=self.samples,
            scorer=scorer,
            environments=environments,
        )

    @property
    def last_evaluated(self) -> Version:
        """The newest version that has been evaluated before the run was resumed, or -1."""
        records = read_records(self.plan.out / METRICS_OF_STEPS)
        return max((r.version for r in records if isinstance(r, EvalRecord)), default=-1)

    def _tell_gaps(self) -> None:
        """Once, where the logs are, the gaps of the sandbox; it is open by then."""
        gaps = self.plan.task.gaps
        if not gaps or self._told_gaps:
            return
        self._told_gaps = True
        found = "; ".join(gaps)
        self.reward_log.note_once(f"sandbox gaps on this kernel: reward workers can access {found}")

    def _write_record(self, record: StepRecord | EvalRecord) -> None:
        assert self._metrics is not None, "nothing is trained before the run's files are ours"
        self._metrics.write(json.dumps(msgspec.to_builtins(record)) + "\n")
        self._unsynced = True
