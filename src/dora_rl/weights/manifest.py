"""The manifest of one version: every file and every tensor with its digest.

    format       2
    version      the version that this directory is
    digest       of the weights alone: the same however they are split over files; of an
                 adapter, also of what it is of
    files        name -> bytes, sha256 of the whole file
    tensors      name -> file, dtype, shape, sha256 of the tensor's bytes
    fingerprint  what `fingerprint.Fingerprint` has, or null where nobody recorded one
    adapter      what `adapter.Adapter` has, where the version is one of a base; else it is absent
    checksum     of all of the above, so that no altered byte of the manifest passes

It has one spelling: what does not read back to the same bytes was not written here. It knows
JSON, not tensors.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dora_rl.core.protocol.types import Version
from dora_rl.weights import adapter as adapters
from dora_rl.weights import checks, disk
from dora_rl.weights.adapter import Adapter
from dora_rl.weights.errors import WeightsError
from dora_rl.weights.fingerprint import Fingerprint

FORMAT = 2
FILE_NAME = "manifest.json"
MAX_BYTES = 100_000_000  # some 400 000 tensors; also the limit of a safetensors header

_KEYS = frozenset({"format", "version", "digest", "files", "tensors", "fingerprint", "checksum"})
_ADAPTER = "adapter"
_FILE_KEYS = frozenset({"bytes", "sha256"})
_TENSOR_KEYS = frozenset({"file", "dtype", "shape", "sha256"})
_FINGERPRINT_KEYS = frozenset({"tokens", "logprobs", "dtype"})
_PRODUCTS = ("float32", "bfloat16", "float16")
_DIRECTORY = re.compile(r"version-([0-9]{8,19})", re.ASCII)


@dataclass(frozen=True, slots=True)
class FileEntry:
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class TensorEntry:
    file: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What one version consists of. The digest follows from the tensors, it cannot be given."""

    version: Version
    files: Mapping[str, FileEntry]
    tensors: Mapping[str, TensorEntry]
    fingerprint: Fingerprint | None = None
    adapter: Adapter | None = None
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        rows = ((name, t.dtype, t.shape, t.sha256) for name, t in self.tensors.items())
        object.__setattr__(self, "digest", digest_of(rows, self.adapter))

    @property
    def num_bytes(self) -> int:
        """Of all files that hold tensors."""
        return sum(file.bytes for file in self.files.values())

    def encode(self) -> bytes:
        """The one spelling of this manifest."""
        content: dict[str, Any] = {
            "format": FORMAT,
            "version": self.version,
            "digest": self.digest,
            "files": {
                name: {"bytes": file.bytes, "sha256": file.sha256}
                for name, file in self.files.items()
            },
            "tensors": {
                name: {"file": t.file, "dtype": t.dtype, "shape": t.shape, "sha256": t.sha256}
                for name, t in self.tensors.items()
            },
            "fingerprint": None
            if self.fingerprint is None
            else {
                "tokens": self.fingerprint.tokens,
                "logprobs": self.fingerprint.logprobs,
                "dtype": self.fingerprint.dtype,
            },
        }
        if self.adapter is not None:
            content[_ADAPTER] = self.adapter.encoded()
        return _canonical({**content, "checksum": checksum_of(content)}) + b"\n"


def digest_of(
    rows: Iterable[tuple[str, str, Sequence[int], str]], adapter: Adapter | None = None
) -> str:
    """The digest of weights from (name, dtype, shape, sha256 of the bytes) of each tensor."""
    tensors: Any = sorted([*row[:2], [*row[2]], row[3]] for row in rows)
    what = tensors if adapter is None else {"adapter": adapter.encoded(), "tensors": tensors}
    return hashlib.sha256(_canonical(what)).hexdigest()


def checksum_of(content: Mapping[str, Any]) -> str:
    """The checksum of a manifest from all its other keys."""
    return hashlib.sha256(_canonical(content)).hexdigest()


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode("ascii")


def directory_name(version: Version) -> str:
    return f"version-{version:08d}"


