"""The manifest: its one spelling, its digest, and all that is refused by name."""

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dora_rl.weights import manifest as manifests
from dora_rl.weights.errors import WeightsError
from dora_rl.weights.fingerprint import Fingerprint, probe
from dora_rl.weights.manifest import (
    FileEntry,
    Manifest,
    TensorEntry,
    decode,
    directory_name,
    read_manifest,
    version_of,
)
from tests.weights.samples import forged, spelled

A, B, C = "a" * 64, "b" * 64, "c" * 64
FILES = {"one.safetensors": FileEntry(24, A), "two.safetensors": FileEntry(9, B)}
TENSORS = {
    "head.weight": TensorEntry("two.safetensors", "F32", (2, 3), C),
    "body.weight": TensorEntry("one.safetensors", "BF16", (), A),
}
MANIFEST = Manifest(7, FILES, TENSORS, Fingerprint((5, 0, 3), (-0.5, -1.25)))


def refused(raw: bytes) -> str:
    with pytest.raises(WeightsError) as caught:
        decode(raw, "`dir/manifest.json`")
    assert "`dir/manifest.json`" in str(caught.value)
    return str(caught.value)


def test_what_is_written_reads_back() -> None:
    assert decode(MANIFEST.encode(), "x") == MANIFEST


def test_a_manifest_without_a_fingerprint_reads_back() -> None:
    plain = Manifest(7, FILES, TENSORS)
    assert plain.fingerprint is None
    assert decode(plain.encode(), "x") == plain
    assert plain.digest == MANIFEST.digest


def test_a_fingerprint_is_as_far_as_its_worst_token() -> None:
    fingerprint = Fingerprint((5, 0, 3), (-0.5, -1.25))
    assert fingerprint.distance([-0.5, -1.25]) == 0
    assert fingerprint.distance([-0.75, -1.0]) == 0.25
    for strange in (float("nan"), -float("inf")):
        assert fingerprint.distance([strange, -1.25]) == float("inf")
    with pytest.raises(ValueError, match="shorter"):
        fingerprint.distance([-0.5])


@pytest.mark.parametrize("vocab_size", [1, 2, 300, 50_000])
def test_the_probe_is_of_the_vocabulary(vocab_size: int) -> None:
    tokens = probe(vocab_size)
    assert len(tokens) == 32
    assert all(0 <= token < vocab_size for token in tokens)
    assert len(set(tokens)) > min(vocab_size, 20) / 2


def test_the_digest_is_over_names_dtypes_shapes_and_bytes() -> None:
    rows = f'[["body.weight","BF16",[],"{A}"],["head.weight","F32",[2,3],"{C}"]]'
    assert MANIFEST.digest == hashlib.sha256(rows.encode()).hexdigest()


def test_the_digest_does_not_depend_on_files_version_or_order() -> None:
    one = {"all.safetensors": FileEntry(1, C)}
    together = {
        name: TensorEntry("all.safetensors", t.dtype, t.shape, t.sha256)
        for name, t in reversed(TENSORS.items())
    }
    assert Manifest(8, one, together).digest == MANIFEST.digest


@pytest.mark.parametrize(
    "other",
    [
        TensorEntry("two.safetensors", "BF16", (2, 3), C),
        TensorEntry("two.safetensors", "F32", (3, 2), C),
        TensorEntry("two.safetensors", "F32", (6,), C),
        TensorEntry("two.safetensors", "F32", (2, 3), B),
    ],
)
def test_the_digest_depends_on_each_part_of_a_tensor(other: TensorEntry) -> None:
    changed = Manifest(7, FILES, {**TENSORS, "head.weight": other})
    assert changed.digest != MANIFEST.digest
    renamed = Manifest(7, FILES, {"tail.weight": TENSORS["head.weight"], **TENSORS})
    assert renamed.digest != MANIFEST.digest


