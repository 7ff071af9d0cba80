"""Opening a version: in place, and nothing that differs from what was published."""

import gc
import json
import os
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from dora_rl.transports.weights.shared_directory import WeightStore
from dora_rl.weights.errors import WeightsError
from dora_rl.weights.loading import open_version
from dora_rl.weights.manifest import digest_of
from tests.weights.samples import forge, identical, replace, replaced, weights

SHARD = 60  # bytes a file: the sample becomes three files


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A version in several files. A test that damages it must restore it."""
    store = WeightStore(tmp_path_factory.mktemp("store"))
    assert len(store.publish(7, weights(), max_file_bytes=SHARD).files) == 3
    return store.path(7)


@pytest.fixture
def version(published: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    shutil.copytree(published, tmp_path / published.name)
    return tmp_path / published.name


def refused(directory: Path) -> str:
    with pytest.raises(WeightsError) as caught:
        open_version(directory)
    return str(caught.value)


def places(path: Path) -> dict[str, range]:
    """Where each tensor of a safetensors file is."""
    content = path.read_bytes()
    start = 8 + struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8:start])
    header.pop("__metadata__")
    return {
        name: range(start + entry["data_offsets"][0], start + entry["data_offsets"][1])
        for name, entry in header.items()
    }


def test_a_version_opens_as_it_was_published(published: Path) -> None:
    loaded = open_version(published)
    assert identical(loaded.tensors, weights())
    assert loaded.digest == loaded.manifest.digest
    assert loaded.manifest.version == 7


@settings(max_examples=600)
@given(data=st.data())
def test_any_altered_byte_of_any_file_is_refused(published: Path, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(sorted(published.iterdir())))
    content = bytearray(path.read_bytes())
    offset = data.draw(st.integers(0, len(content) - 1))
    content[offset] ^= data.draw(st.integers(1, 255))
    hit = []
    if path.suffix == ".safetensors":
        hit = [name for name, place in places(path).items() if offset in place]
    with replaced(path, bytes(content)):
        message = refused(published)
    assert path.name in message
    for name in hit:
        assert f"tensor `{name}`" in message


@settings(max_examples=300)
@given(data=st.data())
def test_a_file_of_any_other_length_is_refused(published: Path, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(sorted(published.iterdir())))
    content = path.read_bytes()
    length = data.draw(st.integers(0, len(content) - 1))
    cut = []
    if path.suffix == ".safetensors":
        found = places(path)
        if length >= min(place.start for place in found.values()):
            cut = [name for name, place in found.items() if place and place.stop > length]
    with replaced(path, content[:length]):
        message = refused(published)
    assert path.name in message
    assert not cut or any(f"tensor `{name}`" in message for name in cut)
    with replaced(path, content + content[:1]):
        assert path.name in refused(published)


def test_a_missing_file_is_refused(version: Path) -> None:
    for path in sorted(version.iterdir()):
        content = path.read_bytes()
        path.unlink()
        assert path.name in refused(version)
        path.write_bytes(content)
    open_version(version)


def test_a_foreign_file_is_refused(version: Path) -> None:
    for name in ("notes.txt", ".hidden", "model.safetensors"):
        (version / name).write_bytes(b"")
        assert f"`{version / name}` is not in the manifest" in refused(version)
        (version / name).unlink()
    (version / "folder").mkdir()
    assert "folder` is not in the manifest" in refused(version)


def test_a_link_in_place_of_a_file_is_refused(version: Path, published: Path) -> None:
    name = "model-00001-of-00003.safetensors"
    (version / name).unlink()
    (version / name).symlink_to(published / name)
    assert f"`{version / name}`" in refused(version)


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    path.unlink()
    save_file(tensors, path, metadata={"format": "pt"})


FIRST = "model-00001-of-00003.safetensors"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update(foreign=torch.ones(1)), "tensor `foreign` in "),
        (lambda t: t.pop("model.embed_tokens.weight"), "tensor `model.embed_tokens.weight` is "),
        (
            lambda t: t.update({"model.embed_tokens.weight": torch.ones(4, 7).bfloat16()}),
            "tensor `model.embed_tokens.weight` in .* is `BF16` of shape",
        ),
        (
            lambda t: t.update({"model.embed_tokens.weight": torch.ones(7, 4).half()}),
            "tensor `model.embed_tokens.weight` in .* is `F16` of shape",
        ),
    ],
)
def test_foreign_tensors_are_refused_by_name(
    version: Path, change: Callable[[dict[str, torch.Tensor]], Any], message: str
) -> None:
    rewrite(version / FIRST, change)
    found = refused(version)
    assert FIRST in found
    assert re.search(message, found)


def test_files_that_were_swapped_are_refused(version: Path) -> None:
    second = version / "model-00002-of-00003.safetensors"
    content = second.read_bytes()
    replace(second, (version / FIRST).read_bytes())
    replace(version / FIRST, content)
    assert "is not listed there by the manifest" in refused(version)


def test_metadata_cannot_be_added_to_a_header(version: Path) -> None:
    content = (version / FIRST).read_bytes()
    altered = content.replace(b'"format":"pt"', b'"format":"tp"')
    assert altered != content
    replace(version / FIRST, altered)
    assert f"the header of `{version / FIRST}` was altered" in refused(version)


def test_the_manifest_of_another_version_is_refused(version: Path, tmp_path: Path) -> None:
    other = WeightStore(tmp_path / "other")
    other.publish(8, weights(1), max_file_bytes=SHARD)
    manifest = (other.path(8) / "manifest.json").read_bytes()
    replace(version / "manifest.json", manifest)
    assert "belongs to version 8, not to 7" in refused(version)
    forge(version, lambda m: m.update(version=7))  # not even if it says so
    assert "tensor `" in refused(version)


def test_a_forged_size_of_a_file_is_refused(version: Path) -> None:
    forge(version, lambda m: m["files"][FIRST].update(bytes=m["files"][FIRST]["bytes"] + 1))
    assert f"`{version / FIRST}` has" in refused(version)


def test_a_forged_digest_of_a_tensor_is_refused(version: Path) -> None:
    """Whoever rewrites the manifest consistently must still have the bytes."""

    def forge_digest(m: Any) -> None:
        m["tensors"]["scale"]["sha256"] = "0" * 64
        rows = [(n, t["dtype"], t["shape"], t["sha256"]) for n, t in m["tensors"].items()]
        m["digest"] = digest_of(rows)

    forge(version, forge_digest)
    assert "tensor `scale` in" in refused(version)


LINUX = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="Linux alone tells it")


def mappings() -> list[tuple[int, int, str]]:
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        begin, end = (int(number, 16) for number in fields[0].split("-"))
        found.append((begin, end, fields[5] if len(fields) > 5 else ""))
    return found


def check_mapped(directory: Path) -> None:
    loaded = open_version(directory)
    mapped = mappings()
    for name, tensor in loaded.tensors.items():
        if tensor.numel():
            file = str(directory / loaded.manifest.tensors[name].file)
            begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
            assert any(b <= begin and end <= e and path == file for b, e, path in mapped), name


@LINUX
def test_tensors_are_the_mapped_file_itself(published: Path) -> None:
    check_mapped(published)


@LINUX
def test_a_narrow_tensor_does_not_push_a_wide_one_off_its_place(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    store.publish(0, {"a": torch.ones(3).half(), "b": torch.ones(2), "c": torch.ones(1).half()})
    check_mapped(store.path(0))  # one that is not aligned would have been copied


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


@LINUX
def test_opening_takes_no_memory_of_its_own(tmp_path: Path) -> None:
    size = 64 << 20
    store = WeightStore(tmp_path)
    store.publish(0, {"w": torch.full((size // 2,), 0.5, dtype=torch.bfloat16)})
    before = anonymous_bytes()
    loaded = store.load(0)
    assert loaded.tensors["w"].nbytes == size
    assert anonymous_bytes() - before < size // 8


def test_writing_to_a_tensor_leaves_the_file_alone(version: Path) -> None:
    loaded = open_version(version)
    loaded.tensors["model.norm.weight"].zero_()
    assert identical(open_version(version).tensors, weights())


def test_a_deleted_version_stays_in_memory(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    store.publish(3, weights())
    loaded = store.load(3)
    store.delete(3)
    assert not store.path(3).exists()
    assert identical(loaded.tensors, weights())


def test_no_descriptor_is_left_open(version: Path) -> None:
    def descriptors() -> int:
        return len(os.listdir("/dev/fd"))

    gc.collect()  # of earlier tests: pytest keeps tracebacks in cycles
    before = descriptors()
    loaded = open_version(version)
    assert descriptors() > before
    del loaded
    assert descriptors() == before  # at once, without the garbage collector
    replace(version / FIRST, b"damaged" * 9)
    refused(version)
    gc.collect()
    assert descriptors() == before
