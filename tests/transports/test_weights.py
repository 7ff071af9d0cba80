"""The weight store: what is published comes back to the bit, or is not there."""

import os
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dora_rl.transports.weights.shared_directory import WeightStore
from dora_rl.weights import disk
from dora_rl.weights.errors import WeightsError
from dora_rl.weights.manifest import FILE_NAME
from dora_rl.weights.version_writer import split
from tests.weights.samples import DTYPES, forge, identical, replace, weights

names = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,20}", fullmatch=True).filter(
    lambda name: name != "__metadata__"
)


@st.composite
def policies(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """Any names, dtypes, shapes and finite bit patterns."""
    policy = {}
    for name in draw(st.lists(names, min_size=1, max_size=5, unique=True)):
        dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
        shape = draw(st.lists(st.integers(0, 5), max_size=3))
        count = torch.Size(shape).numel() * dtype.itemsize
        bits = bytearray(draw(st.binary(min_size=count, max_size=count)))
        tensor = torch.frombuffer(bits, dtype=dtype) if count else torch.empty(0, dtype=dtype)
        finite = torch.where(tensor.isfinite(), tensor, torch.zeros((), dtype=dtype))
        policy[name] = finite.reshape(shape)
    return policy


@settings(max_examples=40)
@given(policies(), st.integers(1, 200), st.integers(0, 2**40))
def test_what_is_published_comes_back(
    policy: dict[str, torch.Tensor], max_file_bytes: int, version: int
) -> None:
    with tempfile.TemporaryDirectory() as root:
        store = WeightStore(Path(root))
        manifest = store.publish(version, policy, max_file_bytes=max_file_bytes)
        loaded = store.load(version)
        assert identical(loaded.tensors, policy)
        assert loaded.manifest == manifest == store.manifest(version) == store.verify(version)
        assert loaded.digest == manifest.digest
        assert store.versions() == [version]
        assert store.publish(version, policy) == manifest  # however it would be split
        other = WeightStore(Path(root) / "other").publish(0, policy)
        assert other.digest == manifest.digest
        assert len(other.files) == 1


@given(st.dictionaries(names, st.integers(0, 30), min_size=1, max_size=8), st.integers(1, 60))
def test_files_respect_their_limit(sizes: dict[str, int], limit: int) -> None:
    policy = {name: torch.zeros(size, dtype=torch.bfloat16) for name, size in sizes.items()}
    shards = split(policy, limit)
    assert sorted(name for shard in shards for name in shard) == sorted(policy)
    for shard in shards:
        assert len(shard) == 1 or sum(policy[name].nbytes for name in shard) <= limit
    for left, right in pairwise(shards):
        first = policy[min(right)].nbytes
        assert sum(policy[name].nbytes for name in left) + first > limit


def test_versions_are_listed_in_order_and_nothing_else(tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "runs" / "weights")
    assert store.versions() == []
    for version in (10, 2, 123_456_789):
        store.publish(version, weights(version))
    (store.root / "version-7").mkdir()
    (store.root / "notes").mkdir()
    assert store.versions() == [2, 10, 123_456_789]
    assert store.path(2) == store.root / "version-00000002"
    assert identical(store.load(10).tensors, weights(10))


def test_published_files_are_read_only(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    store.publish(0, weights())
    assert all(path.stat().st_mode & 0o222 == 0 for path in store.path(0).iterdir())


def test_the_same_weights_again_change_nothing(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    manifest = store.publish(4, weights())
    before = {path: path.stat().st_mtime_ns for path in store.path(4).iterdir()}
    assert store.publish(4, weights(), max_file_bytes=20) == manifest
    assert {path: path.stat().st_mtime_ns for path in store.path(4).iterdir()} == before


def test_other_weights_under_a_published_version_are_refused(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    store.publish(4, weights())
    with pytest.raises(WeightsError, match=r"version 4 is published with other weights: .*Use a"):
        store.publish(4, weights(1))
    fewer = weights()
    fewer.pop("scale")
    with pytest.raises(WeightsError, match="other weights"):
        store.publish(4, fewer)
    assert identical(store.load(4).tensors, weights())


def test_a_damaged_version_is_not_taken_for_published(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    store.publish(4, weights())
    path = store.path(4) / "model.safetensors"
    content = path.read_bytes()
    replace(path, content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(WeightsError, match="was altered"):
        store.publish(4, weights())


def test_verify_checks_the_digests_of_whole_files(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    store.publish(4, weights())

    def change(m: Any) -> None:
        m["files"]["model.safetensors"]["sha256"] = "0" * 64

    forge(store.path(4), change)
    store.load(4)
    with pytest.raises(WeightsError, match=r"model.safetensors` has the sha256"):
        store.verify(4)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_no_numbers_are_refused(
    tmp_path: Path, dtype: torch.dtype, bad: float
) -> None:
    policy = {**weights(), "lm_head.weight": torch.ones(3, 5, dtype=dtype)}
    policy["lm_head.weight"][1, 3] = bad
    store = WeightStore(tmp_path)
    with pytest.raises(WeightsError, match=r"tensor `lm_head.weight` is not finite"):
        store.publish(1, policy)
    assert store.versions() == []
    assert os.listdir(tmp_path) == [".lock"]


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(2, dtype=torch.float64), "tensor `w` has the dtype `torch.float64`"),
        (torch.zeros(2, dtype=torch.int64), "tensor `w` has the dtype"),
        (torch.zeros(2, dtype=torch.bool), "tensor `w` has the dtype"),
        (torch.zeros(2, dtype=torch.complex64), "tensor `w` has the dtype"),
        (torch.zeros(2, device="meta"), "tensor `w` has no dense memory"),
        (torch.zeros(2, 2).to_sparse(), "tensor `w` has no dense memory"),
        (torch.zeros(2).as_subclass(type("Shard", (torch.Tensor,), {})), "`w` is a `Shard`"),
        ([1.0, 2.0], "tensor `w` is a `list`"),
    ],
)
def test_what_is_no_plain_float_tensor_is_refused(
    tmp_path: Path, tensor: Any, message: str
) -> None:
    store = WeightStore(tmp_path / "root")
    with pytest.raises(WeightsError, match=message):
        store.publish(1, {"w": tensor})
    assert not store.root.exists()


@pytest.mark.parametrize("name", ["../x", "/x", "a\\b", ".hidden", "", "__metadata__", "a b", 3])
def test_names_that_are_not_allowed_are_refused(tmp_path: Path, name: Any) -> None:
    with pytest.raises(WeightsError, match="name that is not allowed"):
        WeightStore(tmp_path).publish(1, {name: torch.ones(1)})


def test_nonsense_is_refused(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    with pytest.raises(WeightsError, match="no tensor to publish"):
        store.publish(1, {})
    for version in (-1, True, 1.0, "1"):
        with pytest.raises(WeightsError, match="version must be a whole number >= 0"):
            store.publish(version, weights())  # type: ignore[arg-type]
    with pytest.raises(WeightsError, match="max_file_bytes must be >= 1: `0`"):
        store.publish(1, weights(), max_file_bytes=0)
    assert store.versions() == []


def test_views_are_written_as_what_they_show(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    policy = {
        "transposed": whole.T,
        "column": whole[:, 1],
        "every.other": whole[::2],
        "expanded": torch.ones(1).expand(5),
        "parameter": torch.nn.Parameter(whole),
    }
    store = WeightStore(tmp_path)
    manifest = store.publish(0, policy)
    assert identical(store.load(0).tensors, policy)
    assert store.publish(0, {n: t.detach().clone() for n, t in policy.items()}) == manifest


def test_tied_names_have_bytes_of_their_own(tmp_path: Path) -> None:
    shared = torch.ones(3, 2)
    store = WeightStore(tmp_path)
    store.publish(0, {"embed.weight": shared, "lm_head.weight": shared})
    loaded = store.load(0).tensors
    assert torch.equal(loaded["embed.weight"], loaded["lm_head.weight"])
    assert loaded["embed.weight"].data_ptr() != loaded["lm_head.weight"].data_ptr()


def test_what_is_not_published_is_said(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    for ask in (store.manifest, store.load, store.verify):
        with pytest.raises(WeightsError, match=r"version 9 is not in .* there: none"):
            ask(9)
    store.publish(2, weights())
    with pytest.raises(WeightsError, match=r"version 9 is not in .* there: 2"):
        store.load(9)


def test_a_deleted_version_is_gone_and_can_be_published_again(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    store.delete(1)
    store.publish(1, weights())
    store.publish(2, weights(2))
    store.delete(1)
    store.delete(1)
    assert store.versions() == [2]
    assert sorted(os.listdir(tmp_path)) == [".lock", "version-00000002"]
    store.publish(1, weights(1))
    assert identical(store.load(1).tensors, weights(1))
    assert identical(store.load(2).tensors, weights(2))
    WeightStore(tmp_path / "nowhere").delete(1)
    assert not (tmp_path / "nowhere").exists()


def test_a_damaged_version_can_be_deleted(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    store.publish(1, weights())
    (store.path(1) / FILE_NAME).unlink()
    (store.path(1) / "folder").mkdir()
    (store.path(1) / "folder" / "file").write_bytes(b"x")
    (tmp_path / "outside").write_bytes(b"x")
    (store.path(1) / "link").symlink_to(tmp_path)
    store.delete(1)
    assert sorted(os.listdir(tmp_path)) == [".lock", "outside"]


def test_leftovers_are_swept_and_foreign_files_kept(tmp_path: Path) -> None:
    for name in (".publishing-0123", ".deleted-4567", ".snapshot"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"half")
    WeightStore(tmp_path).publish(0, weights())
    assert sorted(os.listdir(tmp_path)) == [".lock", ".snapshot", "version-00000000"]


def test_waiting_for_another_publication_has_an_end(tmp_path: Path) -> None:
    store = WeightStore(tmp_path, lock_timeout_s=0.05)
    (tmp_path / ".publishing-other").mkdir()
    with (
        disk.locked(tmp_path / ".lock", 1.0),
        pytest.raises(WeightsError, match=r"another process .* it holds `.*\.lock`"),
    ):
        store.publish(0, weights())
    assert (tmp_path / ".publishing-other").exists()  # not swept: it is in progress
    store.publish(0, weights())


def test_a_root_that_is_a_file_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(WeightsError, match=r"cannot open `.*file/.lock`: Not a directory"):
        WeightStore(tmp_path / "file").publish(0, weights())
