"""Safetensors: read as the library reads them, mapped in place, and never trusted."""

import hashlib
import json
import os
import re
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from dora_rl.weights import header
from dora_rl.weights.errors import WeightsError
from dora_rl.weights.files import map_tensors
from dora_rl.weights.header import encode_head
from dora_rl.weights.tensors import bytes_of, check_finite, digests, ready
from tests.weights.samples import DTYPES, identical, raw, weights


def write(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(begin: int, end: int, shape: Any = None, dtype: Any = "F32") -> dict[str, Any]:
    shape = [(end - begin) // 4] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def refused(path: Path) -> str:
    with pytest.raises(WeightsError) as caught:
        map_tensors(path)
    assert f"`{path}`" in str(caught.value)
    return str(caught.value)


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    save_file(weights(), tmp_path / "x.safetensors")
    assert identical(map_tensors(tmp_path / "x.safetensors").tensors, weights())


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    policy = weights()
    names = {torch_dtype: name for name, torch_dtype in DTYPES.items()}
    wide_first = sorted(policy, key=lambda name: -policy[name].itemsize)
    head = encode_head((n, names[policy[n].dtype], tuple(policy[n].shape)) for n in wide_first)
    path = tmp_path / "x.safetensors"
    path.write_bytes(head + b"".join(raw(policy[name]) for name in wide_first))
    assert identical(load_file(path), policy)
    assert map_tensors(path).head == head


@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 9), max_size=3)),
        max_size=5,
    )
)
def test_data_starts_on_a_cache_line(rows: list[tuple[str, list[int]]]) -> None:
    head = encode_head((f"t{i}", dtype, tuple(shape)) for i, (dtype, shape) in enumerate(rows))
    assert len(head) % 64 == 0


F32_HEADER: list[tuple[Any, bytes, str]] = [
    ({"a": entry(0, 8)}, b"x" * 7, "tensor `a` .* ends at byte .* truncated"),
    ({"a": entry(0, 8)}, b"x" * 9, "1 bytes after its last tensor"),
    ({}, b"x", "1 bytes after its last tensor"),
    ({"a": entry(0, 8), "b": entry(4, 12)}, b"x" * 12, "tensor `b` .* overlaps"),
    ({"a": entry(0, 8), "b": entry(0, 8)}, b"x" * 8, "tensor `b` .* overlaps"),
    ({"a": entry(0, 8), "b": entry(12, 16)}, b"x" * 16, "tensor `b` .* leaves a hole"),
    ({"a": entry(4, 8)}, b"x" * 8, "tensor `a` .* leaves a hole"),
    ({"a": entry(0, 8, [3])}, b"x" * 8, "tensor `a` .* takes 8 bytes; .* ask for 12"),
    ({"a": entry(8, 0, [])}, b"x" * 8, "tensor `a` .* takes -8 bytes"),
    ({"a": entry(-4, 0, [1])}, b"", "offset of tensor `a`"),
    ({"a": entry(0, 2**62, [2**60])}, b"x", "shape of tensor `a` .* too large"),
    ({"a": entry(0, 0, [0, 2**31, 2**31])}, b"", "shape of tensor `a` .* too large"),
    ({"a": entry(0, 8, [1], "F64")}, b"x" * 8, "tensor `a` .* dtype `F64`"),
    ({"a": entry(0, 8, [1], "I64")}, b"x" * 8, "tensor `a` .* dtype `I64`. Convert it"),
    ({"a": {**entry(0, 8), "more": 1}}, b"x" * 8, "tensor `a` .* unknown key: `more`"),
    ({"a": {"dtype": "F32", "shape": [2]}}, b"x" * 8, "tensor `a` .* lacks the key"),
    ({"a": {**entry(0, 8), "data_offsets": [0]}}, b"x" * 8, "data_offsets of tensor `a`"),
    ({"a": {**entry(0, 8), "data_offsets": [0, 8.0]}}, b"x" * 8, "offset of tensor `a`"),
    ({"a": [0, 8]}, b"x" * 8, "tensor `a` .* must be an object"),
    ({"../a": entry(0, 8)}, b"x" * 8, r"name that is not allowed: `\.\./a`"),
    ({"": entry(0, 8)}, b"x" * 8, "name that is not allowed"),
    ({"__metadata__": {"a": 1}}, b"", "must hold strings"),
    ({"__metadata__": "pt"}, b"", "must be an object"),
    (b'{"a":{},"a":{}}', b"", "`a` occurs twice"),
    (b"[]", b"", "must be a JSON object"),
    (b"{", b"", "not strict JSON"),
    (b"[" * 100_000, b"", "not strict JSON"),
]


