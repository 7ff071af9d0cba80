"""Trajectories as bytes: what goes in comes out, and what was damaged is not taken."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_rl.engines import wire
from dora_rl.engines.base import Sampling
from dora_rl.engines.errors import ImportRefused

tokens = st.lists(st.integers(0, 2**31 - 1), max_size=8).map(tuple)
samplings = st.builds(
    Sampling,
    temperature=st.floats(0, 1e300),
    top_k=st.integers(0, 2**31 - 1),
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    max_tokens=st.integers(9, 2**31 - 1),  # `generated` is shorter
    stop_token_ids=tokens,
    stop=st.lists(st.text(min_size=1), max_size=3).map(tuple),
    ignore_eos=st.booleans(),
    raw_logprobs=st.booleans(),
)


def export(**changes: Any) -> wire.Export:
    values: dict[str, Any] = {
        "model": "tiny",
        "trajectory": 7,
        "version": 3,
        "digest": "5a" * 32,
        "prompt": (1, 2, 3),
        "generated": (4, 5),
        "seed": 11,
        "sampling": Sampling(temperature=0.5, max_tokens=6, stop=("end",)),
        "hold": True,
        "held": False,
        "turn_start": 1,
        "kv_tokens": 4,
        "kv_dtype": "float32",
        "kv_shape": (2, 4, 3),
        "kv": (bytes(range(48)), bytes(range(48, 96))),
    } | changes
    return wire.Export(**values)


def at_a_turn(one: wire.Export, hold: bool, held: bool, turn_start: int) -> wire.Export:
    """The same in an episode of several turns, as far as it has tokens for that."""
    held = held and bool(one.generated)
    begun = turn_start % (len(one.generated) + (not held))
    return msgspec.structs.replace(one, hold=hold or held, held=held, turn_start=begun)


exports = st.builds(
    export,
    model=st.text(),
    trajectory=st.integers(0, 2**64 - 1),
    version=st.integers(0, 2**63 - 1),
    digest=st.text(),
    prompt=tokens.filter(len),
    generated=tokens,
    seed=st.integers(0, 2**64 - 1),
    sampling=samplings,
    kv_tokens=st.integers(0, 2**63 - 1),
    kv_dtype=st.text(),
    kv_shape=tokens,
    kv=st.lists(st.binary(), max_size=3).map(tuple),
    turn_start=st.just(0),
)
exports = st.builds(at_a_turn, exports, st.booleans(), st.booleans(), st.integers(0, 8))


@given(exports)
def test_what_goes_in_comes_out(one: wire.Export) -> None:
    back = wire.decode(wire.encode(one))
    assert back == one
    assert wire.encode(back) == wire.encode(one)
    request = back.request()
    assert (request.prompt, request.prefix) == (one.prompt, one.generated)
    assert (request.hold, request.held) == (one.hold, one.held)
    assert request.turn_start == one.turn_start
    assert (request.trajectory, request.version) == (one.trajectory, one.version)
    assert (request.seed, request.sampling) == (one.seed, one.sampling)


@given(exports, st.data())
def test_a_part_is_refused(one: wire.Export, data: st.DataObject) -> None:
    whole = wire.encode(one)
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(ImportRefused, match=f"these {cut} bytes are not an exported trajectory"):
        wire.decode(whole[:cut])
    with pytest.raises(ImportRefused):
        wire.decode(whole + whole[:1])


def sealed(value: Any) -> bytes:
    return wire.seal(msgspec.msgpack.encode(value))


def flips(data: bytes) -> list[tuple[int, bytes]]:
    """Every bit of it, flipped alone."""
    return [
        (at, data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
        for at in range(len(data))
        for bit in range(8)
    ]


def test_damage_anywhere_is_refused() -> None:
    for _, wrong in flips(wire.encode(export())):
        with pytest.raises(ImportRefused, match="Export it again"):
            wire.decode(wrong)


@given(st.binary(max_size=200))
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(ImportRefused, match=r"are not an exported trajectory: .*Export it again."):
        wire.decode(data)
    with pytest.raises(ImportRefused, match=r"are not an exported trajectory: .*Export it again."):
        wire.decode(wire.seal(data))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.binary(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_any_other_message_is_refused(value: Any) -> None:
    with pytest.raises(ImportRefused):
        wire.decode(sealed(value))


def test_deep_nesting_is_refused() -> None:
    for opening in (b"\x91", b"\x81\xa1x"):
        with pytest.raises(ImportRefused):
            wire.decode(wire.seal(opening * 100_000))


def fields() -> dict[str, Any]:
    values: dict[str, Any] = msgspec.msgpack.decode(wire.encode(export())[4:])
    return values


def test_every_field_is_needed() -> None:
    for name in fields():
        if name == "format":
            continue
        with pytest.raises(ImportRefused, match=name):
            wire.decode(sealed({k: v for k, v in fields().items() if k != name}))


@pytest.mark.parametrize(
    "change",
    [
        {"more": 1},
        {"kv": "text"},
        {"kv": None},
        {"prompt": []},
        {"prompt": [1.5]},
        {"prompt": "abc"},
        {"generated": [1] * 6},
        {"generated": [1] * 7, "held": True},
        {"generated": [], "turn_start": 0, "held": True},
        {"hold": False, "held": True},
        {"hold": 1},
        {"held": None},
        {"turn_start": -1},
        {"turn_start": 3},
        {"turn_start": 2, "held": True},
        {"turn_start": 0.0},
        {"trajectory": -1},
        {"seed": "11"},
        {"sampling": {"temperature": -1.0}},
        {"sampling": {"top_p": float("nan")}},
        {"sampling": {"stop": [""]}},
    ],
)
def test_a_field_of_another_kind_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ImportRefused, match="not an exported trajectory"):
        wire.decode(sealed(fields() | change))


def test_another_format_is_refused() -> None:
    with pytest.raises(ImportRefused, match=r"of format 4: this engine reads 3. Run the same"):
        wire.decode(wire.encode(export(format=4)))


def test_one_that_is_held_may_be_full() -> None:
    full = export(generated=(4, 5, 6, 7, 8, 9), held=True)
    assert wire.decode(wire.encode(full)) == full


def test_the_format_stays_what_it_is() -> None:
    """Engines of two releases may meet during an upgrade: a change needs a new FORMAT."""
    assert list(fields()) == [
        *("format", "model", "trajectory", "version", "digest", "prompt", "generated"),
        *("seed", "sampling", "hold", "held", "turn_start"),
        *("kv_tokens", "kv_dtype", "kv_shape", "kv"),
    ]
    assert fields()["format"] == wire.FORMAT == 3
