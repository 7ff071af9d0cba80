"""Data parallel on one machine: the leader starts followers and tells each what to do next.

Commands go down a pipe as msgpack by a fixed schema, never pickle; tensors go over the process
group. A follower whose pipe ends goes too, so none outlives its leader. All of them hold their
part of one policy (FSDP2) and run the same code on their share of the batch.
"""

import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TypeAlias

import msgspec

from dora_rl.samples import Sample
from dora_rl.trainer.errors import FollowerDied, StepRejected
from dora_rl.trainer.replica import Plan
from dora_rl.trainer.world import World, join

_LENGTH = struct.Struct("<Q")
_MAX_MESSAGE = 1 << 32  # msgpack's own limit
_END_S = 30.0  # for a follower to end by itself


class Join(msgspec.Struct, frozen=True, tag=True):
    plan: Plan
    rendezvous: str
    rank: int
    size: int


class Train(msgspec.Struct, frozen=True, tag=True):
    samples: tuple[Sample, ...]


class Publish(msgspec.Struct, frozen=True, tag=True):
    pass


class Save(msgspec.Struct, frozen=True, tag=True):
    pass


class Restore(msgspec.Struct, frozen=True, tag=True):
    directory: str


Command: TypeAlias = Join | Train | Publish | Save | Restore


def send(pipe: IO[bytes], command: Command) -> None:
    data = msgspec.msgpack.encode(command)
    pipe.write(_LENGTH.pack(len(data)))
    pipe.write(data)
    pipe.flush()


def receive(pipe: IO[bytes]) -> Command | None:
    """The next command, or None if the leader is gone."""
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    if length > _MAX_MESSAGE:
        raise ValueError(f"a command of `{length}` bytes is longer than any can be")
    data = pipe.read(length)
    if len(data) < length:
        return None
    command: Command = msgspec.msgpack.decode(data, type=Command)
    return command


class Followers:
    """The other processes of the group; none, if one process trains alone."""

    def __init__(self, size: int, processes: list[subprocess.Popen[bytes]]) -> None:
        self.world = World(0, size)
        self._processes = processes
        # Nobody else may name the file at which the processes meet.
        self._directory = tempfile.TemporaryDirectory(prefix="dora-rl-") if size > 1 else None

    @classmethod
    def start(cls, plan: Plan, size: int) -> "Followers":
        """Start all but the leader; they load the model while it does."""
        followers = cls(size, [])
        if followers._directory is None:
            return followers
        for rank in range(1, size):
            process = subprocess.Popen(
                [sys.executable, "-m", "dora_rl.trainer.follower"], stdin=subprocess.PIPE
            )
            followers._processes.append(process)
            assert process.stdin is not None
            send(process.stdin, Join(plan, str(followers._meeting()), rank, size))
        return followers

    def join(self) -> World:
        """Become the leader of the group; waits for all of them."""
        return self.world if self._directory is None else join(self._meeting(), 0, self.world.size)

    def _meeting(self) -> Path:
        assert self._directory is not None
        return Path(self._directory.name) / "rendezvous"

    def tell(self, command: Command) -> None:
        for process in self._processes:
            assert process.stdin is not None
            try:
                send(process.stdin, command)
            except BrokenPipeError:
                raise self._death() from None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """What the group does together; if it breaks, who is to blame."""
        try:
            yield
        except StepRejected:
            raise
        except RuntimeError as error:
            if not self._processes:
                raise
            with suppress(subprocess.TimeoutExpired):
                self._processes[0].wait(1.0)  # a connection breaks a moment before its process
            if all(process.poll() is None for process in self._processes):
                raise
            raise self._death() from error

    def _death(self) -> FollowerDied:
        ended = [
            f"{rank} (exit code {process.poll()})"
            for rank, process in enumerate(self._processes, start=1)
            if process.poll() is not None
        ]
        return FollowerDied(
            f"training process `{', '.join(ended) or 'unknown'}` of {self.world.size} has died. "
            "Its last words are on stderr. Open the trainer anew and restore a checkpoint."
        )

    def close(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()
        if self._directory is not None:
            self._directory.cleanup()
