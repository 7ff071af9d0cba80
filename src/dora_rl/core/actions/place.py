"""Start waiting trajectories on the emptiest instances that serve their versions."""

import heapq

from dora_rl.core.actions.park import recall_from_lent
from dora_rl.core.protocol.commands import Start
from dora_rl.core.protocol.types import TrajectoryState, Version
from dora_rl.core.state.run import State

_WAITING = TrajectoryState.WAITING  # bound once: it is looked at for every start


def place(state: State) -> None:
    """Start waiting trajectories on the emptiest instances of their versions."""
    for version in sorted(state.unplaced):
        if state.lending is not None:
            recall_from_lent(state, version)  # what had begun comes first
        heap = state.work.waiting.get(version)
        if heap:
            _place_version(state, version, heap)
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
