"""The timeline of a real run, drawn from its stream of events and commands alone.

The trainer, installs and moves are spans of `observe.trace`; below them each instance is a
process of its own, with a row for every version that it runs at the time. It only draws.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from dora_rl.core.protocol import commands as c
from dora_rl.core.protocol import events as e
from dora_rl.core.protocol.commands import Command
from dora_rl.core.protocol.events import Event
from dora_rl.core.protocol.types import InstanceId, MigrationId, Move, Version
from dora_rl.observe.placements import Placements
from dora_rl.observe.trace import Running, TraceFile

_FINEST_S = 0.25  # shorter changes of a row are merged
_FINENESS = 2000  # and, as a run grows long, those shorter than this part of it: files stay small
_FIRST_PID = 100  # of instances: each is a process of its own, below that of the run
_TRAINER = -1  # stands for the lane of no instance
_SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")  # viewers paint by names without digits


class Span(NamedTuple):
    """Something that took time. `lane` is an instance, or None for the trainer."""

    kind: str
    lane: InstanceId | None
    start: float
    end: float
    version: Version
    detail: str = ""


class _Row:
    """What one version has been doing on one instance since `start`."""

    __slots__ = ("busy", "busy_s", "changed", "number", "start")

    def __init__(self, number: int, now: float, busy: int) -> None:
        self.number = number
        self.begin(now, busy)

    def begin(self, now: float, busy: int) -> None:
        self.start = self.changed = now
        self.busy = busy
        self.busy_s = 0.0

    def change(self, now: float, busy: int) -> None:
        self.busy_s += (now - self.changed) * self.busy
        self.changed = now
        self.busy = busy


class Rows:
    """The instances in a trace file: on each, one row for every version that runs at the time."""

    SAVED = ("_rows", "_named", "_instances")
    WIRED = ("_file", "_taken")

    def __init__(self, file: TraceFile) -> None:
        self._file = file
        self._rows: dict[tuple[InstanceId, Version], _Row] = {}
        self._named: set[tuple[InstanceId, int]] = set()
        self._instances: set[InstanceId] = set()
        # Numbers of the rows of each instance, all of them; None after a restore.
        self._taken: dict[InstanceId, set[int]] | None = None

    def show(self, now: float, running: dict[tuple[InstanceId, Version], int]) -> None:
        """From `now` on, so many trajectories generate."""
        self.change(now, dict.fromkeys([*self._rows, *running]), running)

    def change(
        self,
        now: float,
        changed: Iterable[tuple[InstanceId, Version]],
        running: Mapping[tuple[InstanceId, Version], int],
    ) -> None:
        """As `show`, if all but these are as they were."""
        left = []
        for key in changed:
            if key in running:
                left.append(key)
            elif key in self._rows:
                row = self._rows.pop(key)
                self._numbers(key[0]).discard(row.number)
                row.change(now, 0)
                self._write(key, row)
        resolution_s = max(_FINEST_S, now / _FINENESS)
        for key in left:
            busy = running[key]
            found = self._rows.get(key)
            if found is None:
                self._rows[key] = _Row(self._free(key[0]), now, busy)
            elif found.busy != busy:
                found.change(now, busy)
                if now - found.start >= resolution_s:
                    self._write(key, found)
                    found.begin(now, busy)

    def _free(self, instance: InstanceId) -> int:
        """The first row of an instance that no version is on."""
        taken = self._numbers(instance)
        number = next(number for number in range(len(taken) + 1) if number not in taken)
        taken.add(number)
        return number

    def _numbers(self, instance: InstanceId) -> set[int]:
        """Of the rows of an instance."""
        if self._taken is None:
            self._taken = {}
            for (owner, _), row in self._rows.items():
                self._taken.setdefault(owner, set()).add(row.number)
        return self._taken.setdefault(instance, set())

    def _write(self, key: tuple[InstanceId, Version], row: _Row) -> None:
        instance, version = key
        seconds = row.changed - row.start
        if seconds <= 0.0:
            return
        self._name(instance, row.number)
        mean = row.busy_s / seconds
        begin = round(row.start * 1e6)
        self._file.put(
            {
                "ph": "X",
                "pid": _FIRST_PID + instance,
                "tid": row.number + 1,
                "ts": begin,
                "dur": round(row.changed * 1e6) - begin,
                "name": f"v{str(version).translate(_SUBSCRIPTS)} · {mean:.0f} running",
                "cat": "rollout",
                "args": {"version": version, "running": round(mean, 2)},
            }
        )

    def _name(self, instance: InstanceId, number: int) -> None:
        if (instance, number) in self._named:
            return
        if instance not in self._instances:
            self._instances.add(instance)
            self._metadata(instance, 0, "process_name", {"name": f"instance {instance}"})
            self._metadata(instance, 0, "process_sort_index", {"sort_index": instance + 2})
        self._named.add((instance, number))
        self._metadata(instance, number + 1, "thread_name", {"name": f"versions {number + 1}"})
        self._metadata(instance, number + 1, "thread_sort_index", {"sort_index": number})

    def _metadata(
        self, instance: InstanceId, tid: int, name: str, args: dict[str, str | int]
    ) -> None:
        pid = _FIRST_PID + instance
        self._file.put({"ph": "M", "pid": pid, "tid": tid, "ts": 0, "name": name, "args": args})


RECORDS: tuple[type, ...] = (_Row, Running, c.Install, c.Reserve, Move)


class Timeline:
    """Draws a run as it goes. Feed it every event with its commands; `end` writes the rest."""

    SAVED = ("_open", "_moves", "_suspended", "_now")
    WIRED = ("_placements", "_file", "_trace", "_rows", "_shown")

    def __init__(self, file: TraceFile, name: str, placements: Placements) -> None:
        self._placements = placements
        self._file = file
        self._trace = file.process(name)
        self._rows = Rows(file)
        self._open: dict[tuple[str, int, int], tuple[float, str]] = {}
        self._moves: dict[MigrationId, c.Reserve] = {}
        self._suspended = False
        self._now = 0.0
        self._shown = False  # whether the rows were those of the placements after the last event

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """The core has handled an event, and the placements have been told."""
        self._now = now
        self._trace.observe(now, event, commands)
        self._close_spans(now, event)
        for command in commands:
            self._command(now, command)
        running = self._placements.running
        if self._suspended or not self._shown:
            self._rows.show(now, {} if self._suspended else running)
        else:
            self._rows.change(now, self._placements.changed, running)
        self._shown = not self._suspended

    def parts(self) -> dict[str, object]:
        """All that remembers something, by name: see `core.history.snapshots`."""
        return {
            "timeline": self,
            "timeline.file": self._file,
            "timeline.trace": self._trace,
            "timeline.rows": self._rows,
        }

    def end(self, now: float | None = None) -> None:
        """Write what is still open, and make the file whole. Nothing may follow."""
        now = self._now if now is None else max(now, self._now)
        self._rows.show(now, {})
        for kind, lane, version in list(self._open):
            self._close(now, kind, lane, version, "not ended")
        self._trace.end(now)
        self._file.close()

    def _close_spans(self, now: float, event: Event) -> None:
        match event:
            case e.BatchTrained():
                self._close(now, "train", _TRAINER, event.step)
            case e.BatchFailed() | e.BatchRejected():
                self._close(now, "train", _TRAINER, event.step, event.reason)
            case e.WeightsPublished(version=0):
                self._trace.span(Span("load", None, 0.0, now, 0))
            case e.WeightsPublished():
                self._close(now, "publish", _TRAINER, event.version)
            case e.PublicationFailed():
                self._close(now, "publish", _TRAINER, event.version, event.reason)
            case e.VersionInstalled():
                self._close(now, "install", event.instance, event.version)
            case e.InstallFailed():
                self._close(now, "install", event.instance, event.version, event.reason)
            case e.InstanceFailed():
                self._lost(now, event.instance, event.reason)
            case e.InstanceStopped():
                self._lost(now, event.instance, "the run was stopped")

    def _command(self, now: float, command: Command) -> None:
        match command:
            case c.Train():
                groups = f"{len(command.groups)} groups"
                self._open.setdefault(("train", _TRAINER, command.step), (now, groups))
            case c.Publish():
                self._open.setdefault(("publish", _TRAINER, command.version), (now, ""))
            case c.Install():
                key = ("install", command.instance, command.version)
                self._open.setdefault(key, (now, "under running work" if command.carry else ""))
            case c.Reserve():
                self._moves[command.migration] = command
                what = f"{len(command.moves)} from instance {command.source}"
                self._open[("migrate", command.migration, command.version)] = (now, what)
            case c.Release():
                self._close_move(now, command.migration)
            case c.AbortMigration():
                self._close_move(now, command.migration, "given up")
            case c.Expel():
                self._lost(now, command.instance, command.reason)
            case c.Suspend():
                self._suspended = True
                self._open.setdefault(("suspend", _TRAINER, 0), (now, ""))
            case c.Resume():
                self._suspended = False
                self._close(now, "suspend", _TRAINER, 0)

    def _close(self, now: float, kind: str, lane: int, version: Version, problem: str = "") -> None:
        opened = self._open.pop((kind, lane, version), None)
        if opened is None:
            return  # an answer that came twice
        start, detail = opened
        if problem:
            detail = f"{detail}: {problem}" if detail else problem
        if kind == "migrate":
            where: InstanceId | None = self._moves.pop(lane).target
        else:
            where = None if lane == _TRAINER else lane
        self._trace.span(Span(kind, where, start, now, version, detail))

    def _close_move(self, now: float, migration: MigrationId, problem: str = "") -> None:
        reserve = self._moves.get(migration)
        if reserve is not None:
            self._close(now, "migrate", migration, reserve.version, problem)

    def _lost(self, now: float, instance: InstanceId, reason: str) -> None:
        for kind, lane, version in list(self._open):
            if kind == "install" and lane == instance:
                self._close(now, kind, lane, version, reason)
