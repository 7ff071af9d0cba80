"""What a run remembers beside its core, and the snapshots of both that a resume begins with.

The audit, the figures of steps and of the run, and the timeline follow the stream of events. A
snapshot holds what they and the core know after some event; a resume loads it and replays the
journal from there. Without one, or with one that cannot be used, it replays the whole journal:

    history = History(orchestrator, recorder, collector, audit)
    since = history.restore(files, row, run)  # the place in the journal, or None
    history.replay(run, since, until)         # to where the ledger has committed the run
    history.draw_into(run / "trace.json")     # from here on files change

What other parts remember is in files of their own: tokens, batches and versions in the ledger,
steps in metrics.jsonl.
"""

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TextIO

from dora_rl import __version__
from dora_rl.core.audit import RECORDS as AUDITED
from dora_rl.core.audit import Audit
from dora_rl.core.history import snapshots
from dora_rl.core.history.codec import dumps
from dora_rl.core.history.journal import Written
from dora_rl.core.orchestrator import Orchestrator
from dora_rl.core.protocol.commands import Command, Halt
from dora_rl.core.protocol.errors import JournalError, UserError
from dora_rl.core.protocol.events import Event
from dora_rl.observe import metrics, placements, timeline
from dora_rl.observe.metrics import Collector
from dora_rl.observe.placements import Placements
from dora_rl.observe.timeline import Timeline
from dora_rl.observe.trace import TraceFile
from dora_rl.runtime.control.listeners import Listener
from dora_rl.runtime.records.journal_replay import replay_between
from dora_rl.runtime.records.step_metrics import Recorder
from dora_rl.store.ledger import Position, SnapshotRow
from dora_rl.store.rundir import TRACE
from dora_rl.store.snapshot_files import SnapshotDamaged, SnapshotFiles

FORMAT = 2  # of what a snapshot holds
_KNOWN = tuple(dict.fromkeys((*AUDITED, *metrics.RECORDS, *placements.RECORDS, *timeline.RECORDS)))
# A snapshot's size grows with the outstanding trajectories: with so many events for each between
# two of them, the share of time that snapshots take does not grow with the fleet.
_EVENTS_PER_TRAJECTORY = 8
_LOG = logging.getLogger(__name__)


