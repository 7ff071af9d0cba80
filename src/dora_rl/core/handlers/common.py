"""What every handler needs: to refuse, to absorb, and to find whom an event speaks of."""

from typing import NoReturn

from dora_rl.core.actions import migrate
from dora_rl.core.protocol.commands import Expel
from dora_rl.core.protocol.errors import RefusedEvent
from dora_rl.core.protocol.types import Fence, InstanceId, TrajectoryId
from dora_rl.core.state.fleet import Instance
from dora_rl.core.state.run import State
from dora_rl.core.state.work import Trajectory


def refuse(event: object, why: str) -> NoReturn:
    """No order of messages explains this event."""
    raise RefusedEvent(f"{why}: `{event}`")


def absorb(state: State, why: str) -> None:
    """The event speaks of something superseded: count it and continue."""
    state.counters[f"absorbed_{why}"] += 1


def live_instance(state: State, instance: InstanceId, incarnation: int) -> Instance | None:
    """The instance that speaks, unless it is a zombie or ahead of its own joining."""
    record = state.fleet.instances.get(instance)
    if record is not None and record.incarnation == incarnation:
        return record
    absorb(state, "fenced_instance")
    if incarnation <= state.fleet.ended.get(instance, -1):
        # It has not heard that it was given up, and would never join again.
        state.emit(Expel(instance, incarnation, "given up before"))
    return None


def placed_trajectory(
    state: State,
    event: object,
    trajectory_id: TrajectoryId,
    fence: Fence,
    *,
    on_its_way: bool = False,
) -> Trajectory | None:
    """The trajectory, if the event speaks of its present placement (or of the one to come)."""
    work = state.work
    if not 0 <= trajectory_id < work.issued * work.group_size:
        refuse(event, "the trajectory was never issued")
    if not 0 < fence < state.next_fence:
        refuse(event, "the fence was never given out")
    trajectory = work.trajectories.get(trajectory_id)
    if trajectory is None:
        absorb(state, "duplicate")
        return None
    if trajectory.fence == fence or (on_its_way and migrate.on_its_way(state, trajectory, fence)):
        return trajectory
    absorb(state, "fenced_trajectory")
    return None
