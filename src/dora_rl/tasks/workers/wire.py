"""The messages between driver, nursery and workers, and their framing.

Decoding runs no code; what does not fit the schema, or is too large, is refused.
"""

from typing import Any, Literal

import msgspec

from dora_rl import framing

LARGEST = 64 << 20  # bytes of one message; a trajectory of a million tokens fits


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One callable: an import path, or in a forked nursery the object itself."""

    name: str
    function: Any
    weight: float = 1.0
    options: dict[str, Any] = {}


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker may use; `memory_mb` on top of what it starts with."""

    timeout_s: float = 10.0
    memory_mb: int = 1024
    network: bool = False


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """What a nursery's workers do."""

    kind: Literal["score", "environment"]
    parts: tuple[Part, ...]
    limits: Limits


class Birth(msgspec.Struct, frozen=True, kw_only=True):
    """The first message to a nursery that was started by name."""

    program: Program
    driver: int  # its process id
    path: list[str]
    environment_path: str | None  # PYTHONPATH, as the user had it


class Isolation(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept from the workers here, and how."""

    network: Literal["namespace", "python", "open"]
    privileges: Literal["none", "inherited"]
    memory: Literal["limited", "unlimited"]


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
    pass


class Answer(msgspec.Struct, frozen=True, tag=True):
    content: bytes
    seconds: float
    spent: bool  # it is not to be asked again


Report = Started | Refused | Ended
Order = Spawn | Kill
Word = Ready | Answer


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
