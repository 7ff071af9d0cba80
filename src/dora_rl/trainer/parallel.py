"""Data parallel: the leader meets its followers at an address and tells each what to do next.

Commands go down a connection as msgpack by a fixed schema, never pickle; tensors go over the
process group. A follower whose connection ends goes too, so none outlives its leader. A leader that
fails where the others do not is out of step with them: the group ends (`GroupBroken`). All of them
hold their part of one policy (FSDP2) and run the same code on their share of the batch. Followers
on loopback are started here; at another address they are waited for. No message names a path or
a process of one machine, but for directories that every process must be able to read: the model,
the weight store, a checkpoint.
"""

import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, TypeAlias

import msgspec
import torch

from dora_rl.core.protocol.errors import UserError
from dora_rl.trainer import rendezvous
from dora_rl.trainer.devices import resolve
from dora_rl.trainer.errors import FollowerDied, GroupBroken
from dora_rl.trainer.progress import nothing
from dora_rl.trainer.rendezvous import Listener, address_of, token_for
from dora_rl.trainer.replica import ReplicaSettings
from dora_rl.trainer.shares import Share
from dora_rl.trainer.world import World, join, leave, open_store

_LENGTH = struct.Struct("<Q")
_MAX_MESSAGE = 1 << 32  # msgpack's own limit
_END_S = 30.0  # for all followers to end by themselves
_JOIN_S = 240.0  # for all of them to come; most of it the import of torch from a cold disk
_READY_S = 120.0  # for all of them to have their device
_HELLO_S = 10.0
_POLL_S = 1.0


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A follower's first word: the rank that it was started as, if any."""

    rank: int | None = None


class Join(msgspec.Struct, frozen=True, tag=True):
    """The leader's answer. The process group's store is at this port of the leader's host.

    `device` is the kind of the leader's, which is that of the whole group.
    """

    settings: ReplicaSettings
    device: str
    store_port: int
    rank: int
    size: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """A follower's second word, and its last: it has its device, and goes to the process group."""


class Train(msgspec.Struct, frozen=True, tag=True):
    step: int  # at which the follower must be
    share: Share


class Publish(msgspec.Struct, frozen=True, tag=True):
    pass


class Save(msgspec.Struct, frozen=True, tag=True):
    pass


class Restore(msgspec.Struct, frozen=True, tag=True):
    directory: str


Command: TypeAlias = Hello | Join | Ready | Train | Publish | Save | Restore


def send(pipe: IO[bytes], command: Command) -> None:
    data = msgspec.msgpack.encode(command)
    pipe.write(_LENGTH.pack(len(data)))
    pipe.write(data)
    pipe.flush()


def receive(pipe: IO[bytes]) -> Command | None:
    """The next command, or None if the other end is gone."""
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


@dataclass
class Link:
    """One follower, as the leader sees it; `process` if it was started here."""

    connection: socket.socket | None = None
    process: subprocess.Popen[bytes] | None = None

    def tell(self, command: Command) -> None:
        assert self.connection is not None
        with self.connection.makefile("wb") as pipe:
            send(pipe, command)

    def hear(self, timeout_s: float) -> Command | None:
        """What it says, if it begins to within this time; None too if it makes no sense."""
        assert self.connection is not None
        self.connection.settimeout(timeout_s)
        try:
            if not self.connection.recv(1, socket.MSG_PEEK):
                return None
            self.connection.settimeout(_HELLO_S)
            with self.connection.makefile("rb") as pipe:
                return receive(pipe)
        except (OSError, ValueError):
            return None
        finally:
            self.connection.settimeout(None)

    def died(self) -> str | None:
        """How, if so."""
        if self.process is not None and (code := self.process.poll()) is not None:
            return f"exit code {code}"
        if self.connection is not None and rendezvous.gone(self.connection):
            return "connection lost"
        return None

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()


