"""Park: trajectories wait in the host memory of their instance, without a slot, and come back.

They give way to another version, or to training that takes the devices. They return where they
lie once their version is served there, or move to where it is.
"""

from dora_rl.core.actions.migrate import open_migration
from dora_rl.core.protocol.commands import Park, Unpark
from dora_rl.core.protocol.types import Placement, TrajectoryId, Version
from dora_rl.core.state.fleet import Instance
from dora_rl.core.state.run import State
from dora_rl.core.state.timers import Wait


def residents_of(instance: Instance, version: Version) -> list[TrajectoryId]:
    """What runs on an instance with this version, in the order of its ids."""
    return sorted(instance.residents.get(version, ()))


def unmoved(state: State, instance: Instance) -> list[TrajectoryId]:
    """What runs on an instance and is not on its way to another."""
    records = state.work.trajectories
    return [
        t
        for version in sorted(instance.residents)
        for t in residents_of(instance, version)
        if records[t].migration is None
    ]


def park_trajectories(state: State, instance: Instance, trajectories: list[TrajectoryId]) -> None:
    """Ask for these to be parked; the answer is awaited."""
    instance.parking = True
    await_answer(state, instance, Wait.PARKING, state.settings.migration_timeout_s)
    records = state.work.trajectories
    placements = tuple(Placement(t, records[t].fence) for t in trajectories)
    state.emit(Park(instance.id, instance.incarnation, placements))


def await_answer(state: State, instance: Instance, wait: Wait, seconds: float) -> None:
    """What the instance was asked is to be answered in time; an older answer counts no more."""
    instance.ticket = state.fence()
    state.timers.set(state.now + seconds, wait, instance.id, instance.ticket)


def recall_parked(state: State, version: Version) -> None:
    """Bring parked work of a version back, where it lies or where the version is served."""
    for name in sorted(state.fleet.parked_at.get(version, ())):
        _recall(state, state.fleet.instances[name], version)


def _recall(state: State, instance: Instance, version: Version) -> None:
    parked = instance.parked.get(version)
    if not parked:
        return
    records = state.work.trajectories
    here = sorted(
        (t for t in parked if records[t].migration is None),
        key=lambda t: (-records[t].tokens, t),  # the longest so far has the most to go
    )
    if instance.serves(version):
        _unpark(state, instance, version, here)
        return
    target = state.fleet.emptiest(version)
    if target is not None and here:
        open_migration(state, instance, target, version, here[: target.free])


def _unpark(state: State, instance: Instance, version: Version, parked: list[int]) -> None:
    placements = []
    for trajectory_id in parked:
        trajectory = state.work.trajectories[trajectory_id]
        state.work.unpark(trajectory, state.now)
        state.fleet.unpark(instance, version, trajectory_id)
        placements.append(Placement(trajectory_id, trajectory.fence))
    if placements:
        state.emit(Unpark(instance.id, instance.incarnation, tuple(placements)))