class History(Listener):
    """All that follows a run's events and has to know those before; told of each one, in order."""

    def __init__(
        self, orchestrator: Orchestrator, recorder: Recorder, collector: Collector, audit: Audit
    ) -> None:
        self._orchestrator = orchestrator
        self._recorder = recorder
        self._collector = collector
        self._audit = audit
        self.placements = Placements()
        self._halt: Halt | None = None
        self._start_timeline()

    def _start_timeline(self) -> None:
        self._drawn = _LateText()
        paradigm = str(self._orchestrator.settings.paradigm)
        self._timeline = Timeline(TraceFile(self._drawn.write), paradigm, self.placements)

    @property
    def halted(self) -> Halt | None:
        """How the run was halted, if it is."""
        return self._halt if self._orchestrator.state.halted else None

    def observed(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """The recorder has been told before: the collector takes readings of it."""
        self._collector.observe(now, event, commands)
        self._audit.observe(now, event, commands)
        self.placements.observe(now, event, commands)
        self._timeline.observe(now, event, commands)
        for command in commands:
            if isinstance(command, Halt):
                self._halt = command

    def refused(self, now: float, event: Event, reason: str) -> None:
        self._audit.observe_refused(now, event)

    # Snapshots

    def due(self, records: int) -> bool:
        """Whether so many events are enough for a snapshot, however few were asked for."""
        return records >= _EVENTS_PER_TRAJECTORY * len(self._orchestrator.state.work.trajectories)

    def write(self, files: SnapshotFiles, position: Position) -> SnapshotRow:
        """A snapshot of this moment, when the journal is written up to `position`."""
        self._drawn.sync()
        halt = self._halt
        content = {
            "format": FORMAT,
            "written_by": __version__,
            "position": list(_place(position)),
            "halt": None if halt is None else [halt.ok, halt.reason],
            "trace_bytes": self._drawn.bytes,
            "core": self._orchestrator.snapshot(),
            "parts": snapshots.save(self._parts(), _KNOWN),
        }
        return files.write(position.records, dumps(content).encode("ascii"))

    def restore(self, files: SnapshotFiles, row: SnapshotRow | None, run: Path) -> Written | None:
        """Load the snapshot that the ledger names; where in the journal it was taken.

        None if there is none, or it cannot be used: nothing is loaded then, and the reason is
        logged, for the whole journal has to be replayed.
        """
        if row is None:
            return None
        try:
            content = json.loads(files.read(row))
            if (content["format"], content["written_by"]) != (FORMAT, __version__):
                raise SnapshotDamaged(
                    f"`{files.path(row)}` was written by dora-rl {content['written_by']}, and this "
                    f"is {__version__}"
                )
        except SnapshotDamaged as error:
            _LOG.warning("%s: the whole journal is replayed instead, which takes longer.", error)
            return None
        try:
            self._load(content, run)
        except JournalError as error:
            raise UserError(
                f"`{files.path(row)}` cannot be loaded: {error}. Remove it to have the whole "
                "journal replayed instead."
            ) from None
        return Written(*content["position"])

    def _load(self, content: dict[str, Any], run: Path) -> None:
        parts, saved = self._parts(), content["parts"]
        trace = run / TRACE
        if not trace.is_file() or trace.stat().st_size < content["trace_bytes"]:
            _LOG.warning("`%s` was cut or removed: it begins anew at the last snapshot.", trace)
            for name in self._timeline.parts():
                parts.pop(name)
                saved.pop(name, None)
        else:
            self._drawn.begin_at(content["trace_bytes"])
        self._orchestrator.load(content["core"])
        snapshots.load(saved, parts, _KNOWN)
        self._recorder.restored()
        self._collector.restored()
        self._halt = None if content["halt"] is None else Halt(*content["halt"])

    def _parts(self) -> dict[str, object]:
        return {
            "recorder": self._recorder,
            "collector": self._collector,
            "placements": self.placements,
            **self._audit.parts(),
            **self._timeline.parts(),
        }

    def replay(self, run: Path, since: Written, until: Position) -> None:
        """Bring the core and all that follows it from there to where the run was committed."""
        told = [self._recorder, self]
        replay_between(run, since, _place(until), self._orchestrator, told)

    # The timeline's file

    def draw_into(self, trace: Path) -> None:
        """Draw into this file from now on, after what it has of the time before the snapshot."""
        self._drawn.open(trace)

    def flush(self) -> None:
        self._drawn.flush()

    def end(self) -> None:
        """Make the timeline whole, if it has a file."""
        if self._drawn.opened:
            self._timeline.end()
        self._drawn.close()


def _place(position: Position) -> Written:
    return Written(position.records, position.bytes, position.sha256)


class _LateText:
    """Text that is held until its file may be written, and goes there from then on."""

    def __init__(self) -> None:
        self.bytes = 0
        self._begin = 0  # bytes of the file that stay
        self._held: list[str] = []
        self._file: TextIO | None = None

    @property
    def opened(self) -> bool:
        return self._file is not None

    def begin_at(self, place: int) -> None:
        """What was written so far is in the file already, and ends there."""
        self._held.clear()
        self._begin = self.bytes = place

    def write(self, text: str) -> None:
        self.bytes += len(text)
        if self._file is None:
            self._held.append(text)
        else:
            self._file.write(text)

    def open(self, path: Path) -> None:
        if self._begin:
            os.truncate(path, self._begin)
        mode: Literal["a", "w"] = "a" if self._begin else "w"
        file = open(path, mode, encoding="ascii", newline="\n")  # noqa: SIM115
        file.writelines(self._held)
        self._file = file
        self._held.clear()

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def sync(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
