"""The copies of versions that a receiver keeps: each whole, and compared with its digests.

    5f0c…/version-00000007/   as in the store; the directory above is one receiver's
    5f0c…/.incoming-…         what is being received

A receiver deletes what those before it left: of one instance, only the last is at work. The newest
copy is kept when it is released: the next version may come as a delta to it. Nothing here has to
survive a power failure: what is missing is received again.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from dora_rl.core.protocol.types import Version
from dora_rl.weights import delta as deltas
from dora_rl.weights import disk
from dora_rl.weights.adapter import CONFIG_FILE
from dora_rl.weights.errors import WeightsError
from dora_rl.weights.files import map_tensors
from dora_rl.weights.header import encode_head
from dora_rl.weights.loading import open_version
from dora_rl.weights.manifest import FILE_NAME, Manifest, directory_name, read_manifest
from dora_rl.weights.tensors import bytes_of, dtype_name
from dora_rl.weights.versions import hidden, path_of, published_versions, sweep

Write = Callable[[bytes | memoryview], None]
Content = Mapping[str, Callable[[Write], None]]
"""Of each file of a version, the function that writes its bytes."""

_INCOMING = ".incoming-"


class VersionCache:
    """The copies of one receiver, below a directory that is used by its predecessors alone."""

    def __init__(self, directory: Path) -> None:
        disk.make_root(directory)
        sweep(directory, "")
        self.root = hidden(directory, "")
        disk.make_directory(self.root)
        self._held: set[Version] = set()

    @property
    def newest(self) -> Manifest | None:
        """Of the copy that the next version may be a delta to."""
        versions = published_versions(self.root)
        return read_manifest(path_of(self.root, versions[-1])) if versions else None

    def digest(self, version: Version) -> str | None:
        """Of the copy of a version, if there is one, by its manifest."""
        path = path_of(self.root, version)
        return read_manifest(path).digest if disk.exists(path) else None

    def get(self, manifest: Manifest) -> Path | None:
        """The copy of this version, if there is one of these very weights."""
        path = path_of(self.root, manifest.version)
        if not disk.exists(path):
            return None
        try:
            same = open_version(path).manifest == manifest  # else the run went back: it is anew
        except WeightsError:
            same = False
        if not same:
            self._remove(manifest.version)
            return None
        self._held.add(manifest.version)
        return path

    def add(self, manifest: Manifest, content: Content) -> Path:
        """Write a version and compare it with its digests; a `WeightsError` leaves nothing."""
        return self.fill(manifest, lambda path: _write(path, content))

    def fill(self, manifest: Manifest, write: Callable[[Path], None]) -> Path:
        """The same; `write` makes the files of its tensors in an empty directory."""
        parent = hidden(self.root, _INCOMING)
        path, target = (
            parent / directory_name(manifest.version),
            path_of(self.root, manifest.version),
        )
        try:
            disk.make_directory(parent)
            disk.make_directory(path)
            write(path)
            _write_about(path, manifest)
            open_version(path)
            disk.rename(path, target)
        finally:
            shutil.rmtree(parent, ignore_errors=True)
        self._held.add(manifest.version)
        self._trim()
        return target

    def add_by_deltas(
        self, manifest: Manifest, base: Manifest, changes: Sequence[bytes], where: str
    ) -> Path:
        """The same, from a copy and what changed since, one delta after the other."""
        if _layout(base) != _layout(manifest):
            raise WeightsError(f"version {base.version} has other tensors than {where}.")
        tensors = map_copy(path_of(self.root, base.version), base)
        digest = base.digest
        for change in changes:
            link = deltas.link_of(change, where)
            if link.base_digest != digest:
                raise WeightsError(
                    f"{where} is a delta to the digest `{link.base_digest}`; the base here has "
                    f"`{digest}`. The whole version is needed."
                )
            deltas.apply(change, tensors, where)
            digest = link.digest
        return self.add(manifest, contents(manifest, tensors))

    def release(self, version: Version) -> None:
        self._held.discard(version)
        self._trim()

    def close(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)

    def _trim(self) -> None:
        for version in published_versions(self.root)[:-1]:
            if version not in self._held:
                self._remove(version)

    def _remove(self, version: Version) -> None:
        disk.remove_tree(path_of(self.root, version))


def map_copy(directory: Path, manifest: Manifest) -> dict[str, torch.Tensor]:
    """The tensors of a version as they are, unchecked; writing to one changes no file."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(manifest.files):
        tensors |= map_tensors(directory / file).tensors
    return tensors


def contents(manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> Content:
    """The files of a version from its tensors, as the store writes them."""

    def of(file: str) -> Callable[[Write], None]:
        names = [name for name, entry in manifest.tensors.items() if entry.file == file]
        mine = {n: tensors[n] for n in sorted(names, key=lambda n: (-tensors[n].itemsize, n))}

        def write(append: Write) -> None:
            append(encode_head((n, dtype_name(t), tuple(t.shape)) for n, t in mine.items()))
            for tensor in mine.values():
                append(bytes_of(tensor))

        return write

    return {file: of(file) for file in manifest.files}


def _write(path: Path, content: Content) -> None:
    for file, write in content.items():
        with disk.new_file(path / file, durable=False) as append:
            write(append)


def _write_about(path: Path, manifest: Manifest) -> None:
    if manifest.adapter is not None:
        with disk.new_file(path / CONFIG_FILE, durable=False) as append:
            append(manifest.adapter.config())
    with disk.new_file(path / FILE_NAME, durable=False) as append:
        append(manifest.encode())


def _layout(manifest: Manifest) -> dict[str, tuple[str, str, tuple[int, ...]]]:
    return {name: (t.file, t.dtype, t.shape) for name, t in manifest.tensors.items()}
