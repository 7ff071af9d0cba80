"""Put idle slots to use, each by work of a version that its instance serves.

Parked trajectories come first, since they had begun, then waiting ones, which go to the emptiest
instances, and then those that queue for a slot elsewhere.
"""

import heapq

from dora_rl.core.actions.park import recall_parked
from dora_rl.core.actions.steal import steal
from dora_rl.core.protocol.commands import Start
from dora_rl.core.protocol.types import TrajectoryState, Version
from dora_rl.core.state.run import State

_WAITING = TrajectoryState.WAITING  # bound once: it is looked at for every start


def place(state: State) -> None:
    """Fill the slots of every version with a new place or new work."""
    for version in sorted(state.unplaced):
        move = version not in state.undone
        if move and state.work.num_parked:
            recall_parked(state, version)
        heap = state.work.waiting.get(version)
        if heap:
            _place_version(state, version, heap)
        if move and state.fleet.num_queued:
            steal(state, version)
    state.unplaced.clear()


def _place_version(state: State, version: Version, heap: list[int]) -> None:
    work, fleet = state.work, state.fleet
    share: int | None = None
    if version in fleet.installing:
        # More hosts are about to be ready: leave them their part of the work.
        hosts = len(state.versions.live[version].instances)
        share = -(-work.unfinished[version] // hosts)
    while heap:
        trajectory = work.trajectories.get(heap[0])
        if trajectory is None or trajectory.version != version or trajectory.state is not _WAITING:
            heapq.heappop(heap)
            continue
        instance = fleet.emptiest(version)
        if instance is None or (share is not None and instance.load >= share):
            break
        heapq.heappop(heap)
        fence = state.fence()
        work.start(trajectory, instance.id, fence, state.now)
        fleet.add(instance, version, trajectory.id)
        state.emit(Start(trajectory.id, fence, instance.id, version, trajectory.saved))
