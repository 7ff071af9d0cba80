"""What the trainer refuses. After each of these, weights, optimizer and step are as before."""

from collections.abc import Iterable

from dora_rl.core.errors import DoraError, UserError
from dora_rl.core.types import TrajectoryId


class TrainerError(UserError):
    """A request that does not fit the trainer's state: another step, version or settings."""


class CheckpointError(UserError):
    """A checkpoint that cannot be written or read, or is of another model or other settings."""


class FollowerDied(DoraError):
    """A process of the data-parallel group is gone; the trainer must be opened anew."""


class StepRejected(DoraError):
    """A batch that cannot be trained: a broken sample, or a loss or gradient that is no number.

    `trajectories` are those of the mini-batch (or the one sample) that it happened in.
    """

    def __init__(self, reason: str, trajectories: Iterable[TrajectoryId]) -> None:
        super().__init__(reason)
        self.reason = reason
        self.trajectories = tuple(trajectories)
