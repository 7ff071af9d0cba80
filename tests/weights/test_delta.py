"""Deltas: exact for any bits, refused when they are damaged, and never larger than they may be."""

import json
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dora_rl.weights import delta
from dora_rl.weights.errors import WeightsError
from tests.weights.samples import DTYPES, identical

LINK = delta.Link(6, "a" * 64, 7, "b" * 64)
Policy = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small tensors have several."""
    monkeypatch.setattr(delta, "BLOCK", 16)


def tensor_of(bits: bytes, dtype: torch.dtype) -> torch.Tensor:
    count = len(bits) // dtype.itemsize
    return torch.frombuffer(bytearray(bits), dtype=dtype) if count else torch.empty(0, dtype=dtype)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Policy, Policy]:
    """Two versions of any bits, NaN with any payload among them, that differ here and there."""
    old, new = {"one": torch.ones(1)}, {"one": torch.ones(1)}
    for name in draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=4, unique=True)):
        dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
        count = draw(st.integers(0, 70))
        bits = bytearray(draw(st.binary(min_size=count, max_size=count))) * dtype.itemsize
        old[name] = tensor_of(bits, dtype)
        for at in draw(st.lists(st.integers(0, max(0, len(bits) - 1)), max_size=8)):
            if bits:
                bits[at] ^= draw(st.integers(1, 255))
        new[name] = tensor_of(bits, dtype)
    return old, new


def copy(policy: Policy) -> Policy:
    return {name: tensor.clone() for name, tensor in policy.items()}


def encoded(old: Policy, new: Policy) -> bytes:
    """Even where it does not pay."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta, "_WORTH", 1e-6)
        found = delta.encode(LINK, old, new)
    assert found is not None
    return found


@settings(max_examples=150, deadline=None)
@given(pairs())
def test_it_makes_the_one_of_the_other(pair: tuple[Policy, Policy]) -> None:
    old, new = pair
    data = encoded(old, new)
    assert delta.link_of(data, "`d`") == LINK
    delta.apply(data, old, "`d`")
    assert identical(old, new)


@settings(max_examples=150, deadline=None)
@given(pairs(), st.data())
def test_a_damaged_one_is_refused_or_gives_what_a_digest_shows(
    pair: tuple[Policy, Policy], data: st.DataObject
) -> None:
    """It never raises anything but `WeightsError`, and never writes outside of the tensors."""
    old, new = pair
    good = bytearray(encoded(old, new))
    at = data.draw(st.integers(0, len(good) - 1))
    bad = bytes(good[:at]) if data.draw(st.booleans()) else None
    if bad is None:
        good[at] ^= data.draw(st.integers(1, 255))
        bad = bytes(good)
    shapes = {name: (tensor.dtype, tensor.shape) for name, tensor in old.items()}
    try:
        delta.apply(bad, old, "`d`")
    except WeightsError as error:
        assert "`d`" in str(error)
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in old.items()} == shapes


@given(st.binary(max_size=200))
def test_any_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(WeightsError):
        delta.apply(data, {"a": torch.zeros(3)}, "`d`")


def hostile(change: Callable[[Any], None]) -> bytes:
    """A delta whose header says something else; its blocks are as they were."""
    new = {"a": torch.arange(40, dtype=torch.float32)}
    new["a"][3] = 7.5
    data = encoded({"a": torch.arange(40, dtype=torch.float32)}, new)
    start = len(delta._MAGIC) + 8
    length = int.from_bytes(data[start - 8 : start], "little")
    content = json.loads(data[start : start + length])
    change(content)
    header = json.dumps(content).encode()
    return delta._MAGIC + len(header).to_bytes(8, "little") + header + data[start + length :]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda c: c.update(tensors={"z": []}), "`z` is not in its base"),
        (lambda c: c.update(tensors={"a": [[0]]}), "1 blocks of `a`, which has 3"),
        (lambda c: c["tensors"]["a"][0].append(1), "5 numbers"),
        (lambda c: c["tensors"]["a"][0].__setitem__(0, 10**9), "it is cut within `a`"),
        (lambda c: c["tensors"]["a"][0].__setitem__(1, 10**9), "a block that cannot be"),
        (lambda c: c["tensors"]["a"][0].__setitem__(2, 9), "a block that cannot be"),
        (lambda c: c["tensors"]["a"][0].__setitem__(3, 5), "a block that cannot be"),
        (lambda c: c["tensors"]["a"][0].__setitem__(0, -1), "must be a whole number >= 0"),
        (lambda c: c["tensors"]["a"].__setitem__(1, [0]), "a whole block of 0 bytes for 64"),
        (lambda c: c.update(extra=1), "has an unknown key: `extra`"),
        (lambda c: c.update(digest="no"), "must be 64 hexadecimal digits: `no`"),
        (lambda c: c.update(base=True), "must be a whole number >= 0: `True`"),
    ],
)
def test_a_hostile_header_is_refused(change: Callable[[Any], None], why: str) -> None:
    with pytest.raises(WeightsError, match=why):
        delta.apply(hostile(change), {"a": torch.arange(40, dtype=torch.float32)}, "`d`")


