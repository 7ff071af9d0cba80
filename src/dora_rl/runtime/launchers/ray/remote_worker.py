"""The driver's side of an actor: one worker on some node, from its request for room to its death.

    waiting   its placement group has no room yet, or its process starts
    running   one `deliver` at a time carries what is queued, one `collect` what the worker says
    over      its death was reported once, and nothing is heard of it any more

Ray answers on threads of its own; what follows is queued, and done by whoever runs the queue. So
nothing here waits, and nothing happens at any other time.
"""

import queue
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError

from dora_rl.framing import frame
from dora_rl.runtime.control import messages as ms
from dora_rl.runtime.launchers.local.channel import decoded, stream
from dora_rl.runtime.launchers.local.processes import Exit
from dora_rl.runtime.launchers.ray.actor import GROUPS, Order, Started, WorkerActor
from dora_rl.runtime.launchers.ray.placement import Placement
from dora_rl.runtime.launchers.ray.ranks import Followers, Group

_COLLECT_S = 30.0  # of one call that hears nothing
_DEAF_S = 5.0  # for an actor to end its process; then Ray ends the actor
_LONGEST_WORDS = 300  # characters of what Ray says of a death


class CallQueue:
    """Calls from any thread, for the thread that runs them. `fileno` is readable if there are."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        return self._reader.fileno()

    def put(self, call: Callable[[], None]) -> None:
        self._calls.put(call)
        with suppress(OSError):  # enough is in it already; or it is closed
            self._writer.send(b"\0")

    def run(self, _: int = 0) -> None:
        """All that are there; a selector says for which events."""
        with suppress(BlockingIOError):
            while len(self._reader.recv(1 << 12)) == 1 << 12:
                pass
        with suppress(queue.Empty):
            while True:
                self._calls.get_nowait()()

    def close(self) -> None:
        self._reader.close()
        self._writer.close()


@dataclass(frozen=True, slots=True)
class Ears:
    """Who is told of a remote worker."""

    started: Callable[["RemoteWorker"], None]
    refused: Callable[["RemoteWorker", str], None]
    """Its node lacks this file, and the worker is over."""
    said: Callable[["RemoteWorker", ms.Message], None]
    ended: Callable[["RemoteWorker", Exit], None]
    """The process, by itself or killed."""
    lost: Callable[["RemoteWorker", str, bool], None]
    """The actor, with its process: why, and whether by an error of its own."""


class RemoteWorker:
    """One incarnation of a worker. `node` is where it runs, once it does."""

    def __init__(
        self,
        order: Order,
        placement: Placement,
        calls: CallQueue,
        ears: Ears,
        *,
        title: str,
        py_executable: str | None,
        ranks: Group | None = None,
        guest_in: int | None = None,
    ) -> None:
        """With `ranks`, it is the first of a trainer's, each of which has a bundle.

        `guest_in` is the bundle of a guest in the group of another.
        """
        self.name = order.name
        self.placement = placement
        self.waiting = True
        self.since = time.monotonic()
        self.node: str | None = None
        self._calls = calls
        self._ears = ears
        self._over = False
        self._killed_at: float | None = None
        self._frames = stream()
        self._unsent: list[bytes] = []
        self._peers: dict[str, Any] = {}  # to introduce with what is unsent
        self._delivering = False
        placement.enter(self)

        def make_actor(kind: type, rank: int) -> Any:
            name = title if rank == 0 else f"{title}, rank {rank}"
            bundle, guest = (rank, False) if guest_in is None else (guest_in, True)
            return placement.make_actor(kind, GROUPS, name, py_executable, bundle, guest=guest)

        self._followers: Followers | None = None
        if ranks is not None:
            self._followers = Followers(ranks, make_actor, self._ask, self._rank_lost)
        self._actor = make_actor(WorkerActor, 0)
        self._ask(self._actor.start.remote(msgspec.msgpack.encode(order)), self._answered)

    def is_on(self, nodes: Collection[str]) -> bool:
        """Whether it, or one of its ranks, runs on one of these nodes."""
        others = set() if self._followers is None else self._followers.nodes
        return self.node in nodes or not others.isdisjoint(nodes)

    @property
    def over(self) -> bool:
        """Whether its death was reported, or will be of no interest."""
        return self._over

    @property
    def actor(self) -> Any:
        """The handle of its actor, for other actors to ask; None if it is not there."""
        return None if self._over or self.waiting else self._actor

    def send(self, message: ms.Message, peers: Mapping[str, Any] | None = None) -> None:
        """Queue a message, with the actors to ask for what it makes the worker want."""
        self._peers |= peers or {}
        self._unsent.append(frame(ms.encode(message)))
        self._deliver()

    def kill(self) -> None:
        """Its actor ends the process; Ray ends an actor that does not answer."""
        now = time.monotonic()
        if self._over:
            return
        if self.waiting or (self._killed_at is not None and now > self._killed_at + _DEAF_S):
            ray.kill(self._actor)
        elif self._killed_at is None:
            self._killed_at = now
            self._actor.kill.remote()

    def ask_to_end(self) -> list[Any]:
        """Its answer, if there is one to wait for."""
        return [] if self._over or self.waiting else [self._actor.end.remote()]

    def close(self) -> None:
        """Nothing of it is left, and nothing is heard of it any more."""
        self._over = True
        if self._followers is not None:
            self._followers.close()
        with suppress(RayError, ValueError, RuntimeError):
            ray.kill(self._actor)
        self.placement.leave(self)

    # Calls to the actor

    def _ask(self, answer: Any, then: Callable[[Any], None]) -> None:
        def arrived(future: Any) -> None:  # on a thread of Ray's
            try:
                call = partial(then, future.result())
            except Exception as error:
                call = partial(self._failed, error)
            self._calls.put(partial(self._unless_over, call))

        answer.future().add_done_callback(arrived)

    def _unless_over(self, call: Callable[[], None]) -> None:
        if not self._over:
            call()

    def _answered(self, encoded: bytes) -> None:
        started = msgspec.msgpack.decode(encoded, type=Started)
        self.node = started.node
        if started.refusal is not None:
            self.close()
            self._ears.refused(self, started.refusal)
            return
        self.waiting = False
        if self._followers is not None and started.address is not None:
            self._followers.start(started.address)
        self._ears.started(self)
        self._deliver()
        self._collect()

    def _deliver(self) -> None:
        if self.waiting or self._over or self._delivering or not self._unsent:
            return
        self._delivering = True
        framed, self._unsent = b"".join(self._unsent), []
        peers, self._peers = self._peers, {}
        self._ask(self._actor.deliver.remote(framed, peers), self._delivered)

    def _delivered(self, _: None) -> None:
        self._delivering = False
        self._deliver()

    def _collect(self) -> None:
        self._ask(self._actor.collect.remote(_COLLECT_S), self._collected)

    def _collected(self, data: bytes | None) -> None:
        if data is None:
            self._ask(self._actor.exit.remote(), self._exited)
            return
        self._collect()
        for message in decoded(self._frames, data):
            self._ears.said(self, message)

    def _exited(self, ended: Sequence[Any]) -> None:
        self.close()
        self._ears.ended(self, Exit(*ended))

    def _rank_lost(self, why: str) -> None:
        """Rank 0 cannot train without the others, and may not have noticed."""
        self.close()
        self._ears.lost(self, why, True)

    def _failed(self, error: Exception) -> None:
        """A call did not come back: the actor is gone, or cannot be reached, or was no use."""
        self.close()
        own_error = not isinstance(error, ray.exceptions.RayActorError)
        self._ears.lost(self, f"{self.name} is lost: {last_line(error)}", own_error)


def last_line(error: Exception) -> str:
    """What an error of Ray's comes to, after pages of how it came about."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:_LONGEST_WORDS]
