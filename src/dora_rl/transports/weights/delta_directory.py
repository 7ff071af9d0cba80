"""The transport `directory` with deltas: for a file system whose bytes are worth saving.

The publisher writes into the store, beside each version, what changed since the one before. A
receiver keeps a copy of the last version on its own machine, and reads the manifest and the deltas.
"""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from dora_rl.core.protocol.types import Version
from dora_rl.transports.weights import Traffic, delta_files
from dora_rl.transports.weights.shared_directory import WeightStore
from dora_rl.transports.weights.version_cache import VersionCache, Write
from dora_rl.weights import disk
from dora_rl.weights.adapter import Adapter
from dora_rl.weights.errors import WeightsError
from dora_rl.weights.fingerprint import Fingerprint
from dora_rl.weights.manifest import Manifest
from dora_rl.weights.versions import delta_route

_log = logging.getLogger(__name__)


class DeltaPublisher:
    """The trainer's end."""

    def __init__(self, store: WeightStore) -> None:
        self._store = store

    @property
    def root(self) -> Path:
        return self._store.root

    def publish(
        self,
        version: Version,
        tensors: Mapping[str, torch.Tensor],
        *,
        fingerprint: Fingerprint | None = None,
        adapter: Adapter | None = None,
    ) -> Manifest:
        manifest = self._store.publish(version, tensors, fingerprint=fingerprint, adapter=adapter)
        delta_files.offer(self.root, manifest)
        return manifest

    def close(self) -> None:
        """There is nothing to end."""


class DeltaReceiver:
    """An instance's end; `cache` is a directory of its own, on its own machine."""

    def __init__(self, root: Path, cache: Path) -> None:
        self._store = WeightStore(root)
        self._cache = VersionCache(cache)
        self.traffic = Traffic()

    def receive(self, version: Version) -> Path:
        manifest = self._store.manifest(version)
        here = self._cache.get(manifest)
        if here is not None:
            return here
        try:
            path = self._by_deltas(manifest)
        except WeightsError as error:
            _log.warning("version %d is received whole: %s", version, error)
            path = None
        return path or self._whole(manifest)

    def release(self, version: Version) -> None:
        self._cache.release(version)

    def close(self) -> None:
        self._cache.close()

    def _by_deltas(self, manifest: Manifest) -> Path | None:
        base = self._cache.newest
        route = base and delta_route(self._store.root, base.version, manifest)
        if not base or not route:
            return None
        changes = [delta_files.read(path, manifest) for path in route]
        path = self._cache.add_by_deltas(manifest, base, changes, f"`{route[-1]}`")
        self.traffic.count(manifest, sum(map(len, changes)))
        return path

    def _whole(self, manifest: Manifest) -> Path:
        directory = self._store.path(manifest.version)

        def of(file: str) -> Callable[[Write], None]:
            return lambda append: append(memoryview(disk.map_file(directory / file) or b""))

        path = self._cache.add(manifest, {file: of(file) for file in manifest.files})
        self.traffic.count(manifest)
        return path
