"""Where every trajectory runs, from the stream of a run alone, and the timeline drawn of it.

`Placements` counts: it needs no report of an instance, since each start, end, move, pause and
loss is in the stream. `Timeline` turns the same stream into spans for `observe.trace`. Neither
looks into the core, and neither decides anything.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dora_rl.core import commands as c
from dora_rl.core import events as e
from dora_rl.core.commands import Command
from dora_rl.core.events import Event
from dora_rl.core.types import (
    Fence,
    InstanceId,
    MigrationId,
    Placement,
    TrajectoryId,
    Version,
)
from dora_rl.observe.trace import TraceFile

_FINEST_S = 0.25  # shorter changes of a row are merged
_FINENESS = 2000  # and, as a run grows long, those shorter than this part of it: files stay small
_FIRST_PID = 100  # of instances: each is a process of its own, below that of the run
_TRAINER = -1  # stands for the lane of no instance
_SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")  # viewers paint by names without digits


@dataclass(slots=True)
class _Place:
    """One placement of a trajectory."""

    instance: InstanceId
    fence: Fence
    version: Version
    parked: bool = False
    paused: bool = False  # waits for its environment
    migration: MigrationId | None = None


@dataclass(slots=True)
class _Host:
    """One incarnation of an instance."""

    incarnation: int
    trajectories: set[TrajectoryId] = field(default_factory=set)
    installing: c.Install | None = None
    parking: bool = False


class Placements:
    """How many trajectories generate on each instance with each version, at every moment."""

    def __init__(self) -> None:
        self.running: Counter[tuple[InstanceId, Version]] = Counter()
        self.instances: dict[InstanceId, int] = {}
        """Those that are up, with their incarnation."""
        self._hosts: dict[InstanceId, _Host] = {}
        self._places: dict[TrajectoryId, _Place] = {}
        self._turns: dict[TrajectoryId, int] = {}
        self._migrations: dict[MigrationId, c.Reserve] = {}

    def versions_running(self) -> dict[Version, int]:
        """Trajectories that generate, by version, the oldest first. Safe from another thread."""
        total: Counter[Version] = Counter()
        for (_, version), count in dict(self.running).items():
            total[version] += count
        return dict(sorted(total.items()))

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """The core has handled an event; whatever it ignored is ignored here too."""
        match event:
            case e.TrajectoryFinished():
                if any(type(x) is c.Score and x.trajectory == event.trajectory for x in commands):
                    self._remove(event.trajectory)
                    self._turns.pop(event.trajectory, None)
            case e.TrajectoryPaused():
                self._turn(event.trajectory, event.fence, event.turn, paused=True)
            case e.TrajectoryResumed():
                self._turn(event.trajectory, event.fence, event.turn, paused=False)
            case e.InstanceJoined():
                self._join(event)
            case e.InstanceFailed():
                self._lose(event.instance, event.incarnation)
            case e.VersionInstalled():
                self._installed(event, commands)
            case e.TrajectoriesParked():
                self._park(event)
            case e.MigrationCompleted():
                self._arrive(event, commands)
        for command in commands:
            self._command(command)

    def _command(self, command: Command) -> None:
        match command:
            case c.Start():
                self._start(command)
            case c.Cancel():
                place = self._places.get(command.trajectory)
                if place is not None and place.fence == command.fence:
                    self._remove(command.trajectory)
            case c.Fail():
                self._remove(command.trajectory)
                self._turns.pop(command.trajectory, None)
            case c.Unpark():
                self._unpark(command.placements)
            case c.Park():
                self._hosts[command.instance].parking = True
            case c.Install():
                self._hosts[command.instance].installing = command
                self._hosts[command.instance].parking = False
            case c.Reserve():
                self._reserve(command)
            case c.Release() | c.AbortMigration():
                self._end_migration(command.migration)
            case c.Expel() | c.Dismiss():
                self._lose(command.instance, command.incarnation)

    # Trajectories

    def _start(self, command: c.Start) -> None:
        self._remove(command.trajectory)
        self._places[command.trajectory] = place = _Place(
            command.instance, command.fence, command.version
        )
        self._hosts[command.instance].trajectories.add(command.trajectory)
        self._count(place, 1)

    def _remove(self, trajectory: TrajectoryId) -> None:
        place = self._places.pop(trajectory, None)
        if place is not None:
            self._count(place, -1)
            self._hosts[place.instance].trajectories.discard(trajectory)

    def _count(self, place: _Place, change: int) -> None:
        if place.parked or place.paused:
            return
        key = (place.instance, place.version)
        self.running[key] += change
        if not self.running[key]:
            del self.running[key]

    def _turn(self, trajectory: TrajectoryId, fence: Fence, turn: int, *, paused: bool) -> None:
        place, last = self._places.get(trajectory), self._turns.get(trajectory, 0)
        if place is None or place.fence != fence or turn < last or (paused and turn == last):
            return
        self._turns[trajectory] = turn
        if not place.parked:
            self._count(place, -1)
            place.paused = paused
            self._count(place, 1)

    def _park(self, event: e.TrajectoriesParked) -> None:
        host = self._live(event.instance, event.incarnation)
        if host is None or not host.parking:
            return
        for trajectory, fence in event.parked:
            place = self._places.get(trajectory)
            if place is None or place.fence != fence or place.instance != event.instance:
                continue
            self._count(place, -1)
            place.parked, place.paused, place.migration = True, False, None

    def _unpark(self, placements: Iterable[Placement]) -> None:
        for trajectory, fence in placements:
            place = self._places.get(trajectory)
            if place is not None and place.fence == fence and place.parked:
                place.parked = False
                self._count(place, 1)

    # Instances

    def _live(self, instance: InstanceId, incarnation: int) -> _Host | None:
        host = self._hosts.get(instance)
        return host if host is not None and host.incarnation == incarnation else None

    def _join(self, event: e.InstanceJoined) -> None:
        host = self._hosts.get(event.instance)
        if host is not None:
            if event.incarnation <= host.incarnation:
                return
            self._lose(event.instance, host.incarnation)
        self._hosts[event.instance] = _Host(event.incarnation)
        self.instances[event.instance] = event.incarnation

    def _lose(self, instance: InstanceId, incarnation: int) -> None:
        """Gone, with all that it held; the host stays, to tell its incarnation from later ones."""
        host = self._live(instance, incarnation)
        if host is not None:
            for trajectory in sorted(host.trajectories):
                self._remove(trajectory)
            host.installing, host.parking = None, False
            self.instances.pop(instance, None)

    def _installed(self, event: e.VersionInstalled, commands: Sequence[Command]) -> None:
        """Where running work is carried over, it goes on under the new version."""
        host = self._live(event.instance, event.incarnation)
        if host is None or host.installing is None or host.installing.version != event.version:
            return
        install, host.installing = host.installing, None
        expelled = any(type(x) is c.Expel and x.instance == event.instance for x in commands)
        if expelled or not install.carry:
            return
        for trajectory in host.trajectories:
            place = self._places[trajectory]
            if place.version == install.evict and not place.parked:
                self._count(place, -1)
                place.version = event.version
                self._count(place, 1)

    # Migrations

    def _reserve(self, command: c.Reserve) -> None:
        self._migrations[command.migration] = command
        for move in command.moves:
            place = self._places.get(move.trajectory)
            if place is not None and place.fence == move.fence:
                place.migration = command.migration

    def _arrive(self, event: e.MigrationCompleted, commands: Sequence[Command]) -> None:
        reserve = self._migrations.get(event.migration)
        committed = any(type(x) is c.Release and x.migration == event.migration for x in commands)
        if reserve is None or not committed:
            return
        arrived = set(event.moved)
        for move in reserve.moves:
            place = self._places.get(move.trajectory)
            if (
                place is None
                or place.migration != event.migration
                or Placement(move.trajectory, move.fence) not in arrived
            ):
                continue
            paused = place.paused
            self._remove(move.trajectory)
            moved = _Place(reserve.target, move.new_fence, place.version, paused=paused)
            self._places[move.trajectory] = moved
            self._hosts[reserve.target].trajectories.add(move.trajectory)
            self._count(moved, 1)

    def _end_migration(self, migration: MigrationId) -> None:
        reserve = self._migrations.pop(migration, None)
        for move in () if reserve is None else reserve.moves:
            place = self._places.get(move.trajectory)
            if place is not None and place.migration == migration:
                place.migration = None


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

    def __init__(self, file: TraceFile) -> None:
        self._file = file
        self._rows: dict[tuple[InstanceId, Version], _Row] = {}
        self._named: set[tuple[InstanceId, int]] = set()
        self._instances: set[InstanceId] = set()

    def show(self, now: float, running: dict[tuple[InstanceId, Version], int]) -> None:
        """From `now` on, so many trajectories generate."""
        for key in [key for key in self._rows if key not in running]:
            row = self._rows.pop(key)
            row.change(now, 0)
            self._write(key, row)
        resolution_s = max(_FINEST_S, now / _FINENESS)
        for key, busy in running.items():
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
        taken = {row.number for (name, _), row in self._rows.items() if name == instance}
        return next(number for number in range(len(taken) + 1) if number not in taken)

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


class Timeline:
    """Draws a run as it goes. Feed it every event with its commands; `end` writes the rest."""

    def __init__(self, file: TraceFile, name: str) -> None:
        self.placements = Placements()
        self._file = file
        self._trace = file.process(name)
        self._rows = Rows(file)
        self._open: dict[tuple[str, int, int], tuple[float, str]] = {}
        self._moves: dict[MigrationId, c.Reserve] = {}
        self._suspended = False
        self._now = 0.0

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        self._now = now
        self.placements.observe(now, event, commands)
        self._trace.observe(now, event, commands)
        self._close_spans(now, event)
        for command in commands:
            self._command(now, command)
        self._rows.show(now, {} if self._suspended else self.placements.running)

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
