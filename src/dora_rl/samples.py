"""What travels from rollout to training: a trajectory's tokens, and the rewards that it got.

Plain data between engines, tasks, trainer and runtime, which do not know each other. The core
never sees it: it knows ids, lengths and versions.
"""

from typing import NamedTuple

import msgspec

from dora_rl.core.types import GroupId, Segment, TrajectoryId, Version


class Span(NamedTuple):
    """Tokens `start` … `end - 1` of a response."""

    start: int
    end: int


class Trajectory(msgspec.Struct, frozen=True, kw_only=True):
    """One whole trajectory: what the policy read and wrote.

    `tokens` is the response: what was sampled and, in an episode of several turns, what the
    environment said in between (`observed`). `logprobs` go with `tokens`: each is that of the
    distribution from which the token was drawn, and 0 where it was observed.
    """

    trajectory: TrajectoryId
    group: GroupId
    version: Version
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    segments: tuple[Segment, ...]
    truncated: bool
    """It ended because it was too long, not because the policy ended it."""
    observed: tuple[Span, ...] = ()
    turns: int = 1

    @property
    def num_sampled(self) -> int:
        return len(self.tokens) - sum(end - start for start, end in self.observed)


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """A trajectory with its reward, as the trainer takes it."""

    trajectory: Trajectory
    reward: float
    parts: dict[str, float] = {}
    """The reward's parts by name, before weighting."""