FORGERIES: list[tuple[Callable[[Any], Any], str]] = [
    (lambda m: m.update(extra=1), "unknown key: `extra`"),
    (lambda m: m.update(format=1), "has the format `1`: this dora-rl reads 2"),
    (lambda m: m.update(format=2.0), "format .* whole number"),
    (lambda m: m.update(fingerprint=[]), "fingerprint .* must be an object"),
    (lambda m: m["fingerprint"].update(tokens=[1, -1, 2]), "a token of fingerprint .*`-1`"),
    (lambda m: m["fingerprint"].update(tokens=[1, 2]), "2 tokens and 2 logprobs"),
    (lambda m: m["fingerprint"].update(logprobs=[-1.0, 0.5]), "none: `0.5`"),
    (lambda m: m["fingerprint"].update(logprobs=[-1.0, -1e999]), "strict JSON|none: "),
    (lambda m: m["fingerprint"].update(tokens=7), "tokens of fingerprint .* a list: `7`"),
    (lambda m: m["fingerprint"].update(dtype="F32"), "dtype of fingerprint .*: `F32`"),
    (lambda m: m["fingerprint"].pop("tokens"), "fingerprint .* lacks the key `tokens`"),
    (lambda m: m.update(version=-1), "version .* whole number >= 0: `-1`"),
    (lambda m: m.update(version="7"), "version .* whole number >= 0: `7`"),
    (lambda m: m.update(version=7.0), "version .* whole number"),
    (lambda m: m.update(files=[]), "files .* must be an object"),
    (lambda m: m.update(tensors=None), "tensors .* must be an object"),
    (lambda m: m.update(tensors={}), "has no tensor"),
    (lambda m: m.update(tensors={}, files={}), "has no tensors"),
    (lambda m: m["tensors"].pop("body.weight"), "file `one.safetensors` .* has no tensor"),
    (lambda m: m["files"].pop("one.safetensors"), "`body.weight` .* not listed: `one"),
    (lambda m: m["files"]["one.safetensors"].update(more=1), "file `one.* key: `more`"),
    (lambda m: m["files"]["one.safetensors"].pop("bytes"), "file `one.* lacks the key `bytes`"),
    (lambda m: m["files"]["one.safetensors"].update(bytes=-5), "bytes of file `one.*: `-5`"),
    (lambda m: m["files"]["one.safetensors"].update(bytes=2**63), "bytes of file `one"),
    (lambda m: m["files"]["one.safetensors"].update(bytes=True), "bytes of file `one"),
    (lambda m: m["files"]["one.safetensors"].update(sha256=A[1:]), "sha256 of file `one"),
    (lambda m: m["files"]["one.safetensors"].update(sha256="A" * 64), "sha256 of file `one"),
    (lambda m: m["files"].update({"one.safetensors": 1}), "file `one.* must be an object"),
    (lambda m: m["tensors"]["head.weight"].update(x=1), "tensor `head.weight` .* key: `x`"),
    (lambda m: m["tensors"]["head.weight"].pop("dtype"), "tensor `head.weight` .* lacks"),
    (lambda m: m["tensors"]["head.weight"].update(dtype="I64"), "`head.weight` .* `I64`"),
    (lambda m: m["tensors"]["head.weight"].update(dtype=["F32"]), "`head.weight` .* dtype"),
    (lambda m: m["tensors"]["head.weight"].update(shape=[2, -3]), "`head.weight` .* `-3`"),
    (lambda m: m["tensors"]["head.weight"].update(shape=[2, 1.5]), "`head.weight`"),
    (lambda m: m["tensors"]["head.weight"].update(shape="23"), "`head.weight`"),
    (lambda m: m["tensors"]["head.weight"].update(shape=[1] * 17), "`head.weight`"),
    (lambda m: m["tensors"]["head.weight"].update(shape=[0, 2**40, 2**40]), "`head.weight`"),
    (lambda m: m["tensors"]["head.weight"].update(sha256=None), "sha256 of tensor `head.weight`"),
    (lambda m: m["tensors"]["head.weight"].update(sha256=A), "digest .* does not match"),
    (lambda m: m["tensors"]["head.weight"].update(file=3), "file of tensor `head.weight`"),
    (lambda m: m.update(digest=A), "digest .* does not match"),
    (lambda m: m.update(digest=None), "digest .* does not match"),
]


@pytest.mark.parametrize(("change", "message"), FORGERIES)
def test_what_does_not_fit_is_refused_by_entry(change: Callable[[Any], Any], message: str) -> None:
    assert re.search(message, refused(forged(MANIFEST.encode(), change)))


@pytest.mark.parametrize(
    "key", ["format", "version", "digest", "files", "tensors", "fingerprint", "checksum"]
)
def test_each_key_must_be_there(key: str) -> None:
    raw = forged(MANIFEST.encode(), lambda m: m.pop(key))
    assert f"lacks the key `{key}`" in refused(raw)


BAD_PATHS = [
    "../x.safetensors",
    "/etc/x.safetensors",
    "a/b.safetensors",
    "a\\b.safetensors",
    "..\\x.safetensors",
    ".hidden.safetensors",
    "..",
    "",
    "x\n.safetensors",
    "x\u0000.safetensors",
    "x.safetensors\n",
    "ü.safetensors",
    "x" * 300 + ".safetensors",
]


