"""Migrations: a target makes room, KV moves, the source keeps its copy until it is released.

Invariants: a trajectory continues in exactly one place of those that the core may believe in; a
failure before the end leaves every member where it was; an end is remembered, so that a
repeated command is answered again and not performed again. Between two processes the link is
direct: when one of them is gone or gives up before the end, the other knows.
"""

from math import inf

from dora_rl.core.protocol.commands import AbortMigration, Release, Reserve, Transfer
from dora_rl.core.protocol.events import (
    Event,
    MigrationCompleted,
    MigrationFailed,
    MigrationReserved,
)
from dora_rl.core.protocol.types import Move, Placement
from dora_rl.simulator.errors import WorldError
from dora_rl.simulator.faults import Faults
from dora_rl.simulator.hosting import refuse
from dora_rl.simulator.instance import Arrival, Instance
from dora_rl.simulator.params import WorldParams
from dora_rl.simulator.runs import AWAITED, FROZEN, KEPT, PARKED, PAUSED, RUNNING, Run
from dora_rl.simulator.surroundings import Surroundings
from dora_rl.simulator.usage import Span

# Ends that are answered again. Ids only grow, so an older one is known to have ended.
REMEMBERED = 4096

RESERVING = 0
RESERVED = 1
MOVING = 2
DONE = 3


class Migration:
    """One migration under way, with the two processes that it binds."""

    __slots__ = (
        "cut",
        "holds_room",
        "id",
        "incarnations",
        "kv",
        "moves",
        "slots",
        "source",
        "start",
        "state",
        "target",
        "version",
    )

    def __init__(self, command: Reserve, source: Instance, target: Instance, now: float) -> None:
        self.id = command.migration
        self.version = command.version
        self.moves: tuple[Move, ...] = command.moves
        self.source = source
        self.target = target
        self.incarnations = (source.incarnation, target.incarnation)
        self.state = RESERVING
        self.holds_room = False  # `slots` and `kv` are reserved on the target
        self.slots = 0
        self.kv = 0
        self.start = now
        self.cut: list[tuple[Run, int]] = []  # what the source keeps, with its new fence

    @property
    def source_lives(self) -> bool:
        return self.source.alive and self.source.incarnation == self.incarnations[0]

    @property
    def target_lives(self) -> bool:
        return self.target.alive and self.target.incarnation == self.incarnations[1]


