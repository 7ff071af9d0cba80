"""What the trainer refuses: after a `UserError` or `StepRejected` all is as before.

After `FollowerDied` or `GroupBroken` the trainer must be opened anew.
"""

from collections.abc import Iterable

from dora_rl.core.protocol.errors import DoraError, UserError
from dora_rl.core.protocol.types import TrajectoryId


class TrainerError(UserError):
    """A request that does not fit the trainer's state: another step, version or settings."""


class CheckpointError(UserError):
    """A checkpoint that cannot be written or read, or is of another model or other settings."""


class FollowerDied(DoraError):
    """A process of the data-parallel group is gone; the trainer must be opened anew."""


class GroupBroken(DoraError):
    """The leader failed where its followers did not: their next collectives would not match.

    No `UserError`, whatever the cause: no request can be served until the trainer is opened anew.
    """


class StepRejected(DoraError):
    """A batch that cannot be trained: a broken sample, or a loss or gradient that is no number.

    `trajectories` are those of the mini-batch (or the one sample) that it happened in.
    """

    def __init__(self, reason: str, trajectories: Iterable[TrajectoryId]) -> None:
        super().__init__(reason)
        self.reason = reason
        self.trajectories = tuple(trajectories)