@pytest.mark.parametrize("name", [*BAD_PATHS, "x.bin", "manifest.json", "model.safetensors.bak"])
def test_a_name_cannot_leave_the_directory(name: str) -> None:
    def rename(m: Any) -> None:
        m["files"][name] = m["files"].pop("one.safetensors")
        m["tensors"]["body.weight"]["file"] = name

    def point(m: Any) -> None:
        m["tensors"]["body.weight"]["file"] = name

    assert "must name a safetensors file" in refused(forged(MANIFEST.encode(), rename))
    message = refused(forged(MANIFEST.encode(), point))
    assert "file of tensor `body.weight`" in message
    assert "must name a safetensors file" in message


@pytest.mark.parametrize("name", [*BAD_PATHS[:-1], "__metadata__", "a b", "x" * 600])
def test_a_tensor_name_is_no_path_either(name: str) -> None:
    def rename(m: Any) -> None:
        m["tensors"][name] = m["tensors"].pop("body.weight")

    assert "name that is not allowed" in refused(forged(MANIFEST.encode(), rename))


def test_a_key_that_occurs_twice_is_refused() -> None:
    text = MANIFEST.encode().decode()
    double = text.replace('"version":7', '"version":7,"version":7')
    assert "the key `version` occurs twice" in refused(double.encode())
    inner = text.replace('"dtype":"F32"', '"dtype":"BF16","dtype":"F32"')
    assert "the key `dtype` occurs twice" in refused(inner.encode())


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"\xff",
        b"[]",
        b"1",
        b"null",
        b'{"version":NaN}',
        b"[" * 200_000,
        b"\xef\xbb\xbf{}",
    ],
)
def test_what_is_no_json_object_is_refused(raw: bytes) -> None:
    refused(raw)


def test_another_spelling_is_refused() -> None:
    content = json.loads(MANIFEST.encode())
    assert spelled(content) == MANIFEST.encode()
    refused(json.dumps(content).encode())
    refused(MANIFEST.encode() + b" ")
    refused(spelled({**content, "checksum": A}))
    refused(spelled({**content, "checksum": 5}))
    other = json.loads(MANIFEST.encode())
    other["files"]["one.safetensors"]["sha256"] = C  # covered by no digest but the checksum
    assert "checksum" in refused(spelled(other))


@settings(max_examples=300)
@given(st.integers(0, len(MANIFEST.encode()) - 1), st.integers(1, 255))
def test_any_altered_byte_is_refused(offset: int, flip: int) -> None:
    raw = bytearray(MANIFEST.encode())
    raw[offset] ^= flip
    refused(bytes(raw))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@given(st.sampled_from(["version", "digest", "files", "tensors"]), json_values)
def test_no_value_whatever_passes_in_place_of_another(key: str, value: Any) -> None:
    raw = forged(MANIFEST.encode(), lambda m: m.update({key: value}))
    if key == "version" and type(value) is int and 0 <= value < 2**63:
        assert decode(raw, "x").version == value
    else:
        refused(raw)


def test_a_directory_bears_the_name_of_its_version() -> None:
    assert directory_name(7) == "version-00000007"
    assert version_of("version-00000007") == 7
    assert version_of(directory_name(123_456_789)) == 123_456_789
    for name in [
        "version-7",
        "version-000000007",
        "version-0000000x",
        "version-\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0667",
        "x",
    ]:
        assert version_of(name) is None


def test_the_manifest_of_another_version_is_refused(tmp_path: Path) -> None:
    for name in ("version-00000007", "version-00000008", "latest"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_bytes(MANIFEST.encode())
    assert read_manifest(tmp_path / "version-00000007") == MANIFEST
    with pytest.raises(WeightsError, match="belongs to version 7, not to 8"):
        read_manifest(tmp_path / "version-00000008")
    with pytest.raises(WeightsError, match=r"not the directory of a version: `.*latest`"):
        read_manifest(tmp_path / "latest")


def test_a_manifest_must_be_a_file_of_bounded_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "version-00000007"
    directory.mkdir()
    with pytest.raises(WeightsError, match=r"cannot open `.*manifest.json`: No such file"):
        read_manifest(directory)
    (tmp_path / "elsewhere").write_bytes(MANIFEST.encode())
    (directory / "manifest.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(WeightsError, match=r"cannot open `.*manifest.json`"):
        read_manifest(directory)
    (directory / "manifest.json").unlink()
    (directory / "manifest.json").write_bytes(MANIFEST.encode())
    monkeypatch.setattr(manifests, "MAX_BYTES", len(MANIFEST.encode()))
    assert read_manifest(directory) == MANIFEST
    monkeypatch.setattr(manifests, "MAX_BYTES", len(MANIFEST.encode()) - 1)
    with pytest.raises(WeightsError, match=r"bytes; the limit is .* It is not read"):
        read_manifest(directory)
