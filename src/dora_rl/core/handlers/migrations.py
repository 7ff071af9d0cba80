"""Answers to the two phases of a migration, and to parking."""

from dora_rl.core.actions import host
from dora_rl.core.actions.migrate import commit_migration, reserved, undo_migration
from dora_rl.core.handlers.common import absorb, live_instance, refuse
from dora_rl.core.protocol.events import (
    MigrationCompleted,
    MigrationFailed,
    MigrationReserved,
    TrajectoriesParked,
)
from dora_rl.core.protocol.types import MigrationId, SleepState, TrajectoryState
from dora_rl.core.state.run import State
from dora_rl.core.state.transfers import Migration, Phase

_RESERVING, _TRANSFERRING = Phase.RESERVING, Phase.TRANSFERRING  # bound once: in every move


def trajectories_parked(state: State, event: TrajectoriesParked) -> None:
    instance = live_instance(state, event.instance, event.incarnation)
    if instance is None:
        return
    if not instance.parking:
        return absorb(state, "duplicate")
    draining = instance.sleep is SleepState.DRAINING
    for trajectory_id, fence in event.parked:
        trajectory = state.work.trajectories.get(trajectory_id)
        if (
            trajectory is not None
            and trajectory.fence == fence
            and trajectory.instance == instance.id
            and trajectory.state is TrajectoryState.RUNNING
            and (trajectory.version == instance.outgoing or draining)
        ):
            trajectory.migration = None
            state.fleet.discard(instance, trajectory.version, trajectory_id, trajectory.paused)
            state.fleet.park(instance, trajectory.version, trajectory_id)
            state.work.park(trajectory)
    if draining:
        host.parked_to_sleep(state, instance)
    else:
        host.emptied(state, instance)


def migration_reserved(state: State, event: MigrationReserved) -> None:
    migration = _migration(state, event, event.migration)
    if migration is None:
        return
    if migration.phase is not _RESERVING:
        return absorb(state, "duplicate")
    reserved(state, migration)
    state.unchanged = not state.disturbed


def migration_completed(state: State, event: MigrationCompleted) -> None:
    migration = _migration(state, event, event.migration)
    if migration is None:
        return
    if migration.phase is not _TRANSFERRING:
        refuse(event, "the transfer was not asked for")
    if not {move[:2] for move in migration.moves}.issuperset(event.moved):
        refuse(event, "a trajectory is not of this migration")
    commit_migration(state, migration, event.moved)


def migration_failed(state: State, event: MigrationFailed) -> None:
    migration = _migration(state, event, event.migration)
    if migration is not None:
        undo_migration(state, migration, tell=True)


def _migration(state: State, event: object, migration_id: MigrationId) -> Migration | None:
    if not 0 <= migration_id < state.migrations.next_id:
        refuse(event, "the migration was never begun")
    migration = state.migrations.live.get(migration_id)
    if migration is None:
        absorb(state, "duplicate")
    return migration