class Followers:
    """The other processes of the group; none, if one process trains alone."""

    def __init__(
        self, settings: ReplicaSettings | None, device: torch.device, links: list[Link]
    ) -> None:
        self.world = World(0, len(links) + 1, device)
        self._settings = settings
        self._links = links  # by rank, from 1
        self._listener: Listener | None = None
        self._joined = False

    @classmethod
    def start(cls, settings: ReplicaSettings, size: int) -> "Followers":
        """Start all but the leader, or listen for them.

        A device that is not there, or an address that cannot be had, is refused before anything
        is started.
        """
        train = settings.train_settings()
        address = address_of(train.rendezvous)
        local = size if address.loopback else 1
        device = resolve(train.device, local_processes=local)
        followers = cls(settings, device, [Link() for _ in range(1, size)])
        if size == 1:
            return followers
        token = token_for(address)
        listener = followers._listener = Listener(address, token)
        if address.loopback:
            for rank, link in enumerate(followers._links, start=1):
                options = ["--rank", rank, "--local-rank", rank, "--local-processes", size]
                link.process = _start(["--token-stdin", listener.address, *options], token)
        return followers

    def join(self, progress: Callable[[], None] = nothing) -> World:
        """Become the leader of the group; waits for all of them, and calls `progress` meanwhile."""
        if self._listener is None:
            return self.world
        address = self._listener.address
        self._meet(self._listener, progress)
        size, device = self.world.size, self.world.device
        store = open_store(address, size)
        assert self._settings is not None
        settings = self._settings
        self.tell_each(
            [Join(settings, device.type, store.port, rank, size) for rank in range(1, size)]
        )
        self._listener.close()
        self._await_ready(progress)
        world = join(store, 0, size, device, loopback=address.loopback)
        self._joined = True
        return world

    def _meet(self, listener: Listener, progress: Callable[[], None]) -> None:
        """Give every connection its rank; a follower that comes twice is sent away."""
        deadline = time.monotonic() + _JOIN_S
        while missing := [link for link in self._links if link.connection is None]:
            progress()
            if any(link.died() for link in self._links):
                raise self._death()
            if time.monotonic() > deadline:
                raise FollowerDied(
                    f"`{len(missing)}` of {len(self._links)} training processes did not connect to "
                    f"`{listener.address}` within {_JOIN_S:g} s. Start each with `python -m "
                    f"dora_rl.trainer.follower {listener.address}` and the same {rendezvous.TOKEN}."
                )
            connection = listener.accept(_POLL_S)
            if connection is not None and not self._welcome(connection):
                connection.close()

    def _welcome(self, connection: socket.socket) -> bool:
        hello = Link(connection).hear(_HELLO_S)
        if not isinstance(hello, Hello):
            return False
        free = [rank for rank, link in enumerate(self._links, 1) if link.connection is None]
        rank = free[0] if hello.rank is None else hello.rank
        if rank not in free:
            return False
        self._links[rank - 1].connection = connection
        return True

    def _await_ready(self, progress: Callable[[], None]) -> None:
        """The process group waits half an hour for one that has no device: it is asked before."""
        deadline = time.monotonic() + _READY_S
        for rank, link in enumerate(self._links, start=1):
            while not isinstance(link.hear(_POLL_S), Ready):
                progress()
                if any(other.died() for other in self._links):
                    raise self._death()
                if time.monotonic() > deadline:
                    raise FollowerDied(
                        f"training process `{rank}` of {self.world.size} has no device after "
                        f"{_READY_S:g} s. See its stderr, and start the run again."
                    )

    def tell(self, command: Command) -> None:
        """The same to all of them."""
        self.tell_each([command] * len(self._links))

    def tell_each(self, commands: Sequence[Command]) -> None:
        """To each its own, by rank."""
        for link, command in zip(self._links, commands, strict=True):
            try:
                link.tell(command)
            except OSError:
                raise self._death() from None

    @contextmanager
    def watched(self, *alike: type[Exception]) -> Iterator[None]:
        """What the group does together; if it breaks, who is to blame.

        Errors that every process meets `alike` pass, and the group continues. After any other of
        the leader's the followers are elsewhere in the order of collectives: `FollowerDied` if
        that is because one is gone, else `GroupBroken`.
        """
        try:
            yield
        except alike:
            raise
        except (RuntimeError, MemoryError, OSError, UserError) as error:
            if not self._links:
                raise
            if any(self._deaths()):
                raise self._death() from error
            raise GroupBroken(
                f"the first of {self.world.size} training processes failed, and the others did "
                f"not: `{' '.join(str(error).split()) or type(error).__name__}`. Open the trainer "
                "anew and restore a checkpoint."
            ) from error

    def _deaths(self) -> Iterator[str]:
        """Each that is gone, and how; a process ends a moment after its connections."""
        until = time.monotonic() + 1.0
        while not any(link.died() for link in self._links) and time.monotonic() < until:
            time.sleep(0.05)
        for rank, link in enumerate(self._links, start=1):
            if link.process is not None and link.died():
                with suppress(subprocess.TimeoutExpired):
                    link.process.wait(1.0)
            if (how := link.died()) is not None:
                yield f"{rank} ({how})"

    def _death(self) -> FollowerDied:
        return FollowerDied(
            f"training process `{', '.join(self._deaths()) or 'unknown'}` of {self.world.size} has "
            "died. Its error is on stderr. Open the trainer anew and restore a checkpoint."
        )

    def close(self) -> None:
        """Leave the group and end all of it, within a time that they share.

        Connections go first, then the process group: a follower that waits in a collective for
        this process is freed by that, and finds its connection closed.
        """
        if self._listener is not None:
            self._listener.close()
        for link in self._links:
            link.close()
        if self._joined:
            self._joined = False
            leave(self.world)
        deadline = time.monotonic() + _END_S
        for link in self._links:
            if link.process is None:
                continue
            left = max(0.0, deadline - time.monotonic())
            try:
                # One that was never heard is not waited for.
                link.process.wait(left if link.connection is not None else 0)
            except subprocess.TimeoutExpired:
                link.process.kill()
                link.process.wait()
        self._links.clear()


def _start(options: Sequence[object], token: str) -> subprocess.Popen[bytes]:
    """A follower on this machine. It gets the token by a pipe: environments can be read."""
    environment = {key: value for key, value in os.environ.items() if key != rendezvous.TOKEN}
    process = subprocess.Popen(
        [sys.executable, "-m", "dora_rl.trainer.follower", *map(str, options)],
        stdin=subprocess.PIPE,
        env=environment,
    )
    assert process.stdin is not None
    with suppress(OSError), process.stdin as pipe:  # one that has died is found when they meet
        pipe.write(token.encode() + b"\n")
    return process
