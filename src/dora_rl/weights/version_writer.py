"""Writing tensors as the files of a version: how they are split, and in one pass over them.

It writes into a directory that nobody sees yet; the store makes it visible.
"""

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from dora_rl.core.protocol.types import Version
from dora_rl.weights import checks, disk
from dora_rl.weights.adapter import CONFIG_FILE, TENSORS_FILE, Adapter
from dora_rl.weights.errors import WeightsError
from dora_rl.weights.fingerprint import Fingerprint
from dora_rl.weights.header import MAX_HEADER_BYTES, encode_head
from dora_rl.weights.manifest import FILE_NAME, MAX_BYTES, FileEntry, Manifest, TensorEntry
from dora_rl.weights.tensors import bytes_of, check_plain, dtype_name, ready


def check_tensors(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse what cannot be published and shows without reading a weight."""
    if not tensors:
        raise WeightsError("there is no tensor to publish. Give the policy's state.")
    for name, tensor in tensors.items():
        checks.tensor_name(name, "the policy")
        check_plain(name, tensor)


def write_version(
    directory: Path,
    version: Version,
    tensors: Mapping[str, torch.Tensor],
    max_file_bytes: int,
    fingerprint: Fingerprint | None = None,
    adapter: Adapter | None = None,
) -> Manifest:
    """Write the files and their manifest, each synced to the disk.

    An adapter's are those that PEFT writes.
    """
    files: dict[str, FileEntry] = {}
    entries: dict[str, TensorEntry] = {}
    for file, shard in shards(tensors, max_file_bytes, whole=adapter is not None).items():
        files[file], written = _write_file(directory / file, shard)
        entries |= written
    if adapter is not None:
        with disk.new_file(directory / CONFIG_FILE) as write:
            write(adapter.config())
    manifest = Manifest(version, files, entries, fingerprint, adapter)
    text = manifest.encode()
    _check_limit(len(text), MAX_BYTES, directory / FILE_NAME)
    with disk.new_file(directory / FILE_NAME) as write:
        write(text)
    return manifest


def shards(
    tensors: Mapping[str, torch.Tensor], max_file_bytes: int, *, whole: bool = False
) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of each file, by the name that transformers gives it; see `split`.

    Those of an adapter are in one file, `whole`, by PEFT's name.
    """
    if whole:
        (names,) = split(tensors, sum(tensor.nbytes for tensor in tensors.values()))
        return {TENSORS_FILE: {name: tensors[name] for name in names}}
    found = split(tensors, max_file_bytes)
    files = (
        "model.safetensors"
        if len(found) == 1
        else f"model-{number:05d}-of-{len(found):05d}.safetensors"
        for number in range(1, len(found) + 1)
    )
    return {
        file: {name: tensors[name] for name in names}
        for file, names in zip(files, found, strict=True)
    }


def split(tensors: Mapping[str, torch.Tensor], max_file_bytes: int) -> list[list[str]]:
    """The names of each file, in the order in which they are written.

    In order of name; a tensor larger than the limit has a file of its own. Within a file the
    wider dtypes come first, so that each tensor is aligned to its own width.
    """
    shards: list[list[str]] = []
    room = -1
    for name in sorted(tensors):
        if not shards or tensors[name].nbytes > room:
            shards.append([])
            room = max_file_bytes
        shards[-1].append(name)
        room -= tensors[name].nbytes
    return [sorted(names, key=lambda name: (-tensors[name].itemsize, name)) for names in shards]


def _write_file(
    path: Path, tensors: Mapping[str, torch.Tensor]
) -> tuple[FileEntry, dict[str, TensorEntry]]:
    head = encode_head((name, dtype_name(t), tuple(t.shape)) for name, t in tensors.items())
    _check_limit(len(head), MAX_HEADER_BYTES, path)
    whole = hashlib.sha256(head)
    size = len(head)
    entries = {}
    with ThreadPoolExecutor(1) as pool, disk.new_file(path) as write:
        write(head)
        for name, tensor in tensors.items():
            tensor = ready(name, tensor)
            data = bytes_of(tensor)
            # The second core hashes the file while this one writes and hashes the tensor.
            hashed = pool.submit(whole.update, data)
            write(data)
            sha256 = hashlib.sha256(data).hexdigest()
            hashed.result()
            size += len(data)
            entries[name] = TensorEntry(path.name, dtype_name(tensor), tuple(tensor.shape), sha256)
    return FileEntry(size, whole.hexdigest()), entries


def _check_limit(size: int, limit: int, path: Path) -> None:
    if size > limit:
        raise WeightsError(
            f"the tensors' names alone take {size} bytes in `{path}`; the limit is {limit}. "
            "Publish fewer tensors, or use a smaller `max_file_bytes`."
        )
