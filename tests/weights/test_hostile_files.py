"""Files that lie: refused by name, without a crash, and without the memory that they ask for."""

import io
import json
import os
import re
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dora_rl.transports.weights.shared_directory import WeightStore
from dora_rl.weights import disk
from dora_rl.weights.errors import WeightsError
from dora_rl.weights.files import map_tensors
from dora_rl.weights.header import MAX_HEADER_BYTES
from dora_rl.weights.huggingface import map_model
from dora_rl.weights.loading import open_version
from tests.weights.samples import forge, weights

TERABYTE = 1 << 40


def pickled(protocol: int) -> bytes:
    """By hand: reading it runs a command."""
    head = b"\x80" + bytes([protocol]) if protocol else b""
    return head + b"cposix\nsystem\n(S'touch was-run'\ntR." + b"x" * 100


def zipped() -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("archive/data.pkl", pickled(2))
    return stream.getvalue()


def saved(**how: Any) -> bytes:
    stream = io.BytesIO()
    torch.save({"a": torch.ones(3)}, stream, **how)
    return stream.getvalue()


def refused(path: Path, read: Callable[[Path], Any] = map_tensors) -> str:
    """The refusal, which must name the file and cost next to nothing."""
    tracemalloc.start()
    try:
        with pytest.raises(WeightsError) as caught:
            read(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert str(path) in str(caught.value)
    assert peak < 8 << 20
    return str(caught.value)


PICKLES = {
    **{f"protocol {number}": pickled(number) for number in range(2, 6)},
    "zip": zipped(),
    "torch.save": saved(),
    "old torch.save": saved(_use_new_zipfile_serialization=False),
}


@pytest.mark.parametrize("kind", PICKLES)
def test_a_pickle_under_another_name_is_known_for_one(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(PICKLES[kind])
    assert "is a pickle under another name" in refused(path)
    assert "is a pickle under another name" in refused(tmp_path, map_model)
    assert not (tmp_path / "was-run").exists()


def test_an_ancient_pickle_is_refused_too(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(pickled(0))
    assert "not safetensors" in refused(tmp_path / "x")


def test_a_header_may_begin_like_a_pickle(tmp_path: Path) -> None:
    """Its length can be any number: 0x0280 are two bytes of a pickle as well."""
    text = b"{}".ljust(0x0280)
    (tmp_path / "x").write_bytes(struct.pack("<Q", len(text)) + text)
    assert map_tensors(tmp_path / "x").tensors == {}


@pytest.mark.parametrize(
    "length",
    [*(-1, -8, -(2**63), 2**63 - 1, 2**40), MAX_HEADER_BYTES, MAX_HEADER_BYTES + 1, 3],
)
def test_a_header_of_an_impossible_length_is_refused(tmp_path: Path, length: int) -> None:
    (tmp_path / "x").write_bytes(struct.pack("<Q", length % 2**64) + b"{}")
    assert re.search("the header of .* has [0-9]+ bytes", refused(tmp_path / "x"))


def sparse(path: Path, header: bytes, size: int) -> None:
    """A file that claims to be large, and takes no space."""
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + size)


def entry(shape: list[int], begin: int = 0) -> dict[str, Any]:
    size = 4
    for length in shape:
        size *= length
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, begin + size]}


@pytest.mark.parametrize("odd", [False, True], ids=["mapped", "copied"])
def test_a_file_of_a_terabyte_of_nothing_costs_nothing(tmp_path: Path, odd: bool) -> None:
    header = json.dumps({"a": entry([TERABYTE // 4])}).encode()
    header += b" " * ((odd - len(header)) % 4)
    sparse(tmp_path / "x", header, TERABYTE)
    tracemalloc.start()
    try:
        tensor = map_tensors(tmp_path / "x").tensors["a"]
    except WeightsError as error:
        assert str(tmp_path / "x") in str(error)
    else:  # a machine that promises more memory than it has
        assert not odd and tensor.numel() == TERABYTE // 4
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 8 << 20


@pytest.mark.parametrize("pages", [0, 1 << 20])
def test_no_more_is_copied_than_there_is_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pages: int
) -> None:
    """Where memory is promised without end, asking for it does not fail: using it kills."""
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": pages}.get)
    header = json.dumps({"a": entry([1])}).encode()
    sparse(tmp_path / "x", header + b" " * ((1 - len(header)) % 4), 4)
    if pages:
        assert map_tensors(tmp_path / "x").tensors["a"].tolist() == [0.0]
    else:
        assert "larger than this machine's memory" in refused(tmp_path / "x")
    sparse(tmp_path / "y", header + b" " * (-len(header) % 4), 4)
    assert map_tensors(tmp_path / "y").tensors["a"].tolist() == [0.0]


def test_memory_that_is_not_there_is_a_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*_: Any) -> Any:
        raise MemoryError

    sparse(tmp_path / "x", json.dumps({"a": entry([1])}).encode(), 4)
    monkeypatch.setattr("dora_rl.weights.files._map", exhausted)
    assert "larger than this machine's memory" in refused(tmp_path / "x")


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ({"a": entry([2**62, 4])}, "too large"),
        ({"a": entry([2**32, 2**32])}, "too large"),
        ({"a": entry([2**63 - 1, 2, 0])}, "too large"),
        ({"a": entry([2**64])}, "whole number"),
        ({"a": {**entry([1]), "data_offsets": [2**63, 2**63 + 4]}}, "an offset of tensor `a`"),
        ({"a": {**entry([1]), "data_offsets": [2**62, 2**62 + 4]}}, "leaves a hole"),
        ({"a": entry([1]), "b": entry([1], 2)}, "overlaps"),
        ({"a": entry([2]), "b": entry([0], 4)}, "overlaps"),
        ({"a": entry([3])}, "ends at byte"),
        ({"a" * 600: entry([1])}, "not allowed"),
        ({"a": {**entry([1]), "dtype": "F32" * 10_000}}, "has the dtype"),
    ],
)
def test_claims_that_do_not_fit_are_refused(
    tmp_path: Path, header: dict[str, Any], reason: str
) -> None:
    sparse(tmp_path / "x", json.dumps(header).encode(), 8)
    message = refused(tmp_path / "x")
    assert reason in message
    assert len(message) < 1500


