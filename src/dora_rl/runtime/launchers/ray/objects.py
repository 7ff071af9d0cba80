"""Ray's object store behind the protocols of `transports.objects`, and an actor's part in it.

An object belongs to the actor that has put it, and goes with that: what its receivers do then is
the transport's to know. The driver has handles of actors alone: no object is its own, and none
passes through its process.
"""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import numpy as np
import ray
from ray.exceptions import (
    GetTimeoutError,
    ObjectStoreFullError,
    OutOfDiskError,
    RayActorError,
    RayError,
)

from dora_rl.core.protocol.errors import UserError
from dora_rl.core.protocol.types import Version
from dora_rl.runtime.launchers.local.site import Site
from dora_rl.transports.errors import ObjectStoreError
from dora_rl.transports.objects.gateway import Gateway
from dora_rl.transports.objects.host import ObjectHost
from dora_rl.transports.objects.scratch import Scratch
from dora_rl.transports.objects.store import Data, Peer, Pending

T = TypeVar("T")
PEERS = {"peers": 4}  # threads of an actor for calls of other actors
_LONGEST_WORDS = 300  # characters of what Ray says of a failure


class RayStore:
    """The object store of the cluster that this process belongs to."""

    def put(self, data: Data) -> Any:
        return _named("put an object", lambda: ray.put(np.frombuffer(data, np.uint8)))

    def get(self, reference: Any, timeout_s: float) -> memoryview:
        found = _named("get an object", lambda: ray.get(reference, timeout=timeout_s), timeout_s)
        return memoryview(found)


class RayPeer:
    """Another actor, by its handle."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._store = RayStore()

    def describe(self, version: Version, base: Version | None, timeout_s: float) -> bytes:
        answer = self._actor.describe.remote(version, base)
        return bytes(_named("get an object", lambda: ray.get(answer, timeout=timeout_s), timeout_s))

    def version_object(self, name: str) -> Pending:
        return partial(self._resolved, self._actor.version_object.remote(name))

    def lent(self, key: str) -> Pending:
        return partial(self._resolved, self._actor.take.remote(key))

    def discard(self, key: str) -> None:
        self._actor.discard.remote(key)

    def _resolved(self, answer: Any, timeout_s: float) -> memoryview:
        """Of an answer that holds a reference: what is large does not come with it."""
        (reference,) = _named(
            "get an object", lambda: ray.get(answer, timeout=timeout_s), timeout_s
        )
        return self._store.get(reference, timeout_s)


class ObjectActor:
    """What actors ask of each other; the base of the actor of a worker."""

    def __init__(self) -> None:
        self._host: ObjectHost | None = None
        self._gateway: Gateway | None = None
        self._scratch: Scratch | None = None

    @contextmanager
    def _linked(self, site: Site, wanted: bool) -> Iterator[Site]:
        """The site of a worker that is started inside, with its way to the object store.

        Versions are offered in any case, to whoever asks.
        """
        self._host = ObjectHost(RayStore(), site.weights)
        if not wanted:
            yield site
            return
        ours, theirs = socket.socketpair()
        self._gateway = Gateway(ours, self._host)
        self._scratch = Scratch()
        with theirs:
            yield site._replace(objects=theirs.fileno(), scratch=str(self._scratch.path))

    def _introduce(self, peers: dict[str, Any]) -> None:
        if self._gateway is not None:
            found: dict[str, Peer | None] = {
                key: None if actor is None else RayPeer(actor) for key, actor in peers.items()
            }
            self._gateway.introduce(found)

    def _close_objects(self) -> None:
        """The worker has ended: what was on this node for it alone goes."""
        if self._scratch is not None:
            self._scratch.close()

    @property
    def _objects(self) -> ObjectHost:
        if self._host is None:
            raise ObjectStoreError("the actor that was asked has no objects.")
        return self._host

    @ray.method(concurrency_group="peers")
    def describe(self, version: Version, base: Version | None) -> bytes:
        return self._objects.describe(version, base)

    @ray.method(concurrency_group="peers")
    def version_object(self, name: str) -> list[Any]:
        """In a list, so that it is the reference that travels."""
        return [self._objects.version_object(name)]

    @ray.method(concurrency_group="peers")
    def take(self, key: str) -> list[Any]:
        return [self._objects.take(key)]

    @ray.method(concurrency_group="peers")
    def discard(self, key: str) -> None:
        self._objects.discard(key)

    @ray.method(concurrency_group="peers")
    def retire(self, version: Version) -> None:
        self._objects.retire(version)


def _named(doing: str, call: Callable[[], T], timeout_s: float | None = None) -> T:
    """What goes wrong with Ray, or in another actor, as an error of ours in one line."""
    try:
        return call()
    except GetTimeoutError:
        raise ObjectStoreError(f"an object has not come within {timeout_s:.3g} s.") from None
    except (ObjectStoreFullError, OutOfDiskError) as error:
        raise ObjectStoreError(
            "the object store of the node is full, and its disk takes no more of it. Start nodes "
            "with a larger --object-store-memory, or free their disks."
        ) from error
    except RayActorError as error:
        raise ObjectStoreError(f"whoever has the object is gone: {_words(error)}") from error
    except RayError as error:
        cause = getattr(error, "cause", None)  # what the other actor has raised
        said = str(cause) if isinstance(cause, UserError) else f"cannot {doing}: {_words(error)}"
        raise ObjectStoreError(said) from error


def _words(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:_LONGEST_WORDS]
