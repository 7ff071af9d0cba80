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
from typing import Self

import msgspec

from dora_rl.algorithms.filters import judge
from dora_rl.config import dump_toml
from dora_rl.core.audit import Audit, AuditReport
from dora_rl.core.commands import Command
from dora_rl.core.events import Event, WeightsPublished
from dora_rl.core.journal import JournalWriter
from dora_rl.core.orchestrator import Orchestrator
from dora_rl.observe.metrics import Collector, Summary
from dora_rl.runtime.config import RunConfig
from dora_rl.runtime.listening import Listener
from dora_rl.runtime.recording import Recorder, StepRecord, Watcher
from dora_rl.store.rundir import RunDirectory
from dora_rl.tasks.task import Task


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be run: checked, and nothing written yet."""

    config: RunConfig
    model: Path
    task: Task
    out: Path


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

    def __init__(self, plan: Plan, watch: Sequence[Watcher] = (), *, warmup_steps: int = 0) -> None:
        self.plan = plan
        config = plan.config
        settings = config.settings()
        self.config = config
        self.orchestrator = Orchestrator(settings)
        self.audit = Audit(settings)
        self.recorder = Recorder(self.orchestrator, [self._write_step, *watch])
        self.collector = Collector(settings.group_size, warmup_steps, self.recorder.reading)
        self.directory: RunDirectory
        self._stack = ExitStack()
        self._write_metrics: Callable[[str], object] = lambda line: None
        self._flush: list[Callable[[], object]] = []

    def __enter__(self) -> Self:
        self.directory = RunDirectory.create(self.plan.out)
        self.directory.write_config(dump_toml(self.config))
        self.exchange.mkdir()
        journal = self._stack.enter_context(self.directory.lines("journal.jsonl"))
        metrics = self._stack.enter_context(self.directory.lines("metrics.jsonl"))
        self._write_metrics = metrics.write
        self._flush = [journal.flush, metrics.flush]
        meta = {"model": str(self.plan.model), "seed": self.config.run.seed}
        self._writer = JournalWriter(journal.write, self.orchestrator.settings, meta)
        self.listeners: list[Listener] = [
            self.recorder,
            _Observer(self.audit.observe),
            _Observer(self.collector.observe),
            _Journal(self._writer, self.flush),
        ]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        shutil.rmtree(self.exchange, ignore_errors=True)
        self._stack.close()

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
        for flush in self._flush:
            flush()

    def close(self, ending: Ending, wall_s: float) -> tuple[Summary, AuditReport]:
        """End the books: the journal's last line, and what the run came to."""
        self._writer.close(ending.reason)
        self.flush()
        report = self.audit.report()
        summary = self.collector.summary(report, ok=ending.ok, end=ending.reason, wall_s=wall_s)
        self.directory.write_metrics({**summary.to_json(), "wall_s": wall_s})
        return summary, report

    def _write_step(self, record: StepRecord) -> None:
        self._write_metrics(json.dumps(msgspec.to_builtins(record)) + "\n")
