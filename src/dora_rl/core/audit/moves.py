"""The audit's own picture of migrations: who moves where, and whether it may.

It must not look into the orchestrator; trajectories are in `work`, instances in `fleet`.
"""

from collections.abc import Sequence

from dora_rl.core.audit.fleet import Fleet, Host
from dora_rl.core.audit.records import PLACED, Migration
from dora_rl.core.audit.report import Breaches, Promise
from dora_rl.core.audit.work import Work
from dora_rl.core.protocol import commands as c
from dora_rl.core.protocol import events as e
from dora_rl.core.protocol.types import MigrationId, TrajectoryId, Version


class Moves:
    SAVED = ("_live", "_committed")
    WIRED = ("_fleet", "_work", "_breaches")

    def __init__(self, fleet: Fleet, work: Work, breaches: Breaches) -> None:
        self._fleet = fleet
        self._work = work
        self._breaches = breaches
        self._live: dict[MigrationId, Migration] = {}
        self._committed: set[MigrationId] = set()  # and the source not yet released

    def reserve(self, command: c.Reserve) -> None:
        if command.migration in self._live:
            return  # a repeat
        what = f"Reserve of migration {command.migration}"
        self._fleet.check_exists(command.version, what)
        source = self._fleet.hosts.get(command.source)
        target = self._fleet.hosts.get(command.target)
        if source is None or not source.alive:
            self._add(f"{what}: source {command.source} is not alive")
        if target is None or not self._fleet.serves(target, command.version):
            self._add(f"{what}: target {command.target} does not serve version {command.version}")
        migration = Migration(command.migration, source, target, command.moves)
        for trajectory, fence, new_fence in command.moves:
            member = self._work.find(trajectory)
            if member is None or member.stage not in PLACED or member.fence != fence:
                self._add(f"{what}: trajectory {trajectory} does not run under fence {fence}")
                continue
            if member.host is not source:
                self._add(f"{what}: trajectory {trajectory} is not on instance {command.source}")
            pinned = self._work.version_of(trajectory)
            if self._work.pins_version and pinned != command.version:
                self._add(f"{what}: trajectory {trajectory} is not of version {command.version}")
            if member.moving is not None:
                self._add(
                    f"{what}: trajectory {trajectory} is in migration {member.moving.id} already"
                )
            if new_fence <= fence:
                self._add(f"{what}: trajectory {trajectory} would get an old fence")
            member.moving = migration
        self._live[command.migration] = migration
        if target is not None:
            target.arriving[command.migration] = command.version

    def transfer(self, command: c.Transfer) -> None:
        migration = self._live.get(command.migration)
        if migration is None:
            self._add(f"Transfer of migration {command.migration}: it is not under way")
        else:
            migration.transferring = True

    def completed(self, event: e.MigrationCompleted, commands: Sequence[c.Command]) -> None:
        migration = self._live.get(event.migration)
        if migration is None or not migration.transferring:
            return
        if c.AbortMigration(event.migration) in commands:
            return  # the core undoes it: the command ends it
        for trajectory, fence in event.moved:
            member = self._work.find(trajectory)
            # Else it ended, arrived, or was placed anew meanwhile.
            if member is not None and member.moving is migration and member.fence == fence:
                self._work.arrive(trajectory, member)
        self._end(event.migration)
        self._committed.add(event.migration)

    def failed(self, event: e.MigrationFailed) -> None:
        self._end(event.migration)

    def abort(self, command: c.AbortMigration) -> None:
        self._end(command.migration)

    def release(self, command: c.Release) -> None:
        if command.migration in self._committed:
            self._committed.discard(command.migration)
        else:
            self._add(f"Release of migration {command.migration}: the target does not have it yet")

    def lose(self, host: Host) -> None:
        """A migration ends with either of its ends."""
        for number in [n for n, m in self._live.items() if host in (m.source, m.target)]:
            self._end(number)

    def arriving(self, host: Host, version: Version) -> TrajectoryId | None:
        """A trajectory on its way here that needs the version."""
        for number, moved in host.arriving.items():
            if moved != version:
                continue
            migration = self._live[number]
            for move in migration.moves:
                member = self._work.find(move.trajectory)
                if member is not None and member.moving is migration:
                    return move.trajectory
        return None

    def _end(self, number: MigrationId) -> None:
        migration = self._live.pop(number, None)
        if migration is None:
            return
        if migration.target is not None:
            migration.target.arriving.pop(number, None)
        for move in migration.moves:
            member = self._work.find(move.trajectory)
            if member is not None and member.moving is migration:
                member.moving = None

    def _add(self, what: str) -> None:
        self._breaches.add(Promise.MIGRATION, what)
