"""What the process beside a worker has for others: the versions of a weight store, and KV.

A file of a version is put into the object store when it is first asked for, and once: whoever asks
next gets the same reference. The reference that is held here is the lease of the object, until the
version retires. Free of torch.
"""

import os
import threading
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from dora_rl.core.protocol.types import Version
from dora_rl.transports.errors import ObjectStoreError
from dora_rl.transports.objects.store import Data, ObjectStore, Pending
from dora_rl.weights import disk
from dora_rl.weights.errors import WeightsError
from dora_rl.weights.manifest import read_manifest
from dora_rl.weights.versions import delta_route, path_of

_Identity: TypeAlias = tuple[int, int, int]


class Offer(msgspec.Struct, frozen=True):
    """What a version consists of, and the objects that whoever asked for it needs."""

    manifest: bytes
    files: tuple[str, ...] = ()
    """Of the whole version, in the order of `Manifest.files`."""
    deltas: tuple[str, ...] = ()
    """Instead, where they lead from the base that was named, in the order of their use."""


class ObjectHost:
    """Life cycle: `describe` a version, then its objects by name, until it is retired."""

    def __init__(self, store: ObjectStore, weights: Path) -> None:
        """`weights` is the store of whole versions."""
        self._store = store
        self._weights = weights
        self._lock = threading.Lock()  # several ask at once, and one of them puts
        self._offered: dict[str, tuple[Version, Path]] = {}
        self._held: dict[str, tuple[_Identity, Any]] = {}
        self._lent: dict[str, Any] = {}

    # Versions

    def describe(self, version: Version, base: Version | None) -> bytes:
        """An encoded `Offer`; a `WeightsError` if the version is not published."""
        directory = path_of(self._weights, version)
        if not disk.exists(directory):
            raise WeightsError(f"version {version} is not in `{self._weights}`.")
        manifest = read_manifest(directory)
        route = None if base is None else delta_route(self._weights, base, manifest)
        paths = route or [directory / file for file in manifest.files]
        names = tuple(str(path.relative_to(self._weights)) for path in paths)
        with self._lock:
            self._offered |= {n: (version, path) for n, path in zip(names, paths, strict=True)}
        offer = Offer(manifest.encode(), () if route else names, names if route else ())
        return msgspec.msgpack.encode(offer)

    def version_object(self, name: str) -> Any:
        """The reference to a file that was offered; it is put, unless it has been."""
        with self._lock:
            if name not in self._offered:
                raise ObjectStoreError(f"`{name}` is of no version that was asked for.")
            _, path = self._offered[name]
            identity = _identity(path)
            held = self._held.get(name)
            if held is None or held[0] != identity:  # else the number was given to other weights
                held = self._held[name] = identity, self._store.put(disk.map_file(path) or b"")
            return held[1]

    def retire(self, version: Version) -> None:
        """Let go of its objects. Unknown: does nothing."""
        with self._lock:
            gone = [name for name, (of, _) in self._offered.items() if of == version]
            for name in gone:
                del self._offered[name]
                self._held.pop(name, None)

    # KV

    def lend(self, key: str, data: Data) -> None:
        self._lent[key] = self._store.put(data)

    def take(self, key: str) -> Any:
        """The reference to what was lent, once."""
        try:
            return self._lent.pop(key)
        except KeyError:
            raise ObjectStoreError(f"`{key}` is not there.") from None

    def discard(self, key: str) -> None:
        self._lent.pop(key, None)


class LocalPeer:
    """A host of this very process, as a peer: a fake for tests."""

    def __init__(self, host: ObjectHost, store: ObjectStore) -> None:
        self._host = host
        self._store = store

    def describe(self, version: Version, base: Version | None, timeout_s: float) -> bytes:
        return self._host.describe(version, base)

    def version_object(self, name: str) -> Pending:
        return lambda timeout_s: self._store.get(self._host.version_object(name), timeout_s)

    def lent(self, key: str) -> Pending:
        return lambda timeout_s: self._store.get(self._host.take(key), timeout_s)

    def discard(self, key: str) -> None:
        self._host.discard(key)


def _identity(path: Path) -> _Identity:
    """Which file it is: published ones do not change."""
    try:
        found = os.stat(path)
    except OSError as error:
        raise WeightsError(f"`{path}` is gone: {error.strerror}.") from error
    return found.st_ino, found.st_mtime_ns, found.st_size
