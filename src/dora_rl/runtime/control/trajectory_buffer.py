"""Whole trajectories that are not terminal yet, by reference, and the rewards they got.

A trajectory that arrives is staged under (id, fence) until the core accepts that fence. What it has
accepted is in the buffer until it is trained, filtered or failed.
"""

import msgspec

from dora_rl.core.protocol.types import Fence, TrajectoryId
from dora_rl.samples import SampleRef, TrajectoryRef


class BufferedTrajectory(msgspec.Struct):
    """One whole trajectory; without a reward until it is scored."""

    trajectory: TrajectoryRef
    episode_reward: float | None
    reward: float | None = None
    parts: dict[str, float] = {}


class TrajectoryBuffer:
    """The trajectory buffer of a run.

    buffer.arrive(trajectory, fence, None)   # staged: not in the buffer yet
    buffer.accept(trajectory.id, fence)      # in the buffer, without a reward
    buffer.reward(trajectory.id, 1.0, {})    # buffer.sample(trajectory.id) can be trained on
    buffer.discard(trajectory.id)            # it is terminal
    """

    def __init__(self) -> None:
        self._items: dict[TrajectoryId, BufferedTrajectory] = {}
        self._arrived: dict[tuple[TrajectoryId, Fence], BufferedTrajectory] = {}

    def __contains__(self, trajectory_id: TrajectoryId) -> bool:
        return trajectory_id in self._items

    def __len__(self) -> int:
        return len(self._items)

    def arrive(self, trajectory: TrajectoryRef, fence: Fence, episode_reward: float | None) -> None:
        """Stage a trajectory under (id, fence), until the core accepts that fence."""
        self._arrived[trajectory.id, fence] = BufferedTrajectory(trajectory, episode_reward)

    def accept(self, trajectory_id: TrajectoryId, fence: Fence) -> None:
        """The core asks for its score, so this fence counts; a duplicate changes nothing."""
        item = self._arrived.pop((trajectory_id, fence), None)
        if item is not None:
            self._items[trajectory_id] = item

    def forget_arrival(self, trajectory_id: TrajectoryId, fence: Fence) -> None:
        """Drop what is still staged: it was not accepted, so its placement is superseded."""
        self._arrived.pop((trajectory_id, fence), None)

    def item(self, trajectory_id: TrajectoryId) -> BufferedTrajectory:
        return self._items[trajectory_id]

    def put(self, item: BufferedTrajectory) -> None:
        """Accepted in an earlier incarnation of the run."""
        self._items[item.trajectory.id] = item

    def trajectory(self, trajectory_id: TrajectoryId) -> TrajectoryRef:
        return self._items[trajectory_id].trajectory

    def episode_reward(self, trajectory_id: TrajectoryId) -> float | None:
        """What its environment gave it over all turns, if it had one."""
        return self._items[trajectory_id].episode_reward

    def reward(self, trajectory_id: TrajectoryId, reward: float, parts: dict[str, float]) -> None:
        item = self._items[trajectory_id]
        item.reward, item.parts = reward, parts

    def sample(self, trajectory_id: TrajectoryId) -> SampleRef:
        item = self._items[trajectory_id]
        assert item.reward is not None, f"trajectory {trajectory_id} has no reward"
        return SampleRef(trajectory=item.trajectory, reward=item.reward, parts=item.parts)

    def discard(self, trajectory_id: TrajectoryId) -> None:
        self._items.pop(trajectory_id, None)
