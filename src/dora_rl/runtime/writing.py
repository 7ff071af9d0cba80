"""What a trajectory has written so far, and how it travels: as a sample, a prefix, or a parcel."""

import msgspec

from dora_rl.core.types import Fence, GroupId, Placement, Segment, TrajectoryId, Version
from dora_rl.engines.base import Sampled
from dora_rl.runtime.messages import Prefix
from dora_rl.samples import Span, Trajectory


class Writing(msgspec.Struct):
    """All that a trajectory has written so far: what travels with it."""

    trajectory: TrajectoryId
    group: GroupId
    version: Version
    prompt: tuple[int, ...]
    episode: bool
    tokens: list[int] = []
    logprobs: list[float] = []
    segments: list[Segment] = []
    observed: list[Span] = []
    turn: int = 0
    truncated: bool = False

    @property
    def num_sampled(self) -> int:
        return sum(segment.tokens for segment in self.segments)

    @property
    def turn_start(self) -> int:
        return self.observed[-1].end if self.observed else 0

    def take(self, output: Sampled) -> None:
        """Append what the engine sampled."""
        self.tokens += output.tokens
        self.logprobs += output.logprobs
        count = len(output.tokens)
        last = self.segments[-1] if self.segments else None
        if last is not None and (last.version, last.digest) == (output.version, output.digest):
            self.segments[-1] = last._replace(tokens=last.tokens + count)
        else:
            self.segments.append(Segment(output.version, output.digest, count))

    def observe(self, tokens: tuple[int, ...]) -> None:
        """Append what the environment said."""
        start = len(self.tokens)
        self.tokens += tokens
        self.logprobs += [0.0] * len(tokens)
        self.observed.append(Span(start, len(self.tokens)))

    def whole(self) -> Trajectory:
        return Trajectory(
            trajectory=self.trajectory,
            group=self.group,
            version=self.version,
            prompt=self.prompt,
            tokens=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            segments=tuple(self.segments),
            truncated=self.truncated,
            observed=tuple(self.observed),
            turns=self.turn + 1,
        )

    def prefix(self, fence: Fence, start: int) -> Prefix:
        return Prefix(
            trajectory=self.trajectory,
            fence=fence,
            start=start,
            tokens=tuple(self.tokens[start:]),
            logprobs=tuple(self.logprobs[start:]),
            segments=tuple(self.segments),
        )


class Parcel(msgspec.Struct):
    """One trajectory of a migration, as the file between two instances holds it."""

    placement: Placement
    new_fence: Fence
    writing: Writing
    paused: bool
    kv: bytes


pack = msgspec.msgpack.Encoder().encode
unpack = msgspec.msgpack.Decoder(list[Parcel]).decode
