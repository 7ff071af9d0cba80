"""Work stealing: idle slots take turns over that queue on another instance of their version.

A trajectory of several turns gives its slot away while its environment works. When it wants one
again, its instance may be full while others of its version have slots to spare.
"""

from dora_rl.core.actions.migrate import open_migration
from dora_rl.core.protocol.types import TrajectoryId, Version
from dora_rl.core.state.fleet import Instance
from dora_rl.core.state.run import State


def steal(state: State, version: Version) -> None:
    """Move queued turns of a version to its idle slots, wherever waiting costs more than moving.

    How long a queue will last is not known. So a move is made once the first has waited for as
    long as the move would take, times the hysteresis: at most that much is lost against knowing.
    It is the last that moves, since it would wait longest.
    """
    if not state.paradigm.rebalances:
        return
    ripe = state.now - state.settings.migration_gain * state.estimates.migration_s
    fleet = state.fleet
    while (source := fleet.longest_queued(version)) is not None and source.queue[0].since <= ripe:
        last = _last_queued(state, source, version)
        if last is None:
            fleet.skip_queue(version)
            continue
        target = fleet.emptiest(version)
        if target is None:
            return
        open_migration(state, source, target, version, (last,))


def _last_queued(state: State, source: Instance, version: Version) -> TrajectoryId | None:
    """The last in the queue that runs on this version and is not on its way already."""
    for _, trajectory_id in reversed(source.queue):
        trajectory = state.work.trajectories[trajectory_id]
        if trajectory.migration is None and trajectory.version == version:
            return trajectory_id
    return None