class Migrations:
    """Performs `Reserve`, `Transfer`, `Release` and `AbortMigration`."""

    def __init__(
        self,
        around: Surroundings,
        params: WorldParams,
        instances: list[Instance],
        faults: Faults,
        leases: bool,
    ) -> None:
        self._around = around
        self._clock = around.clock
        self._instances = instances
        self._faults = faults
        self._by_kv = params.kv_migration
        self._lease_s = params.migration_lease_s if leases else inf
        self.live: dict[int, Migration] = {}
        self._answers: dict[int, Event | None] = {}  # of those that ended last
        self._forgotten = -1  # the latest whose answer is not kept any more

    def lost(self, instance: Instance) -> None:
        """A process is gone: what it took part in fails, unless its part was done."""
        for migration in list(self.live.values()):
            if migration.state < DONE and instance in (migration.source, migration.target):
                self._fail(migration, "instance_lost")

    # Phase one

    def reserve(self, target: Instance, command: Reserve) -> None:
        migration_id = command.migration
        if self._answered(target, migration_id):
            return
        migration = self.live.get(migration_id)
        if migration is not None:
            if migration.state != RESERVING:
                target.emit(MigrationReserved(migration_id))
            return
        if not target.serves(command.version):
            refuse(target, f"{command}, but the target does not serve version {command.version}")
            return
        source = self._instances[command.source]
        migration = Migration(command, source, target, self._clock.now)
        self.live[migration_id] = migration
        target.settle()  # who is in line already comes first
        if self._weigh(migration):
            self._hold_room(migration)
        latency_s = self._around.costs.efficiency.transfer_latency_s
        self._clock.after(latency_s, self._reserved, migration)

    def _weigh(self, migration: Migration) -> bool:
        """Find the room that is needed, and whether the target has it."""
        source, target = migration.source, migration.target
        if not migration.source_lives:
            return False
        source.advance(self._clock.now)
        target.advance(self._clock.now)
        slots = kv = 0
        for move in migration.moves:
            run = source.runs.get(move.fence)
            if run is not None:
                grown = source.steps - run.joined if run.state == RUNNING else 0
                kv += run.context + grown
                slots += run.state != PAUSED
        migration.slots, migration.kv = slots, kv
        return (
            target.size + target.reserved_slots + slots <= target.slots
            and target.used + target.reserved_kv + kv <= target.capacity
        )

    def _hold_room(self, migration: Migration) -> None:
        migration.holds_room = True
        target = migration.target
        target.reserved_slots += migration.slots
        target.reserved_kv += migration.kv
        fences = tuple(move.fence for move in migration.moves)
        target.expecting[migration.id] = Arrival(migration.version, migration.source, fences)
        target.touch()

    def _free_room(self, migration: Migration) -> None:
        target = migration.target
        if migration.holds_room and migration.target_lives:
            migration.holds_room = False
            target.reserved_slots -= migration.slots
            target.reserved_kv -= migration.kv
            target.expecting.pop(migration.id, None)
            target.touch()

    def _reserved(self, migration: Migration) -> None:
        if migration.state != RESERVING or self.live.get(migration.id) is not migration:
            return
        target = migration.target
        if not migration.source_lives:
            self._fail(migration, "no_source")
        elif not migration.holds_room:
            self._fail(migration, "no_room")
        elif self._strikes(migration):
            self._fail(migration, "reserve_failed")
        else:
            migration.state = RESERVED
            self._lease(migration)
            target.emit(MigrationReserved(migration.id))

    # Phase two

    def transfer(self, source: Instance, command: Transfer) -> None:
        migration_id = command.migration
        if self._answered(source, migration_id):
            return
        migration = self.live.get(migration_id)
        if migration is None or migration.state == RESERVING:
            raise WorldError(
                f"the transfer of migration {migration_id} is asked for before its reserve"
            )
        if migration.state == DONE and migration.target_lives:
            migration.target.emit(self._completed(migration))
        if migration.state != RESERVED:
            return
        migration.state = MOVING
        source.advance(self._clock.now)
        tokens = 0
        for move in migration.moves:
            run = source.runs.get(move.fence)
            if run is None or run.state in (FROZEN, KEPT):
                continue
            if run.state == RUNNING:
                source.leave(run)
            migration.cut.append((run, move.new_fence))
            run.was_parked = run.state == PARKED
            run.state = FROZEN
            if run.held or run.on_host:
                tokens += run.context - run.debt
        source.touch()
        costs = self._around.costs
        duration_s = costs.kv_transfer_time(tokens) - costs.kv_transfer_time(0)
        share = self._faults.params.failed_kv_path
        by_kv = self._by_kv and not self._faults.strikes(
            self._clock.now, "failed_kv_path", share, f"migration {migration_id}"
        )
        argument = (migration, tokens if by_kv else None)
        self._clock.after(duration_s if by_kv else 0.0, self._moved, argument)

    def _moved(self, argument: tuple[Migration, int | None]) -> None:
        migration, tokens = argument
        if migration.state != MOVING or self.live.get(migration.id) is not migration:
            return
        ready_at = max(migration.source.frozen_until, migration.target.frozen_until)
        if ready_at > self._clock.now:
            self._clock.at(ready_at, self._moved, argument)
            return
        if self._strikes(migration):
            self._fail(migration, "transfer_failed")
            return
        if not migration.target.serves(migration.version):  # only if the core gave it up before
            self._fail(migration, "version_gone")
            return
        migration.state = DONE
        self._free_room(migration)
        for run, fence in migration.cut:
            if run.state == FROZEN:
                run.state = KEPT
                self._arrive(migration, run, fence, tokens is not None)
        facts, now = self._around.facts, self._clock.now
        facts.migrations += 1
        facts.kv_bytes_moved += (tokens or 0) * self._around.costs.kv_bytes_per_token
        if self._around.recorder is not None:
            detail = f"from {migration.source.id}"
            self._around.recorder.span(
                Span(
                    "migrate", migration.target.id, migration.start, now, migration.version, detail
                )
            )
        self._lease(migration)
        migration.target.emit(self._completed(migration))

    def _arrive(self, migration: Migration, run: Run, fence: int, by_kv: bool) -> None:
        target = migration.target
        twin = run.copy(fence, target.versions[migration.version])
        self._around.facts.migrated += 1
        if run.held or run.on_host:
            if by_kv:
                target.hold(twin)
            else:
                self._around.facts.reprefilled_tokens += run.context - run.debt
                twin.debt = twin.context
        target.runs[fence] = twin
        if twin.env == AWAITED and twin.answer_at < inf:
            self._clock.at(twin.answer_at, target.answer, twin)
        target.go_on(twin)

    def _completed(self, migration: Migration) -> Event:
        moved = tuple(
            Placement(run.trajectory, run.fence) for run, _ in migration.cut if run.state == KEPT
        )
        return MigrationCompleted(migration.id, moved)

    # The end

    def release(self, source: Instance, command: Release) -> None:
        """The source frees its copies."""
        migration_id = command.migration
        migration = self.live.get(migration_id)
        if migration is None:
            return
        if migration.state != DONE:
            raise WorldError(f"migration {migration_id} is released before it is done")
        self._end(migration, self._completed(migration))
        for run, _ in migration.cut:
            if run.state == KEPT:
                source.remove(run)

    def given_up(self, migration_id: int) -> Migration | None:
        """The core aborts a migration, whether or not anybody will hear of it."""
        migration = self.live.get(migration_id)
        if migration is None:
            if migration_id not in self._answers:
                self._remember(migration_id, None)  # a reserve that is still on its way is void
        else:
            migration.target.expecting.pop(migration_id, None)
        return migration

    def abort(self, instance: Instance, command: AbortMigration) -> None:
        """One side hears of the end: the target forgets, the source continues."""
        migration = self.live.get(command.migration)
        if migration is None:
            return
        if migration.state < DONE:
            self._undo(migration, None)
            return
        if instance is migration.target:
            for _, fence in migration.cut:
                twin = instance.runs.get(fence)
                if twin is not None:
                    self._around.facts.cancelled_tokens += twin.done
                    instance.remove(twin)
        else:
            self._thaw(migration)

    def _fail(self, migration: Migration, reason: str) -> None:
        self._around.facts.failed_migrations += 1
        answer = MigrationFailed(migration.id, reason)
        self._undo(migration, answer)
        speaker = migration.target if migration.target_lives else migration.source
        if speaker.alive:
            speaker.emit(answer)

    def _undo(self, migration: Migration, answer: Event | None) -> None:
        self._free_room(migration)
        self._thaw(migration)
        self._end(migration, answer)

    def _thaw(self, migration: Migration) -> None:
        """The source continues with what it has kept."""
        if not migration.source_lives:
            return
        for run, _ in migration.cut:
            if run.state in (FROZEN, KEPT):
                if run.was_parked:
                    run.state = PARKED
                else:
                    migration.source.go_on(run)

    def _end(self, migration: Migration, answer: Event | None) -> None:
        del self.live[migration.id]
        self._remember(migration.id, answer)

    def _remember(self, migration_id: int, answer: Event | None) -> None:
        self._answers[migration_id] = answer
        if len(self._answers) > REMEMBERED:
            oldest = next(iter(self._answers))
            del self._answers[oldest]
            self._forgotten = max(self._forgotten, oldest)

    def _answered(self, instance: Instance, migration_id: int) -> bool:
        """Whether a migration has ended already; what is remembered of it is said again."""
        answer = self._answers.get(migration_id)
        if answer is not None:
            instance.emit(answer)
        return migration_id in self._answers or (
            migration_id <= self._forgotten and migration_id not in self.live
        )

    def _strikes(self, migration: Migration) -> bool:
        share = self._faults.params.failed_migration
        subject = f"migration {migration.id} in state {migration.state}"
        return self._faults.strikes(self._clock.now, "failed_migration", share, subject)

    def _lease(self, migration: Migration) -> None:
        if self._lease_s < inf:
            self._clock.after(self._lease_s, self._expire, (migration, migration.state))

    def _expire(self, argument: tuple[Migration, int]) -> None:
        """Nobody spoke of it again, so the last word was lost: free what is held."""
        migration, state = argument
        if self.live.get(migration.id) is not migration or migration.state != state:
            return
        if state == RESERVED:
            self._undo(migration, None)
            return
        self._end(migration, None)
        if migration.source_lives:
            for run, _ in migration.cut:
                if run.state == KEPT:
                    migration.source.remove(run)
