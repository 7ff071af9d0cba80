"""The other end of a worker's link: asks its peers for objects, and writes them into files.

Requests are answered one after the other, each in bounded time; the end of the link is the end of
the gateway. A request that fails is answered with the reason, and the next one is served.
"""

import socket
import threading
import time
from pathlib import Path

import msgspec

from dora_rl.config.text import one_line
from dora_rl.framing import Frames, frame
from dora_rl.transports.errors import ObjectStoreError
from dora_rl.transports.objects.host import ObjectHost
from dora_rl.transports.objects.link import (
    LARGEST,
    READ,
    Answer,
    Asked,
    Discard,
    Fetch,
    Find,
    Lend,
    Request,
    Take,
)
from dora_rl.transports.objects.store import Peer, Pending
from dora_rl.weights import disk

WEIGHTS = "weights"  # whom to ask for versions; others are introduced by the key of what they lend
_REMEMBERED = 256  # introductions: a migration may never be asked for


class Gateway:
    """Serves one worker, on a thread of its own, until the worker is gone."""

    def __init__(self, sock: socket.socket, host: ObjectHost) -> None:
        """`host` has what this worker lends."""
        self._socket = sock
        self._host = host
        self._peers: dict[str, Peer | None] = {}
        threading.Thread(target=self._serve, name="objects", daemon=True).start()

    def introduce(self, peers: dict[str, Peer | None]) -> None:
        """Whom to ask from now on; None if there is nobody now."""
        for key, peer in peers.items():
            self._peers.pop(key, None)
            self._peers[key] = peer
        for key in [k for k in self._peers if k != WEIGHTS][:-_REMEMBERED]:
            del self._peers[key]

    def _serve(self) -> None:
        frames = Frames(LARGEST)
        with self._socket:
            while True:
                try:
                    data = self._socket.recv(READ)
                    for message in frames.feed(data) if data else ():
                        self._socket.sendall(frame(msgspec.msgpack.encode(self._answer(message))))
                except (OSError, ValueError, msgspec.MsgspecError):
                    return  # the worker is gone, or is none of ours
                if not data:
                    return

    def _answer(self, message: bytes) -> Answer:
        request = msgspec.msgpack.decode(message, type=Request)
        try:
            offer = self._perform(request.asked, time.monotonic() + request.within_s)
            return Answer(request.number, offer)
        except Exception as error:  # whatever it is, the worker is told, and goes another way
            return Answer(request.number, failure=one_line(error) or type(error).__name__)

    def _perform(self, asked: Asked, deadline: float) -> bytes:
        match asked:
            case Find():
                return self._peer(WEIGHTS).describe(asked.version, asked.base, _left(deadline))
            case Fetch():
                sender = self._peer(WEIGHTS)
                # All are asked for at once: the next is put while this one is written.
                coming = [(sender.version_object(name), path) for name, path in asked.files]
                while coming:
                    pending, path = coming.pop(0)
                    _write(path, pending, deadline)
            case Lend():
                self._host.lend(asked.key, disk.map_file(Path(asked.path)) or b"")
            case Take():
                _write(asked.path, self._peer(asked.key).lent(asked.key), deadline)
            case Discard():
                self._host.discard(asked.key)
                sender_of = self._peers.pop(asked.key, None)
                if sender_of is not None:
                    sender_of.discard(asked.key)
        return b""

    def _peer(self, key: str) -> Peer:
        peer = self._peers.get(key)
        if peer is None:
            raise ObjectStoreError(f"nobody is there who has the {key}.")
        return peer


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def _write(path: str, pending: Pending, deadline: float) -> None:
    with disk.new_file(Path(path), durable=False) as append:
        append(pending(_left(deadline)))