def nested(depth: int, inside: str) -> bytes:
    return inside.encode().replace(b"?", b'{"a":' * depth + b"1" + b"}" * depth)


@pytest.mark.parametrize(
    "header",
    [
        nested(100_000, "?"),
        nested(100_000, '{"__metadata__":?}'),
        nested(100_000, '{"t":{"dtype":"F32","shape":?,"data_offsets":[0,4]}}'),
        b"[" * 1_000_000,
        b'{"a":' + b"9" * 1_000_000 + b"}",
        b'{"a":1e' + b"9" * 1000 + b"}",
        b'{"a":{},"a":{}}',
        b'{"__metadata__":{"k":"1","k":"2"}}',
        b'{"\\ud800":{}}',
        b"\xff\xfe{}",
        b"{}\0\0\0\0",
    ],
    ids=range(11),
)
def test_a_header_that_is_a_trap_for_its_reader_is_refused(tmp_path: Path, header: bytes) -> None:
    sparse(tmp_path / "x", header, 4)
    with pytest.raises(WeightsError, match="x`") as caught:
        map_tensors(tmp_path / "x")
    assert len(str(caught.value)) < 1500
    str(caught.value).encode()


@given(st.binary(max_size=200), st.integers(0, 2**64 - 1) | st.integers(0, 300))
def test_whatever_the_bytes_are(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, length: int
) -> None:
    path = tmp_path_factory.mktemp("any") / "x"
    path.write_bytes(struct.pack("<Q", length) + content)
    try:
        mapped = map_tensors(path)
    except WeightsError as error:
        assert f"`{path}`" in str(error)
    else:
        assert sum(t.nbytes for t in mapped.tensors.values()) <= len(content)


# --- names that lead elsewhere


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    found = WeightStore(tmp_path / "store")
    found.publish(1, weights(1))
    return found


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    directory = tmp_path / "outside"
    directory.mkdir()
    (directory / "precious.safetensors").write_bytes(b"precious")
    return directory


@pytest.mark.parametrize(
    "name",
    ["../outside/precious.safetensors", "{outside}/precious.safetensors", "link.safetensors"],
)
def test_a_manifest_leads_nowhere_else(store: WeightStore, outside: Path, name: str) -> None:
    name = name.format(outside=outside)
    directory = store.path(1)
    if name == "link.safetensors":
        (directory / name).symlink_to(outside / "precious.safetensors")

    def rename(content: Any) -> None:
        (file,) = content["files"]
        content["files"] = {name: content["files"][file]}
        for tensor in content["tensors"].values():
            tensor["file"] = name
        if name == "link.safetensors":
            (directory / file).unlink()

    forge(directory, rename)
    message = refused(directory, open_version)
    assert "in the same directory" in message or "not a link" in message


@pytest.mark.parametrize("prefix", [".deleted-x", ".publishing-x"])
@pytest.mark.parametrize("kind", ["link", "link to a link", "file", "dangling"])
def test_cleaning_up_follows_no_link(
    store: WeightStore, outside: Path, prefix: str, kind: str
) -> None:
    left = store.root / prefix
    if kind == "file":
        left.write_bytes(b"")
    else:
        target = outside if kind != "dangling" else outside / "nowhere"
        if kind == "link to a link":
            target = store.root / "other"
            target.symlink_to(outside)
        left.symlink_to(target)
    store.publish(2, weights(2))
    store.delete(1)
    assert not os.path.lexists(left)
    assert (outside / "precious.safetensors").read_bytes() == b"precious"
    assert store.versions() == [2]


def test_a_link_inside_a_leftover_is_not_followed(store: WeightStore, outside: Path) -> None:
    left = store.root / ".publishing-x"
    (left / "deeper").mkdir(parents=True)
    (left / "link").symlink_to(outside)
    (left / "deeper" / "link").symlink_to(outside)
    store.publish(2, weights(2))
    assert not left.exists()
    assert (outside / "precious.safetensors").exists()


def test_a_version_that_is_a_link_is_deleted_as_one(store: WeightStore, outside: Path) -> None:
    store.path(5).symlink_to(outside)
    store.delete(5)
    assert store.versions() == [1]
    assert (outside / "precious.safetensors").exists()


def test_the_lock_is_no_link(store: WeightStore, outside: Path) -> None:
    (store.root / ".lock").unlink()
    (store.root / ".lock").symlink_to(outside / "made-by-the-store")
    with pytest.raises(WeightsError, match=r"cannot open `.*\.lock`.*not a link"):
        store.publish(2, weights(2))
    assert not (outside / "made-by-the-store").exists()


def test_the_root_of_a_tree_that_vanishes_is_no_error(tmp_path: Path) -> None:
    disk.remove_tree(tmp_path / "nowhere")
