"""The messages between driver, zygote and workers, and their framing.

Decoding runs no code; what does not fit the schema, or is too large, is refused.
"""

import hashlib
import hmac
from typing import Any, Literal

import msgspec

from dora_rl import framing

LARGEST = 64 << 20  # bytes of one message; a trajectory of a million tokens fits
KEY_BYTES = 32  # of what seals a worker's answers
_LONGEST = 1000  # characters of a failure that are kept: it goes into the journal


class UserFunction(msgspec.Struct, frozen=True, kw_only=True):
    """A reward or an environment: an import path, or in a forked zygote the object itself."""

    name: str
    function: Any
    weight: float = 1.0
    options: dict[str, Any] = {}


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker may use; `memory_mb` on top of what it starts with."""

    timeout_s: float = 10.0
    memory_mb: int = 1024
    network: bool = False
    writable: tuple[str, ...] = ()  # directories, besides its scratch directory
    hidden: tuple[str, ...] = ()  # directories that it does not see
    readable: tuple[str, ...] | None = None  # what it may open, besides those; None: all else


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """What a zygote's workers do.

    `service` is the import path of a function of ours, which makes a `zygote.Service` of this.
    """

    service: str
    functions: tuple[UserFunction, ...]
    limits: Limits
    import_path: tuple[str, ...] = ()  # directories with modules, besides the driver's own


class ZygoteSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The first message to a zygote that was started by name.

    Paths are bytes, as the system has them: they need not be text in any encoding.
    """

    program: Program
    driver: int  # its process id
    scratch: bytes  # a directory for what workers write
    path: list[bytes]
    environment_path: bytes | None  # PYTHONPATH, as the user had it


class Isolation(msgspec.Struct, frozen=True, kw_only=True):
    """How workers are isolated on this machine; the last value of each field means not at all."""

    network: Literal["namespace", "filter", "python", "open"] = "open"
    """Of its own, without a way out; no sockets by seccomp; Python's sockets alone refuse."""
    calls: Literal["filtered", "open"] = "open"
    """Sockets, unless they are allowed, and signals to everybody at once, by seccomp."""
    privileges: Literal["none", "inherited"] = "inherited"
    memory: Literal["limited", "unlimited"] = "unlimited"
    processes: Literal["apart", "shared"] = "shared"
    """A worker sees and signals its own alone, and they all end with it."""
    forks: Literal["limited", "unlimited"] = "unlimited"
    writes: Literal["scratch", "mounts", "anywhere"] = "anywhere"
    """Its own directory alone, by Landlock; or since all else is mounted read-only."""
    attributes: Literal["mounts", "filter", "open"] = "open"
    """Modes, owners and times of files that it may not write: by mounts that can only be read, or
    by seccomp, which refuses the calls everywhere."""
    private: Literal["hidden", "readable"] = "readable"
    """Where keys are in the home directory, and the run directory."""
    answers: Literal["own", "exposed"] = "exposed"
    """A program that a reward starts cannot trace its worker, read its memory, take its files."""
    driver: Literal["hidden", "readable"] = "readable"
    """The driver's environment, as the system shows it under /proc."""

    def gaps(self) -> list[str]:
        """What workers can access on this system, in words for a log."""
        words = {
            "the network, but for Python's own sockets": self.network == "python",
            "signals to all processes of the user at once (no seccomp)": self.calls == "open",
            "the user's privileges": self.privileges == "inherited",
            "unlimited memory": self.memory == "unlimited",
            "other processes of the user": self.processes == "shared",
            "any number of processes": self.forks == "unlimited",
            "files outside the scratch directory (no Landlock)": self.writes == "anywhere",
            "modes, owners and times of the user's files": self.attributes == "open",
            "keys in the home directory, and the run directory (to read it, and to lock what "
            "it can read)": self.private == "readable",
            "the worker itself, from programs that a reward starts (an answer that they forge "
            "on its channel is refused, but they can read its memory)": self.answers == "exposed",
            "the driver's environment variables": self.driver == "readable",
        }
        return [what for what, open_ in words.items() if open_]


class WorkerSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is told that is a fresh interpreter, and no fork of its zygote."""

    of_zygote: ZygoteSetup
    zygote: int  # its process id
    alone: bool  # the zygote left the machine's network
    promised: Isolation | None = None  # less is not enough; without it, it tells what it has


class Started(msgspec.Struct, frozen=True, tag=True):
    isolation: Isolation


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The user's code cannot be loaded."""

    why: str


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A worker is gone; `status` is its exit code, negative for a signal."""

    worker: int
    status: int


class Spawn(msgspec.Struct, frozen=True, tag=True):
    """Make a worker; its socket travels with the message."""

    worker: int


class Kill(msgspec.Struct, frozen=True, tag=True):
    worker: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The first word of a worker, before it has run the user's code on anything."""

    key: bytes  # seals its answers; it is on the channel this once


class Answer(msgspec.Struct, frozen=True, tag=True):
    number: int  # of the request that it answers, counted from 1 in each worker
    content: bytes
    seconds: float
    spent: bool  # it is not to be asked again
    seal: bytes = b""

    def sealed(self, key: bytes | bytearray) -> "Answer":
        return msgspec.structs.replace(self, seal=self._seal(key))

    def sealed_with(self, key: bytes) -> bool:
        """Whether it is from the worker, which alone has the key, and not from another process."""
        return hmac.compare_digest(self.seal, self._seal(key))

    def _seal(self, key: bytes | bytearray) -> bytes:
        unsealed = msgspec.structs.replace(self, seal=b"")
        return hashlib.blake2b(msgspec.msgpack.encode(unsealed), key=key, digest_size=32).digest()


Report = Started | Refused | Ended
Order = Spawn | Kill
Word = Ready | Answer


def clipped(failure: str) -> str:
    """What a worker says of a failure, as one line of bounded length."""
    line = " ".join(failure[: 4 * _LONGEST].split())
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…"


def pack(message: Any) -> bytes:
    return frame(msgspec.msgpack.encode(message))


def frame(content: bytes) -> bytes:
    if len(content) > LARGEST:
        raise ValueError(f"a message of {len(content)} bytes; {LARGEST} are the most")
    return framing.frame(content)


class Frames(framing.Frames):
    """Bytes as they come into whole messages of this size at most."""

    def __init__(self) -> None:
        super().__init__(LARGEST)
