"""What is asked of a cluster's object store, and of the others who have put something into it."""

import mmap
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

from dora_rl.core.protocol.types import Version
from dora_rl.transports.errors import ObjectStoreError

Data: TypeAlias = bytes | memoryview | mmap.mmap
Pending: TypeAlias = Callable[[float], memoryview]
"""Bytes that were asked for: waits so many seconds for them, else an `ObjectStoreError`."""


class ObjectStore(Protocol):
    """Every failure is an `ObjectStoreError`, in bounded time."""

    def put(self, data: Data) -> Any:
        """A reference to a copy, which is there for as long as anyone holds one."""

    def get(self, reference: Any, timeout_s: float) -> memoryview:
        """Without a copy where the object is on this node."""


class Peer(Protocol):
    """The host of another worker, wherever it is. Failures are as those of a store."""

    def describe(self, version: Version, base: Version | None, timeout_s: float) -> bytes:
        """What `host.ObjectHost.describe` says there."""

    def version_object(self, name: str) -> Pending:
        """Ask for a file of a version; several may be asked for before the first has come."""

    def lent(self, key: str) -> Pending:
        """Ask for what was lent under this key; it is there once."""

    def discard(self, key: str) -> None:
        """Nobody will ask for it; does not wait."""


class MemoryStore:
    """A store within one process: a fake for tests. With `capacity`, it can be full."""

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity
        self.puts = 0
        self.used = 0

    def put(self, data: Data) -> "_Object":
        copy = bytes(data)
        if self.capacity is not None and self.used + len(copy) > self.capacity:
            raise ObjectStoreError(f"the object store is full: {self.capacity} bytes.")
        self.puts += 1
        self.used += len(copy)
        return _Object(copy, self)

    def get(self, reference: "_Object", timeout_s: float) -> memoryview:
        return memoryview(reference.data)


class _Object:
    """A reference: with the last one, the object goes."""

    def __init__(self, data: bytes, store: MemoryStore) -> None:
        self.data = data
        self._store = store

    def __del__(self) -> None:
        self._store.used -= len(self.data)
