"""A worker's end of the way to the object store, and what it can ask for.

    worker -> gateway   Find      a version, and the copy that deltas may lead from
                        Fetch     objects of it, each into a new file
                        Lend      a file, under a key, for whoever asks this node for it
                        Take      what another has lent under a key, into a new file
                        Discard   what was lent under a key
    gateway -> worker   Answer    to the request of that number

The two share a node: files are named by their paths, and no byte of theirs goes over the socket.
"""

import socket
import time
from pathlib import Path
from typing import TypeAlias

import msgspec

from dora_rl.core.protocol.types import Version
from dora_rl.framing import Frames, frame
from dora_rl.transports.errors import ObjectStoreError
from dora_rl.transports.objects.host import Offer
from dora_rl.weights.manifest import MAX_BYTES

LARGEST = 2 * MAX_BYTES  # of a message: a manifest is the most that one holds
READ = 1 << 16
_GRACE_S = 5.0  # beyond its time, for a gateway to say that it is up


class Find(msgspec.Struct, frozen=True, tag=True):
    version: Version
    base: Version | None


class Fetch(msgspec.Struct, frozen=True, tag=True):
    files: tuple[tuple[str, str], ...]
    """Name of the object, path of the file."""


class Lend(msgspec.Struct, frozen=True, tag=True):
    key: str
    path: str


class Take(msgspec.Struct, frozen=True, tag=True):
    key: str
    path: str


class Discard(msgspec.Struct, frozen=True, tag=True):
    key: str


Asked: TypeAlias = Find | Fetch | Lend | Take | Discard


class Request(msgspec.Struct, frozen=True):
    number: int
    asked: Asked
    within_s: float


class Answer(msgspec.Struct, frozen=True):
    number: int
    offer: bytes = b""
    """To `Find`: an encoded `Offer`."""
    failure: str | None = None


class ObjectLink:
    """Asks, and waits for the answer; not thread-safe. Failures are `ObjectStoreError`s."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._frames = Frames(LARGEST)
        self._unread: list[bytes] = []
        self._number = 0

    def find(self, version: Version, base: Version | None, within_s: float) -> Offer:
        answer = self._ask(Find(version, base), within_s)
        return msgspec.msgpack.decode(answer.offer, type=Offer)

    def fetch(self, files: dict[str, Path], within_s: float) -> None:
        """Objects of the version that was found last, by name, each into a new file."""
        self._ask(Fetch(tuple((name, str(path)) for name, path in files.items())), within_s)

    def lend(self, key: str, path: Path, within_s: float) -> None:
        """The file may go when this returns."""
        self._ask(Lend(key, str(path)), within_s)

    def take(self, key: str, path: Path, within_s: float) -> None:
        self._ask(Take(key, str(path)), within_s)

    def discard(self, key: str, within_s: float) -> None:
        self._ask(Discard(key), within_s)

    def close(self) -> None:
        self._socket.close()

    def _ask(self, asked: Asked, within_s: float) -> Answer:
        self._number += 1
        deadline = time.monotonic() + within_s + _GRACE_S
        request = msgspec.msgpack.encode(Request(self._number, asked, max(0.0, within_s)))
        try:
            self._socket.settimeout(max(0.01, deadline - time.monotonic()))
            self._socket.sendall(frame(request))
            answer = self._hear(deadline)
            while answer.number != self._number:  # to one that was given up
                answer = self._hear(deadline)
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            raise ObjectStoreError(
                f"the process that puts and gets objects did not answer: {error}."
            ) from error
        if answer.failure is not None:
            raise ObjectStoreError(answer.failure)
        return answer

    def _hear(self, deadline: float) -> Answer:
        while not self._unread:
            self._socket.settimeout(max(0.01, deadline - time.monotonic()))
            data = self._socket.recv(READ)
            if not data:
                raise ConnectionError("it has ended")
            self._unread = self._frames.feed(data)
        return msgspec.msgpack.decode(self._unread.pop(0), type=Answer)
