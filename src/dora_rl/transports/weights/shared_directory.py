"""The weight store: a directory with one directory for each version, complete or not there.

    version-00000007/   manifest.json and safetensors files, never changed; of an adapter, the
                        files of PEFT
    .lock               held while publishing; its holder sweeps what the dead left

A version appears by one rename, after all of it is on the disk, and disappears by one. As the
transport `directory`, receivers map its files: nothing is copied.
"""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch

from dora_rl.core.protocol.types import Version
from dora_rl.transports.weights import Traffic
from dora_rl.weights import disk
from dora_rl.weights.adapter import Adapter
from dora_rl.weights.errors import WeightsError
from dora_rl.weights.fingerprint import Fingerprint
from dora_rl.weights.huggingface import map_model
from dora_rl.weights.loading import LoadedWeights, open_version
from dora_rl.weights.manifest import Manifest, read_manifest
from dora_rl.weights.tensors import digests, ready, weights_digest
from dora_rl.weights.version_writer import check_tensors, write_version
from dora_rl.weights.versions import (
    DELETED,
    PUBLISHING,
    check_files,
    delete_version,
    hidden,
    path_of,
    published_versions,
    sweep,
)

__all__ = ["MAX_FILE_BYTES", "DirectoryReceiver", "LoadedWeights", "WeightStore", "open_version"]

MAX_FILE_BYTES = 5_000_000_000  # of one file; what Hugging Face long used
_LOCK_TIMEOUT_S = 600.0  # longer than a publication takes, short enough to be told of a hung one
_LOCK = ".lock"


class WeightStore:
    """Versions of one policy under `root`, for any number of processes."""

    def __init__(
        self,
        root: Path,
        *,
        lock_timeout_s: float = _LOCK_TIMEOUT_S,
        max_file_bytes: int = MAX_FILE_BYTES,
    ) -> None:
        """`max_file_bytes` is of what is published; a tensor that is larger has its own file."""
        self.root = Path(root)
        self._max_file_bytes = max_file_bytes
        self._lock_timeout_s = lock_timeout_s

    def path(self, version: Version) -> Path:
        """Where a version is, or would be."""
        return path_of(self.root, version)

    def versions(self) -> list[Version]:
        """The versions that are published, in order."""
        return published_versions(self.root)

    def manifest(self, version: Version) -> Manifest:
        """What a version consists of, by its manifest; the files are not looked at."""
        self._check_published(version)
        return read_manifest(self.path(version))

    def load(self, version: Version) -> LoadedWeights:
        """A version in memory, checked: see `open_version`."""
        self._check_published(version)
        return open_version(self.path(version))

    def verify(self, version: Version) -> Manifest:
        """Check all that `load` checks, and the sha256 of each whole file."""
        self.load(version)
        return check_files(self.path(version))

    def publish(
        self,
        version: Version,
        tensors: Mapping[str, torch.Tensor],
        *,
        fingerprint: Fingerprint | None = None,
        adapter: Adapter | None = None,
        max_file_bytes: int | None = None,
    ) -> Manifest:
        """Write a version and make it visible, whole and on the disk, or not at all.

        With `adapter`, the tensors are those of a LoRA adapter, by PEFT's names.

        The same weights again change nothing; other weights under a published version are
        refused. The tensors must not change meanwhile. Each name gets bytes of its own:
        leave out a name that the model ties to another.
        """
        target = self.path(version)
        if max_file_bytes is None:
            max_file_bytes = self._max_file_bytes
        if max_file_bytes < 1:
            raise WeightsError(f"max_file_bytes must be >= 1: `{max_file_bytes}`.")
        check_tensors(tensors)
        disk.make_root(self.root)
        with disk.locked(self.root / _LOCK, self._lock_timeout_s):
            sweep(self.root, PUBLISHING, DELETED)
            if disk.exists(target):
                return self._same(version, tensors, adapter)
            return self._write(version, tensors, max_file_bytes, fingerprint, adapter)

    def publish_directory(
        self, version: Version, directory: Path, *, max_file_bytes: int | None = None
    ) -> Manifest:
        """Publish the weights of a Hugging Face model directory; see `publish`."""
        tensors = map_model(Path(directory))
        return self.publish(version, tensors, max_file_bytes=max_file_bytes)

    def delete(self, version: Version) -> None:
        """Free a version's storage. Unknown: does nothing.

        Only for whoever counts the leases of versions: the store does not know who still
        needs one. What has it in memory keeps it; nobody else can open it any more.
        """
        delete_version(self.root, version)

    def close(self) -> None:
        """As the trainer's end of a transport: there is nothing to end."""

    def _write(
        self,
        version: Version,
        tensors: Mapping[str, torch.Tensor],
        max_file_bytes: int,
        fingerprint: Fingerprint | None,
        adapter: Adapter | None,
    ) -> Manifest:
        partial, target = hidden(self.root, PUBLISHING), self.path(version)
        try:
            disk.make_directory(partial)
            manifest = write_version(
                partial, version, tensors, max_file_bytes, fingerprint, adapter
            )
            disk.sync_directory(partial)
            disk.rename(partial, target)
            disk.sync_directory(self.root)
        except BaseException:
            # What cannot be removed now stays hidden, and the next publication sweeps it.
            with suppress(WeightsError):
                if not disk.exists(partial) and disk.exists(target):
                    disk.rename(target, partial)  # not known to be on the disk: not published
                disk.remove_tree(partial)
            raise
        return manifest

    def _same(
        self, version: Version, tensors: Mapping[str, torch.Tensor], adapter: Adapter | None
    ) -> Manifest:
        """The manifest of a published version, if these are its weights and it is sound."""
        manifest = read_manifest(self.path(version))
        digest = weights_digest(tensors, digests(tensors, ready), adapter)
        if digest != manifest.digest:
            raise WeightsError(
                f"version {version} is published with other weights: `{self.path(version)}` "
                f"has the digest `{manifest.digest}`, these have `{digest}`. Use a new version."
            )
        open_version(self.path(version))
        disk.sync_directory(self.root)  # whoever published it may have died before
        return manifest

    def _check_published(self, version: Version) -> None:
        if not disk.exists(self.path(version)):
            found = ", ".join(map(str, self.versions()[-5:])) or "none"
            raise WeightsError(
                f"version {version} is not in `{self.root}`. The last ones there: {found}."
            )


class DirectoryReceiver:
    """An instance's end: the files of the store themselves."""

    def __init__(self, root: Path) -> None:
        self._store = WeightStore(root)
        self.traffic = Traffic()

    def receive(self, version: Version) -> Path:
        self.traffic.count(self._store.manifest(version))
        return self._store.path(version)

    def release(self, version: Version) -> None:
        """The version goes when its last lease does."""

    def close(self) -> None:
        """There is nothing of its own."""
