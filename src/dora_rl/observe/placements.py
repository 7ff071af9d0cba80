"""Where every trajectory runs, from the stream of a run alone.

No report of an instance is needed: each start, end, move, pause and loss is in the stream. It
does not look into the core, and decides nothing.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from dora_rl.core.protocol import commands as c
from dora_rl.core.protocol import events as e
from dora_rl.core.protocol.commands import Command
from dora_rl.core.protocol.events import Event
from dora_rl.core.protocol.types import (
    Fence,
    InstanceId,
    MigrationId,
    Move,
    Placement,
    TrajectoryId,
    Version,
)


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


RECORDS: tuple[type, ...] = (_Place, _Host, c.Install, c.Reserve, Move)


class Placements:
    """How many trajectories generate on each instance with each version, at every moment."""

    SAVED = ("running", "instances", "_hosts", "_places", "_turns", "_migrations")
    WIRED = ("changed",)

    def __init__(self) -> None:
        self.running: Counter[tuple[InstanceId, Version]] = Counter()
        self.changed: dict[tuple[InstanceId, Version], None] = {}
        """What the last event changed of `running`, in that order."""
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
        self.changed.clear()
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
            case e.InstanceFailed() | e.InstanceStopped():
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
            case c.Evict():
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
        self.changed[key] = None
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
        """Where running work is carried over, it continues under the new version."""
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