@pytest.mark.parametrize(("header", "data", "message"), F32_HEADER)
def test_a_header_that_does_not_fit_is_refused(
    tmp_path: Path, header: Any, data: bytes, message: str
) -> None:
    path = write(tmp_path / "x.safetensors", header, data)
    assert re.search(message, refused(path))


@pytest.mark.parametrize("size", [0, 1, 7])
def test_a_file_without_a_header_is_refused(tmp_path: Path, size: int) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"\0" * size)
    assert "too short" in refused(path)


def test_a_header_beyond_the_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", 3) + b"{}")
    assert "has 3 bytes, the file only 10" in refused(path)


def test_a_header_that_is_too_long_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.safetensors"
    length = header.MAX_HEADER_BYTES + 1
    with open(path, "wb") as file:  # sparse: it takes no space
        file.write(struct.pack("<Q", length) + b"{}")
        file.truncate(8 + length)
    monkeypatch.setattr(json, "loads", lambda *_, **__: pytest.fail("the header was read"))
    assert f"has {length} bytes; the limit is {header.MAX_HEADER_BYTES}" in refused(path)


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in refused(tmp_path / "pipe")
    assert "not a regular file" in refused(tmp_path)
    save_file(weights(), tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert "not a link" in refused(tmp_path / "link")
    assert identical(map_tensors(tmp_path / "link", follow_links=True).tensors, weights())


def test_a_tensor_on_an_odd_byte_is_still_read(tmp_path: Path) -> None:
    values = torch.tensor([1.5, -2.0])
    header = json.dumps({"a": entry(0, 8)}).encode()
    header += b" " * ((1 - len(header)) % 2)
    path = write(tmp_path / "x.safetensors", header, raw(values))
    read = map_tensors(path).tensors["a"]
    assert torch.equal(read, values)
    assert read.data_ptr() % read.itemsize == 0


@settings(max_examples=300)
@given(st.data())
def test_damaged_files_are_read_or_refused_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Whatever the bytes: no error but ours, and no tensor that reaches beyond its file."""
    policy = weights()
    path = tmp_path_factory.mktemp("damaged") / "x.safetensors"
    save_file(policy, path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(len(content) - 20, len(content)))])
    try:
        mapped = map_tensors(path)
    except WeightsError as error:
        assert f"`{path}`" in str(error)
    else:
        assert sum(t.nbytes for t in mapped.tensors.values()) == mapped.num_bytes - len(mapped.head)
        digests(mapped.tensors)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@given(st.integers(1, 70), st.data())
def test_one_bad_number_anywhere_is_found(
    dtype: torch.dtype, size: int, data: st.DataObject
) -> None:
    tensor = torch.linspace(-1, 1, size).to(dtype)
    tensor[data.draw(st.integers(0, size - 1))] = torch.finfo(dtype).max
    tensor[data.draw(st.integers(0, size - 1))] = torch.finfo(dtype).min
    check_finite("w", tensor)
    bad = data.draw(st.sampled_from([float("nan"), float("inf"), -float("inf")]))
    tensor[data.draw(st.integers(0, size - 1))] = bad
    with pytest.raises(WeightsError, match="tensor `w` is not finite"):
        check_finite("w", tensor)


@pytest.mark.parametrize("few", [0, 1 << 20], ids=["threads", "none"])
def test_digests_are_of_the_bytes_however_they_are_computed(
    monkeypatch: pytest.MonkeyPatch, few: int
) -> None:
    monkeypatch.setattr("dora_rl.weights.tensors._FEW_BYTES", few)
    policy = weights()
    expected = {name: hashlib.sha256(raw(tensor)).hexdigest() for name, tensor in policy.items()}
    assert digests(policy) == expected
    policy["scale"] = torch.tensor(float("nan"))
    with pytest.raises(WeightsError, match="tensor `scale` is not finite"):
        digests(policy, ready)


def test_bytes_are_the_memory_itself() -> None:
    tensor = torch.zeros(3, dtype=torch.bfloat16, requires_grad=True)
    view = bytes_of(tensor)
    assert bytes(view) == b"\0" * 6
    with torch.no_grad():
        tensor[2] = 1.0
    assert bytes(view) == b"\0\0\0\0\x80\x3f"
