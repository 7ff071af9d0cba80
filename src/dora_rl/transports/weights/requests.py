"""What a receiver and the sender of `process_group` tell each other, before and after the bytes.

    receiver -> sender   Request    a version, the copy of it that is here, and the newest copy
    sender -> receiver   Offer      the manifest, what comes, and where the group meets; or why not
    receiver -> sender   Done       all bytes are here

Over a connection on which each end has proven that it knows the token of the endpoint.
"""

import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias, TypeVar

import msgspec

from dora_rl.core.protocol.types import Version
from dora_rl.framing import Frames, frame
from dora_rl.transports.handshake import Address
from dora_rl.weights import disk
from dora_rl.weights.errors import WeightsError
from dora_rl.weights.manifest import MAX_BYTES
from dora_rl.weights.versions import PUBLISHING, hidden

ENDPOINT = "endpoint.json"
_MAX_ENDPOINT = 10_000
_LARGEST = 2 * MAX_BYTES
_READ = 1 << 16


class Endpoint(msgspec.Struct, frozen=True):
    """Where the sender of a store listens, and what proves that a process may ask."""

    host: str
    port: int
    token: str

    @property
    def address(self) -> Address:
        return Address(self.host, self.port)


class Request(msgspec.Struct, frozen=True, tag=True):
    version: Version
    held: str | None
    """The digest of the copy of this version, if there is one."""
    base: Version | None
    """The copy that deltas may lead from."""


class Offer(msgspec.Struct, frozen=True, tag=True):
    """With neither deltas nor files, the copy that is here is the version."""

    manifest: bytes = b""
    deltas: tuple[int, ...] = ()
    """Their sizes, in the order in which they are applied."""
    files: tuple[tuple[str, int], ...] = ()
    port: int = 0
    rank: int = 0
    size: int = 0
    refusal: str | None = None
    """Why nothing comes: to ask again is of no use."""


class Done(msgspec.Struct, frozen=True, tag=True):
    """The sender may let the group go."""


Said: TypeAlias = Request | Offer | Done
Kind = TypeVar("Kind", Request, Offer, Done)

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Said).decode


def tell(connection: socket.socket, said: Said) -> None:
    connection.sendall(frame(_encode(said)))


def hear(connection: socket.socket, kind: type[Kind], deadline: float) -> Kind:
    """The next message, which must be of this kind; an `OSError` if it does not come in time."""
    frames, found = Frames(_LARGEST), list[bytes]()
    try:
        while not found:
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            data = connection.recv(_READ)
            if not data:
                raise ConnectionError("the other end closed the connection")
            found = frames.feed(data)
        said = _decode(found[0])
    except (ValueError, msgspec.MsgspecError) as error:
        raise ConnectionError(f"the other end sent no message of ours: {error}") from None
    if not isinstance(said, kind):
        raise ConnectionError(f"the other end sent a {type(said).__name__} out of turn")
    return said


def write_endpoint(root: Path, endpoint: Endpoint) -> None:
    """For whoever may read the store's directory; the last sender's counts."""
    disk.make_root(root)
    partial = hidden(root, PUBLISHING)
    with disk.new_file(partial, durable=False, mode=0o400) as write:
        write(msgspec.json.encode(endpoint))
    disk.rename(partial, root / ENDPOINT)


def remove_endpoint(root: Path, endpoint: Endpoint) -> None:
    """Unless another sender has written its own."""
    with suppress(WeightsError):
        if read_endpoint(root) == endpoint:
            disk.remove_tree(root / ENDPOINT)


def read_endpoint(root: Path) -> Endpoint:
    path = root / ENDPOINT
    try:
        return msgspec.json.decode(disk.read_small(path, _MAX_ENDPOINT), type=Endpoint)
    except msgspec.MsgspecError as error:
        raise WeightsError(f"`{path}` is no endpoint: {error}. Start the trainer anew.") from None
