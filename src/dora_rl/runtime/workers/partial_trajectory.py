"""What a trajectory has written so far, and how it travels: as a sample, a prefix, or a parcel."""

import msgspec

from dora_rl.core.protocol.types import Fence, GroupId, Placement, Segment, TrajectoryId, Version
from dora_rl.engines import wire
from dora_rl.engines.base import Sampled
from dora_rl.engines.errors import ImportRefused
from dora_rl.runtime.control.messages import Piece, Prefix
from dora_rl.samples import Span, Trajectory, pack_tokens, unpack_tokens
from dora_rl.transports.samples import SampleSink, SampleSource


class PartialTrajectory(msgspec.Struct):
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
            id=self.trajectory,
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

    def prefix(self, fence: Fence, start: int, sink: SampleSink) -> Prefix:
        """What was written from `start` on, put into the transport."""
        content = sink.put(pack_tokens(self.tokens[start:], self.logprobs[start:]))
        return Prefix(
            trajectory=self.trajectory,
            fence=fence,
            pieces=(Piece(start, len(self.tokens) - start, content),),
            segments=tuple(self.segments),
        )

    def begin_with(self, prefix: Prefix, source: SampleSource) -> None:
        """Continue from a whole prefix; nothing was written yet."""
        for piece in prefix.pieces:
            tokens, logprobs = unpack_tokens(source.get(piece.content))
            self.tokens[piece.start :] = tokens[: piece.num_tokens]
            self.logprobs[piece.start :] = logprobs[: piece.num_tokens]
        self.segments = list(prefix.segments)


class Parcel(msgspec.Struct):
    """One trajectory of a migration, as the file between two instances holds it."""

    placement: Placement
    new_fence: Fence
    partial: PartialTrajectory
    paused: bool
    kv: bytes | None  # None: the source cannot export it, and the target reads the tokens anew


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Parcel]).decode


def pack(parcels: list[Parcel]) -> bytes:
    """The file of a migration: the parcels behind a checksum of all of them."""
    return wire.seal(_encode(parcels))


def unpack(data: bytes) -> list[Parcel]:
    """The parcels of a migration; refuses a damaged file, and parcels that contradict themselves.

    Afterwards every token of a parcel has its log-probability, was sampled from a segment or
    observed, and is the one that the KV was computed from, if there is any.
    """
    parcels = _decode(wire.unseal(data))
    for parcel in parcels:
        _check(parcel)
    return parcels


def _check(parcel: Parcel) -> None:
    partial = parcel.partial
    name, tokens = f"trajectory {partial.trajectory}", len(partial.tokens)
    observed = sum(span.end - span.start for span in partial.observed)
    if parcel.placement.trajectory != partial.trajectory:
        raise ImportRefused(
            f"a parcel for trajectory {parcel.placement.trajectory} holds {name}. Move it again."
        )
    if not tokens == len(partial.logprobs) == partial.num_sampled + observed:
        raise ImportRefused(
            f"{name} has {tokens} tokens, `{len(partial.logprobs)}` log-probabilities, and "
            f"`{partial.num_sampled}` sampled and `{observed}` observed tokens. Move it again."
        )
    if parcel.kv is None:
        return
    kv = wire.response_of(parcel.kv)
    written = partial.trajectory, partial.version, tuple(partial.tokens)
    if (kv.trajectory, kv.version, kv.generated) != written:
        raise ImportRefused(
            f"{name} has {tokens} tokens of version {partial.version}, and its KV is that of other "
            f"tokens: {len(kv.generated)} of trajectory {kv.trajectory}, version {kv.version}. "
            "Move it again."
        )
