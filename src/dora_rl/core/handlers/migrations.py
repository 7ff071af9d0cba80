"""Answers to the two phases of a migration, and to parking."""

from dora_rl.core import hosting
from dora_rl.core.events import (
    MigrationCompleted,
    MigrationFailed,
    MigrationReserved,
    TrajectoriesParked,
)
from dora_rl.core.handlers.common import absorb, live_instance, refuse
from dora_rl.core.migration import Migration, Phase
from dora_rl.core.state import State
from dora_rl.core.transfers import commit_migration, reserved, undo_migration
from dora_rl.core.types import MigrationId, Placement, TrajectoryState


def trajectories_parked(state: State, event: TrajectoriesParked) -> None:
    instance = live_instance(state, event.instance, event.incarnation)
    if instance is None:
        return
    if not instance.parking:
        return absorb(state, "duplicate")
    for name, fence in event.parked:
        trajectory = state.ledger.trajectories.get(name)
        if (
            trajectory is not None
            and trajectory.fence == fence
            and trajectory.instance == instance.id
            and trajectory.state is TrajectoryState.RUNNING
            and trajectory.version == instance.outgoing
        ):
            trajectory.migration = None
            state.fleet.discard(instance, trajectory.version, name, trajectory.paused)
            state.fleet.park(instance, trajectory.version, name)
            state.ledger.park(trajectory)
    hosting.emptied(state, instance)


def migration_reserved(state: State, event: MigrationReserved) -> None:
    migration = _migration(state, event, event.migration)
    if migration is None:
        return
    if migration.phase is not Phase.RESERVING:
        return absorb(state, "duplicate")
    reserved(state, migration)


def migration_completed(state: State, event: MigrationCompleted) -> None:
    migration = _migration(state, event, event.migration)
    if migration is None:
        return
    if migration.phase is not Phase.TRANSFERRING:
        refuse(event, "the transfer was not asked for")
    if not {Placement(m.trajectory, m.fence) for m in migration.moves}.issuperset(event.moved):
        refuse(event, "a trajectory is not of this migration")
    commit_migration(state, migration, event.moved)


def migration_failed(state: State, event: MigrationFailed) -> None:
    migration = _migration(state, event, event.migration)
    if migration is not None:
        undo_migration(state, migration, tell=True)


def _migration(state: State, event: object, name: MigrationId) -> Migration | None:
    if not 0 <= name < state.migrations.next_id:
        refuse(event, "the migration was never begun")
    migration = state.migrations.live.get(name)
    if migration is None:
        absorb(state, "duplicate")
    return migration