def version_of(name: str) -> Version | None:
    """The version whose directory has this name, if it is such a name."""
    match = _DIRECTORY.fullmatch(name)
    return int(match[1]) if match and directory_name(int(match[1])) == name else None


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a version's directory, which must bear the name of that version."""
    path = directory / FILE_NAME
    name = os.path.basename(os.path.realpath(directory))
    version = version_of(name)
    if version is None:
        raise WeightsError(
            f"not the directory of a version: `{directory}`. "
            f"Give one that a weight store wrote, such as `{directory_name(7)}`."
        )
    manifest = decode(disk.read_small(path, MAX_BYTES), f"`{path}`")
    if manifest.version != version:
        raise WeightsError(
            f"`{path}` belongs to version {manifest.version}, not to {version}. "
            f"Publish version {version} again."
        )
    return manifest


def decode(raw: bytes, where: str) -> Manifest:
    """The manifest that these bytes spell, or a refusal that names the entry."""
    content = checks.json_object(raw, where)
    if "format" in content and content["format"] != FORMAT:
        raise WeightsError(
            f"{where} has the format {checks.shown(content['format'])}: this dora-rl reads "
            f"{FORMAT}. Run the dora-rl that published it."
        )
    checks.record(content, _KEYS | {_ADAPTER} & content.keys(), where)
    checks.number(content["format"], f"format in {where}")
    files = {
        checks.file_name(name, where): _file(value, f"file `{name}` in {where}")
        for name, value in checks.entries(content["files"], f"files in {where}").items()
    }
    tensors = {
        checks.tensor_name(name, where): _tensor(value, files, f"tensor `{name}` in {where}")
        for name, value in checks.entries(content["tensors"], f"tensors in {where}").items()
    }
    if empty := sorted(files.keys() - {tensor.file for tensor in tensors.values()}):
        raise WeightsError(f"file `{empty[0]}` in {where} has no tensor. Publish it again.")
    if not tensors:
        raise WeightsError(f"{where} has no tensors. Publish it again.")
    version = checks.number(content["version"], f"version in {where}")
    fingerprint = _fingerprint(content["fingerprint"], f"fingerprint in {where}")
    adapter = None
    if _ADAPTER in content:
        adapter = adapters.decode(content[_ADAPTER], f"adapter in {where}")
    manifest = Manifest(version, files, tensors, fingerprint, adapter)
    if content["digest"] != manifest.digest:
        raise WeightsError(
            f"digest in {where} does not match its tensors: {checks.shown(content['digest'])}. "
            "It was altered: publish this version again."
        )
    if raw != manifest.encode():
        raise WeightsError(
            f"checksum in {where} does not match: {checks.shown(content['checksum'])}. "
            "It was altered: publish this version again."
        )
    return manifest


def _file(value: Any, where: str) -> FileEntry:
    entry = checks.record(value, _FILE_KEYS, where)
    return FileEntry(
        bytes=checks.number(entry["bytes"], f"bytes of {where}"),
        sha256=checks.sha256(entry["sha256"], f"sha256 of {where}"),
    )


def _tensor(value: Any, files: Mapping[str, FileEntry], where: str) -> TensorEntry:
    entry = checks.record(value, _TENSOR_KEYS, where)
    file = checks.file_name(entry["file"], f"file of {where}")
    if file not in files:
        raise WeightsError(f"{where} is in a file that is not listed: `{file}`.")
    return TensorEntry(
        file=file,
        dtype=checks.dtype(entry["dtype"], where),
        shape=checks.shape(entry["shape"], where),
        sha256=checks.sha256(entry["sha256"], f"sha256 of {where}"),
    )


def _fingerprint(value: Any, where: str) -> Fingerprint | None:
    if value is None:
        return None
    entry = checks.record(value, _FINGERPRINT_KEYS, where)
    listed = {key: checks.items(entry[key], f"{key} of {where}") for key in ("tokens", "logprobs")}
    tokens = tuple(checks.number(token, f"a token of {where}") for token in listed["tokens"])
    logprobs = tuple(checks.logprob(number, where) for number in listed["logprobs"])
    if entry["dtype"] not in _PRODUCTS:
        raise WeightsError(
            f"dtype of {where} must be one of {', '.join(_PRODUCTS)}: "
            f"{checks.shown(entry['dtype'])}. Publish it again."
        )
    if len(logprobs) != len(tokens) - 1:
        raise WeightsError(
            f"{where} has {len(tokens)} tokens and {len(logprobs)} logprobs, not one less. "
            "Publish it again."
        )
    return Fingerprint(tokens, logprobs, entry["dtype"])
