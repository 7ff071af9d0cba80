"""The file of a migration: what goes in comes out, and what contradicts itself is not taken."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from dora_rl.core.protocol.types import Placement, Segment
from dora_rl.engines import wire
from dora_rl.engines.base import Sampling
from dora_rl.engines.errors import ImportRefused
from dora_rl.runtime.workers.partial_trajectory import Parcel, PartialTrajectory, pack, unpack
from dora_rl.samples import Span


def writing() -> PartialTrajectory:
    """Three sampled tokens and two observed ones, in two turns."""
    return PartialTrajectory(
        trajectory=7,
        group=3,
        version=2,
        prompt=(1, 2),
        episode=True,
        tokens=[4, 5, 8, 9, 6],
        logprobs=[-0.5, -0.25, 0.0, 0.0, -1.0],
        segments=[Segment(2, "d2", 3)],
        observed=[Span(2, 4)],
        turn=1,
    )


def kv_of(one: PartialTrajectory, **changes: Any) -> bytes:
    values: dict[str, Any] = {
        "model": "tiny",
        "trajectory": one.trajectory,
        "version": one.version,
        "digest": "d2",
        "prompt": one.prompt,
        "generated": tuple(one.tokens),
        "seed": 0,
        "sampling": Sampling(),
        "hold": True,
        "held": False,
        "turn_start": 4,
        "kv_tokens": 1,
        "kv_dtype": "float32",
        "kv_shape": (1,),
        "kv": (bytes(64),),
    } | changes
    return wire.encode(wire.Export(**values))


def parcel(*, kv: bool) -> Parcel:
    one = writing()
    return Parcel(Placement(7, 10), 20, one, paused=False, kv=kv_of(one) if kv else None)


@pytest.mark.parametrize("kv", [False, True])
def test_what_goes_in_comes_out(kv: bool) -> None:
    parcels = [parcel(kv=kv), parcel(kv=not kv)]
    assert unpack(pack(parcels)) == parcels
    assert unpack(pack([])) == []


@pytest.mark.parametrize("kv", [False, True])
def test_every_byte_counts(kv: bool) -> None:
    data = pack([parcel(kv=kv)])
    for at in range(len(data)):
        with pytest.raises(ImportRefused, match="checksum"):
            unpack(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    for length in (0, 3, 4, len(data) - 1):
        with pytest.raises((ImportRefused, msgspec.DecodeError)):
            unpack(data[:length])


CONTRADICTIONS: dict[str, tuple[Callable[[Parcel], Parcel], str]] = {
    "a token without a log-probability": (
        lambda p: replace(p, partial=replace(p.partial, logprobs=p.partial.logprobs[:-1])),
        "`4` log-probabilities",
    ),
    "a token of no segment": (
        lambda p: replace(p, partial=replace(p.partial, segments=[Segment(2, "d2", 2)])),
        "`2` sampled",
    ),
    "an observation that was not counted": (
        lambda p: replace(p, partial=replace(p.partial, observed=[])),
        "`0` observed",
    ),
    "another trajectory's": (
        lambda p: replace(p, placement=Placement(8, 10)),
        "trajectory 8",
    ),
    "KV of another token": (
        lambda p: replace(p, kv=kv_of(p.partial, generated=(4, 5, 8, 9, 7))),
        "other tokens",
    ),
    "KV of another trajectory": (
        lambda p: replace(p, kv=kv_of(p.partial, trajectory=9)),
        "of trajectory 9",
    ),
    "KV of another version": (lambda p: replace(p, kv=kv_of(p.partial, version=5)), "version 5"),
    "KV that is none": (lambda p: replace(p, kv=b"none"), "not an exported trajectory"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_parcel_that_contradicts_itself_is_refused(name: str) -> None:
    change, message = CONTRADICTIONS[name]
    with pytest.raises(ImportRefused, match=message):
        unpack(pack([parcel(kv=True), change(parcel(kv=True))]))
