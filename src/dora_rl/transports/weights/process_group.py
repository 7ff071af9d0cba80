"""The transport `process_group`: the trainer broadcasts a version to the receivers that ask for it.

Requests that come together and ask alike are served together, by a group that is made for them.
So a receiver may join at any time, and one that dies costs the others a repetition. Every wait
ends: a receiver tries again, at the endpoint that the store then names, until its time is up.
"""

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from pathlib import Path

import torch

from dora_rl.core.protocol.types import Version
from dora_rl.transports.handshake import LOOPBACK, Listener, connect
from dora_rl.transports.weights import Traffic, WeightPublisher
from dora_rl.transports.weights.broadcast import Group, check_backend, connect_store, open_store
from dora_rl.transports.weights.requests import (
    Done,
    Endpoint,
    Offer,
    Request,
    hear,
    read_endpoint,
    remove_endpoint,
    tell,
    write_endpoint,
)
from dora_rl.transports.weights.shared_directory import WeightStore
from dora_rl.transports.weights.version_cache import VersionCache, Write
from dora_rl.weights import disk
from dora_rl.weights.adapter import Adapter
from dora_rl.weights.errors import WeightsError
from dora_rl.weights.fingerprint import Fingerprint
from dora_rl.weights.manifest import Manifest, decode
from dora_rl.weights.versions import delta_route

_POLL_S = 0.2  # between two looks at whether to end
_TOGETHER_S = 0.03  # after a request, for others that ask for the same
_ASK_S = 5.0  # for a request to come, once its process is known
_RETRY_S = 0.2  # between two attempts of a receiver
_BROKEN = (OSError, RuntimeError)  # of sockets, and of torch.distributed

_log = logging.getLogger(__name__)


class GroupPublisher:
    """The trainer's end: what another one publishes is sent by a thread, to whoever asks."""

    def __init__(self, inner: WeightPublisher, *, backend: str, timeout_s: float) -> None:
        check_backend(backend)
        self._inner = inner
        self._backend = backend
        self._timeout_s = timeout_s
        self._store = WeightStore(inner.root)
        token = secrets.token_hex(32)
        self._listener = Listener(LOOPBACK, token)
        self._endpoint = Endpoint(*self._listener.address, token)
        write_endpoint(inner.root, self._endpoint)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="weights", daemon=True)
        self._thread.start()

    @property
    def root(self) -> Path:
        return self._inner.root

    def publish(
        self,
        version: Version,
        tensors: Mapping[str, torch.Tensor],
        *,
        fingerprint: Fingerprint | None = None,
        adapter: Adapter | None = None,
    ) -> Manifest:
        return self._inner.publish(version, tensors, fingerprint=fingerprint, adapter=adapter)

    def close(self) -> None:
        """A transfer that is under way ends first."""
        self._closed.set()
        self._thread.join(self._timeout_s)
        self._listener.close()
        remove_endpoint(self.root, self._endpoint)
        self._inner.close()

    def _serve(self) -> None:
        while not self._closed.is_set():
            asked = self._gather()
            for request in dict.fromkeys(request for request, _ in asked):
                alike = [connection for other, connection in asked if other == request]
                try:
                    self._answer(request, alike)
                except WeightsError as error:
                    for connection in alike:
                        with suppress(OSError):
                            tell(connection, Offer(refusal=str(error)))
                except _BROKEN as error:
                    _log.warning("version %d: a transfer failed: %s", request.version, error)
                finally:
                    for connection in alike:
                        connection.close()

    def _gather(self) -> list[tuple[Request, socket.socket]]:
        """Requests until none comes for a moment."""
        asked: list[tuple[Request, socket.socket]] = []
        while not self._closed.is_set():
            connection = self._listener.accept(_TOGETHER_S if asked else _POLL_S)
            if connection is None:
                return asked
            try:
                request = hear(connection, Request, time.monotonic() + _ASK_S)
                asked.append((request, connection))
            except OSError as error:
                _log.warning("a receiver did not say what it wants: %s", error)
                connection.close()
        return asked

    def _answer(self, request: Request, receivers: list[socket.socket]) -> None:
        manifest = self._store.manifest(request.version)
        if request.held == manifest.digest:
            for connection in receivers:
                tell(connection, Offer(manifest.encode()))
            return
        route = self._route(request, manifest)
        names = sorted(manifest.files)
        directory = self._store.path(request.version)
        # Mapped before anyone is told: what is deleted from now on is still sent.
        mapped = [disk.map_file(path) for path in route or [directory / name for name in names]]
        sizes = [0 if data is None else len(data) for data in mapped]
        size = len(receivers) + 1
        store, port = open_store(size, self._timeout_s)
        for rank, connection in enumerate(receivers, start=1):
            deltas = tuple(sizes) if route else ()
            files = () if route else tuple(zip(names, sizes, strict=True))
            tell(connection, Offer(manifest.encode(), deltas, files, port, rank, size))
        group = Group(store, 0, size, self._backend, self._timeout_s)
        for data in mapped:
            group.send(data)
        deadline = time.monotonic() + self._timeout_s
        for connection in receivers:
            hear(connection, Done, deadline)

    def _route(self, request: Request, manifest: Manifest) -> list[Path] | None:
        """The deltas from what the receivers have, if they have the weights of that version."""
        if request.base is None:
            return None
        try:
            return delta_route(self.root, request.base, manifest)
        except WeightsError:
            return None  # one of them has just gone


