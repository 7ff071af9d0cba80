"""Whole trajectories that are not terminal yet: their tokens, and the rewards they got.

What the core has accepted is on the shelf until it is trained, filtered or failed. A trajectory
that arrives is put down first: only the core knows whether it is the one awaited.
"""

import msgspec

from dora_rl.core.types import Fence, TrajectoryId
from dora_rl.samples import Sample, Trajectory


class Item(msgspec.Struct):
    """One whole trajectory; without a reward until it is scored."""

    trajectory: Trajectory
    episode_reward: float | None
    reward: float | None = None
    parts: dict[str, float] = {}


class Shelf:
    def __init__(self) -> None:
        self._items: dict[TrajectoryId, Item] = {}
        self._arrived: dict[tuple[TrajectoryId, Fence], Item] = {}

    def __contains__(self, name: TrajectoryId) -> bool:
        return name in self._items

    def __len__(self) -> int:
        return len(self._items)

    def arrive(self, trajectory: Trajectory, fence: Fence, episode_reward: float | None) -> None:
        """Put a trajectory down, until the core has said whether it takes it."""
        self._arrived[trajectory.trajectory, fence] = Item(trajectory, episode_reward)

    def accept(self, name: TrajectoryId, fence: Fence) -> None:
        """The core asks for its score: it is the one. Asked again: it is here."""
        item = self._arrived.pop((name, fence), None)
        if item is not None:
            self._items[name] = item

    def forget_arrival(self, name: TrajectoryId, fence: Fence) -> None:
        """Whatever was not accepted was of a superseded placement."""
        self._arrived.pop((name, fence), None)

    def item(self, name: TrajectoryId) -> Item:
        return self._items[name]

    def put(self, item: Item) -> None:
        """Accepted in an earlier life of the run."""
        self._items[item.trajectory.trajectory] = item

    def trajectory(self, name: TrajectoryId) -> Trajectory:
        return self._items[name].trajectory

    def episode_reward(self, name: TrajectoryId) -> float | None:
        """What its environment gave it over all turns, if it had one."""
        return self._items[name].episode_reward

    def reward(self, name: TrajectoryId, reward: float, parts: dict[str, float]) -> None:
        item = self._items[name]
        item.reward, item.parts = reward, parts

    def sample(self, name: TrajectoryId) -> Sample:
        item = self._items[name]
        assert item.reward is not None, f"trajectory {name} has no reward"
        return Sample(trajectory=item.trajectory, reward=item.reward, parts=item.parts)

    def discard(self, name: TrajectoryId) -> None:
        self._items.pop(name, None)