def test_what_is_left_over_is_refused() -> None:
    data = hostile(lambda c: None) + b"x"
    with pytest.raises(WeightsError, match="1 bytes after its last block"):
        delta.apply(data, {"a": torch.arange(40, dtype=torch.float32)}, "`d`")


def test_a_zlib_that_is_larger_than_it_says_is_not_unpacked() -> None:
    bomb = zlib.compress(bytes(1 << 26), 9)
    with pytest.raises(WeightsError, match="a block of another size than 16 bytes"):
        delta._inflated(memoryview(bomb), 16, "`d`")


def test_an_element_beyond_the_block_is_refused() -> None:
    block = torch.zeros(8).numpy().view("<u4")
    for gap, step in ((7, 1), (8, 1), (200, 1)):
        data = memoryview(bytes([gap, step]))
        if gap < len(block):
            delta._apply_block(block, [2, 1, 1, 1], data, "`d`")
            continue
        with pytest.raises(WeightsError, match=f"an element at {gap} of 8"):
            delta._apply_block(block, [2, 1, 1, 1], data, "`d`")
    assert block.tolist() == [0] * 7 + [2**32 - 1]


def test_other_names_dtypes_or_shapes_have_no_delta() -> None:
    old = {"a": torch.zeros(64), "b": torch.zeros(64)}
    for other in (
        {"a": torch.zeros(64)},
        {**old, "b": torch.zeros(64, dtype=torch.bfloat16)},
        {**old, "b": torch.zeros(8, 8)},
        {**old, "c": torch.zeros(64)},
    ):
        assert delta.encode(LINK, old, other) is None


def test_it_is_given_up_where_it_does_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "BLOCK", 1 << 12)
    old = {"a": torch.zeros(1 << 16)}
    few, many = copy(old), copy(old)
    few["a"][::100] = 1.0
    many["a"][:] = torch.randn(1 << 16)
    found = delta.encode(LINK, old, few)
    assert found is not None and len(found) < old["a"].nbytes // 50
    assert delta.encode(LINK, old, many) is None


def test_one_step_of_a_small_learning_rate_in_bf16_is_few_bytes() -> None:
    """Weights of 0.02 have a spacing of 1e-4: a step of 1e-6 moves one in some fifty."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta, "BLOCK", 1 << 22)
        noise = torch.Generator().manual_seed(0)
        master = torch.randn(1 << 18, generator=noise) * 0.02
        moved = master + 1e-6 * torch.sign(torch.randn(1 << 18, generator=noise))
        old, new = {"a": master.bfloat16()}, {"a": moved.bfloat16()}
        data = delta.encode(LINK, old, new)
        assert data is not None and len(data) < old["a"].nbytes // 20
        delta.apply(data, old, "`d`")
    assert identical(old, new)


def test_every_bit_pattern_of_bf16_can_become_any_other() -> None:
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    old = {"a": every.view(torch.bfloat16).clone()}
    new = {"a": every.roll(12_345).view(torch.bfloat16).clone()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta, "_DENSE", 0)  # as steps, although all of them have changed
        data = encoded(old, new)
    delta.apply(data, old, "`d`")
    assert identical(old, new)
