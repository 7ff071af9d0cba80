"""What travels from rollout to training: a trajectory's tokens, and the rewards that it got.

Plain data between engines, tasks, trainer and runtime, which do not know each other. The core
never sees it: it knows ids, lengths and versions. The driver has trajectories by reference: their
tokens go from worker to worker as records of a transport, in the form of `pack`.
"""

import sys
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from dora_rl.core.protocol.types import GroupId, Segment, TrajectoryId, Version


class Span(NamedTuple):
    """Tokens `start` … `end - 1` of a response."""

    start: int
    end: int


class RecordRef(NamedTuple):
    """A record that a rollout worker has put into the transport, for whoever reads it.

    It names the worker, the worker's file and a place in it; `checksum` is of its bytes.
    """

    instance: int
    incarnation: int
    file: int
    offset: int
    size: int
    checksum: int


class Trajectory(msgspec.Struct, frozen=True, kw_only=True):
    """One whole trajectory: what the policy read and wrote.

    `tokens` is the response: what was sampled and, in an episode of several turns, what the
    environment said in between (`observed`). `logprobs` go with `tokens`: each is that of the
    distribution from which the token was drawn, and 0 where it was observed.
    """

    id: TrajectoryId
    group: GroupId
    version: Version
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    segments: tuple[Segment, ...]
    truncated: bool
    """It ended for want of room, for the next token or for the environment's next observation, not
    because policy or environment ended it."""
    observed: tuple[Span, ...] = ()
    turns: int = 1

    @property
    def num_sampled(self) -> int:
        return len(self.tokens) - sum(end - start for start, end in self.observed)

    def by_reference(self, content: RecordRef) -> "TrajectoryRef":
        """The same without its tokens; `content` is where `pack(self)` was put."""
        return TrajectoryRef(
            id=self.id,
            group=self.group,
            version=self.version,
            num_prompt=len(self.prompt),
            num_tokens=len(self.tokens),
            num_sampled=self.num_sampled,
            segments=self.segments,
            truncated=self.truncated,
            content=content,
        )


class TrajectoryRef(msgspec.Struct, frozen=True, kw_only=True):
    """A whole trajectory by reference: lengths and versions, and where its tokens are."""

    id: TrajectoryId
    group: GroupId
    version: Version
    num_prompt: int
    num_tokens: int
    num_sampled: int
    segments: tuple[Segment, ...]
    truncated: bool
    content: RecordRef


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """A trajectory with its reward, as the trainer takes it."""

    trajectory: Trajectory
    reward: float
    parts: dict[str, float] = {}
    """The reward's parts by name, before weighting."""


class SampleRef(msgspec.Struct, frozen=True, kw_only=True):
    """A sample by reference: its reward, and the trajectory without its tokens."""

    trajectory: TrajectoryRef
    reward: float
    parts: dict[str, float] = {}

    def resolve(self, trajectory: Trajectory) -> Sample:
        """The sample itself, with the trajectory that was read."""
        return Sample(trajectory=trajectory, reward=self.reward, parts=self.parts)


# Records. Numbers are packed: a tuple of floats is ten times as slow to encode.


class _Packed(msgspec.Struct, frozen=True, array_like=True):
    id: TrajectoryId
    group: GroupId
    version: Version
    prompt: bytes
    tokens: bytes
    logprobs: bytes
    segments: tuple[Segment, ...]
    truncated: bool
    observed: tuple[Span, ...]
    turns: int


class _Written(msgspec.Struct, frozen=True, array_like=True):
    tokens: bytes
    logprobs: bytes


_encode = msgspec.msgpack.Encoder().encode
_decode_packed = msgspec.msgpack.Decoder(_Packed).decode
_decode_written = msgspec.msgpack.Decoder(_Written).decode
_TOKEN, _LOGPROB = "i", "d"  # 32-bit integers and 64-bit floats, little-endian in a record


def pack(trajectory: Trajectory) -> bytes:
    """A trajectory as a record; `unpack` gives it back to the bit."""
    return _encode(
        _Packed(
            trajectory.id,
            trajectory.group,
            trajectory.version,
            _pack(_TOKEN, trajectory.prompt),
            _pack(_TOKEN, trajectory.tokens),
            _pack(_LOGPROB, trajectory.logprobs),
            trajectory.segments,
            trajectory.truncated,
            trajectory.observed,
            trajectory.turns,
        )
    )


def unpack(record: bytes) -> Trajectory:
    packed = _decode_packed(record)
    return Trajectory(
        id=packed.id,
        group=packed.group,
        version=packed.version,
        prompt=_unpack(_TOKEN, packed.prompt),
        tokens=_unpack(_TOKEN, packed.tokens),
        logprobs=_unpack(_LOGPROB, packed.logprobs),
        segments=packed.segments,
        truncated=packed.truncated,
        observed=packed.observed,
        turns=packed.turns,
    )


def pack_tokens(tokens: Sequence[int], logprobs: Sequence[float]) -> bytes:
    """A piece of what a running trajectory has written, as a record."""
    return _encode(_Written(_pack(_TOKEN, tokens), _pack(_LOGPROB, logprobs)))


def unpack_tokens(record: bytes) -> tuple[tuple[int, ...], tuple[float, ...]]:
    written = _decode_written(record)
    return _unpack(_TOKEN, written.tokens), _unpack(_LOGPROB, written.logprobs)


def _pack(kind: str, values: Sequence[float]) -> bytes:
    numbers = array(kind, values)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def _unpack(kind: str, data: bytes) -> tuple[Any, ...]:
    numbers = array(kind)
    numbers.frombytes(data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return tuple(numbers)
