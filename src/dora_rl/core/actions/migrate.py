"""The protocol of a migration: reserve, transfer, then commit or undo.

A member may end while it is on its way: it then leaves the migration, and the others continue.
Its place at the target is kept until the migration is over, since a copy may be there.
"""

from collections.abc import Iterable

from dora_rl.core.protocol.commands import AbortMigration, Cancel, Release, Reserve, Transfer
from dora_rl.core.protocol.types import (
    Fence,
    Move,
    Placement,
    TrajectoryId,
    TrajectoryState,
    Version,
)
from dora_rl.core.state.fleet import Instance
from dora_rl.core.state.run import State
from dora_rl.core.state.timers import Wait
from dora_rl.core.state.transfers import Migration, Phase
from dora_rl.core.state.work import Trajectory

# Bound once: in Python 3.11 an enum's member takes ten times as long to find as a global.
_MIGRATION, _TRANSFERRING, _PARKED = Wait.MIGRATION, Phase.TRANSFERRING, TrajectoryState.PARKED


def open_migration(
    state: State,
    source: Instance,
    target: Instance,
    version: Version,
    trajectories: Iterable[TrajectoryId],
) -> None:
    """Phase one, for those that are still at the source and not on their way already."""
    if not target.serves(version) or target is source:
        return
    moves = []
    for trajectory_id in trajectories:
        trajectory = state.work.trajectories.get(trajectory_id)
        if (
            trajectory is not None
            and trajectory.instance == source.id
            and trajectory.migration is None
        ):
            trajectory.migration = state.migrations.next_id
            moves.append(Move(trajectory_id, trajectory.fence, state.fence()))
    if not moves:
        return
    migration = state.migrations.open(source.id, target.id, version, tuple(moves), state.now)
    state.fleet.reserve(target, version, len(moves))
    state.timers.set(state.now + state.settings.migration_timeout_s, _MIGRATION, migration.id)
    state.emit(Reserve(migration.id, source.id, target.id, version, migration.moves))


def reserved(state: State, migration: Migration) -> None:
    """Phase two, unless every member has ended meanwhile."""
    if any(_member(state, migration, move) for move in migration.moves):
        migration.phase = _TRANSFERRING
        state.emit(Transfer(migration.id))
    else:
        undo_migration(state, migration, tell=True)


def commit_migration(state: State, migration: Migration, moved: Iterable[Placement]) -> None:
    """The target runs these; the source may free its copies."""
    arrived = set(moved)
    members = {move: _member(state, migration, move) for move in migration.moves}
    state.estimates.observe_migration(state.now - migration.began_at)
    _close(state, migration)
    state.emit(Release(migration.id))
    for move, trajectory in members.items():
        if move[:2] not in arrived:
            continue
        if trajectory is not None:
            _arrive(state, migration, trajectory, move.new_fence)
        else:  # it ended while its KV was on the way
            state.emit(Cancel(move.trajectory, move.new_fence, migration.target))


def _arrive(state: State, migration: Migration, trajectory: Trajectory, fence: Fence) -> None:
    """One member runs at the target now."""
    source = state.fleet.instances[migration.source]
    target = state.fleet.instances[migration.target]
    version = migration.version
    state.fleet.discard(source, version, trajectory.id, trajectory.paused)
    if trajectory.state is _PARKED:
        state.work.unpark(trajectory, state.now)
    state.work.relocate(trajectory, target.id, fence)
    trajectory.progress_at = state.now
    state.fleet.add(target, version, trajectory.id)
    if trajectory.paused:
        state.fleet.pause(target, trajectory.id)
    state.migrations.committed += 1
    state.unplaced.update(source.hosts)


def undo_migration(state: State, migration: Migration, *, tell: bool) -> None:
    """Every member continues where it was."""
    state.migrations.undone += 1
    state.undone.add(migration.version)
    _close(state, migration)
    if tell:
        state.emit(AbortMigration(migration.id))


def on_its_way(state: State, trajectory: Trajectory, fence: Fence) -> bool:
    """Whether a transfer under way gives this trajectory this fence."""
    if trajectory.migration is None:
        return False
    migration = state.migrations.live[trajectory.migration]
    return migration.phase is _TRANSFERRING and any(
        move.trajectory == trajectory.id and move.new_fence == fence for move in migration.moves
    )


def _member(state: State, migration: Migration, move: Move) -> Trajectory | None:
    trajectory = state.work.trajectories.get(move.trajectory)
    return trajectory if trajectory is not None and trajectory.migration == migration.id else None


def _close(state: State, migration: Migration) -> None:
    """End a migration: its members are free, and so are their places at the target."""
    for move in migration.moves:
        trajectory = _member(state, migration, move)
        if trajectory is not None:
            trajectory.migration = None
    target = state.fleet.instances[migration.target]
    state.fleet.reserve(target, migration.version, -len(migration.moves))
    state.fleet.offer_queue(state.fleet.instances[migration.source])
    del state.migrations.live[migration.id]
    state.unplaced.update(target.hosts)
    state.disturbed.update((migration.source, migration.target))