class GroupReceiver:
    """An instance's end; `cache` is a directory of its own, on its own machine."""

    def __init__(self, root: Path, cache: Path, *, backend: str, timeout_s: float) -> None:
        check_backend(backend)
        self._root = Path(root)
        self._backend = backend
        self._timeout_s = timeout_s
        self._cache = VersionCache(cache)
        self.traffic = Traffic()

    def receive(self, version: Version) -> Path:
        deadline = time.monotonic() + self._timeout_s
        base = self._cache.newest
        while True:
            try:
                return self._attempt(version, base, deadline)
            except _Refused as error:
                raise WeightsError(str(error)) from None
            except WeightsError as error:
                if base is None:
                    raise
                _log.warning("version %d is received whole: %s", version, error)
                base = None
            except _BROKEN as error:
                if time.monotonic() + _RETRY_S >= deadline:
                    raise WeightsError(
                        f"version {version} did not arrive within {self._timeout_s:g} s: "
                        f"{error}. See whether the trainer runs, or raise "
                        "runtime.weights.timeout_s."
                    ) from error
                time.sleep(_RETRY_S)

    def release(self, version: Version) -> None:
        self._cache.release(version)

    def close(self) -> None:
        self._cache.close()

    def _attempt(self, version: Version, base: Manifest | None, deadline: float) -> Path:
        endpoint = self._endpoint()
        left = max(0.01, deadline - time.monotonic())
        with closing(connect(endpoint.address, endpoint.token, left, wait=False)) as connection:
            tell(connection, self._request(version, base))
            offer = hear(connection, Offer, deadline)
            if offer.refusal is not None:
                raise _Refused(offer.refusal)
            manifest = decode(offer.manifest, f"version {version} from `{endpoint.address}`")
            here = self._cache.get(manifest)
            if here is not None:
                return here
            if not offer.size:
                raise ConnectionError("the copy here was damaged")  # it is gone: ask again
            return self._take(manifest, offer, base, connection, deadline)

    def _endpoint(self) -> Endpoint:
        try:
            return read_endpoint(self._root)
        except WeightsError as error:
            raise ConnectionError(str(error)) from None  # the trainer may be about to write it

    def _request(self, version: Version, base: Manifest | None) -> Request:
        held = self._cache.digest(version)
        return Request(version, held, None if base is None else base.version)

    def _take(
        self,
        manifest: Manifest,
        offer: Offer,
        base: Manifest | None,
        connection: socket.socket,
        deadline: float,
    ) -> Path:
        left = max(0.01, deadline - time.monotonic())
        store = connect_store(offer.port, offer.size, left)
        group = Group(store, offer.rank, offer.size, self._backend, left)
        where = f"version {manifest.version}"
        if offer.deltas:
            _check_sizes(offer.deltas, manifest)
            changes = [b"".join(group.receive(size)) for size in offer.deltas]
            tell(connection, Done())
            assert base is not None, "asked for"
            path = self._cache.add_by_deltas(manifest, base, changes, where)
            self.traffic.count(manifest, sum(offer.deltas))
            return path
        if {name for name, _ in offer.files} != manifest.files.keys():
            raise WeightsError(f"{where} comes with other files than its manifest has.")
        last = offer.files[-1][0]

        def of(name: str, size: int) -> Callable[[Write], None]:
            def write(append: Write) -> None:
                for piece in group.receive(size):
                    append(piece)
                if name == last:
                    tell(connection, Done())

            return write

        path = self._cache.add(manifest, {name: of(name, size) for name, size in offer.files})
        self.traffic.count(manifest)
        return path


class _Refused(Exception):
    """The sender has no such version: to ask again is of no use."""


def _check_sizes(sizes: tuple[int, ...], manifest: Manifest) -> None:
    if sum(sizes) > manifest.num_bytes:
        raise WeightsError(
            f"deltas of {sum(sizes)} bytes to version {manifest.version} are refused."
        )
