"""The transport `object_store`: instances pull a version from the object store of their cluster.

The publisher is the weight store, in files of one layer group each: the process beside the trainer
puts such a file when the first instance asks for it (`transports/objects/host.py`). A receiver has
copies on its own node. What does not come that way is mapped from the store, as in `directory`, and
a warning says so: every node has the run directory, since trajectories go through it.
"""

import logging
import time
from pathlib import Path

from dora_rl.core.protocol.types import Version
from dora_rl.transports.errors import ObjectStoreError
from dora_rl.transports.objects.host import Offer
from dora_rl.transports.objects.link import ObjectLink
from dora_rl.transports.weights import Traffic
from dora_rl.transports.weights.shared_directory import WeightStore
from dora_rl.transports.weights.version_cache import VersionCache
from dora_rl.weights import disk
from dora_rl.weights.errors import WeightsError
from dora_rl.weights.manifest import Manifest, decode
from dora_rl.weights.versions import hidden

LAYER_GROUP_BYTES = 128 << 20  # of one object: large enough that asking for it costs nothing
_DELTA = ".delta-"

_log = logging.getLogger(__name__)


class ObjectReceiver:
    """An instance's end; `cache` is a directory of its own, on its own node."""

    def __init__(self, link: ObjectLink, root: Path, cache: Path, *, timeout_s: float) -> None:
        """`root` is the store of whole versions; `timeout_s` is for the object store."""
        self._link = link
        self._store = WeightStore(root)
        self._cache = VersionCache(cache)
        self._timeout_s = timeout_s
        self.traffic = Traffic()

    def receive(self, version: Version) -> Path:
        try:
            return self._by_objects(version, time.monotonic() + self._timeout_s)
        except (ObjectStoreError, WeightsError) as error:
            return self._from_store(version, error)

    def release(self, version: Version) -> None:
        self._cache.release(version)

    def close(self) -> None:
        self._cache.close()

    def _by_objects(self, version: Version, deadline: float) -> Path:
        base = self._cache.newest
        offer, manifest = self._find(version, base, deadline)
        here = self._cache.get(manifest)
        if here is not None:
            return here
        if offer.deltas and base is not None:
            try:
                return self._by_deltas(manifest, base, offer.deltas, deadline)
            except (ObjectStoreError, WeightsError) as error:
                _log.warning("version %d is received whole: %s", version, error)
                offer, manifest = self._find(version, None, deadline)
        return self._whole(manifest, offer.files, deadline)

    def _find(
        self, version: Version, base: Manifest | None, deadline: float
    ) -> tuple[Offer, Manifest]:
        offer = self._link.find(version, None if base is None else base.version, _left(deadline))
        manifest = decode(offer.manifest, f"version {version} from the object store")
        if manifest.version != version:
            raise WeightsError(f"version {manifest.version} was offered for {version}.")
        return offer, manifest

    def _by_deltas(
        self, manifest: Manifest, base: Manifest, names: tuple[str, ...], deadline: float
    ) -> Path:
        paths = [hidden(self._cache.root, _DELTA) for _ in names]
        try:
            self._link.fetch(dict(zip(names, paths, strict=True)), _left(deadline))
            changes = [disk.read_small(path, manifest.num_bytes) for path in paths]
        finally:
            for path in paths:
                disk.remove_tree(path)
        path = self._cache.add_by_deltas(manifest, base, changes, f"`{names[-1]}`")
        self.traffic.count(manifest, sum(map(len, changes)))
        return path

    def _whole(self, manifest: Manifest, names: tuple[str, ...], deadline: float) -> Path:
        by_file = {name.rpartition("/")[2]: name for name in names}
        if by_file.keys() != manifest.files.keys():
            raise WeightsError(
                f"version {manifest.version} comes with other files than its manifest has."
            )

        def write(directory: Path) -> None:
            files = {name: directory / file for file, name in by_file.items()}
            self._link.fetch(files, _left(deadline))

        path = self._cache.fill(manifest, write)
        self.traffic.count(manifest)
        return path

    def _from_store(self, version: Version, error: Exception) -> Path:
        try:
            manifest = self._store.manifest(version)
        except WeightsError as missing:
            raise WeightsError(f"{missing} Nor does it come by objects: {error}") from error
        _log.warning("version %d is mapped from the run directory: %s", version, error)
        self.traffic.count(manifest)
        self.traffic.fallbacks += 1
        return self._store.path(version)


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
