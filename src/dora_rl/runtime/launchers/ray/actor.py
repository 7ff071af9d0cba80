"""The actor of a worker: starts its process on this node, passes bytes on, and ends it.

    driver  --  start, deliver, collect, …  -->  actor  ==  socket pair  ==  worker process

The worker is the process that `launchers.local` starts, with an interpreter and a log of its own;
it ends with the actor. So a worker that hangs can be killed by its actor, and no library of the
worker meets Ray. Calls of each kind have their own thread: a delivery that waits for a busy worker
delays no other call. All that crosses is bytes, numbers and text; messages are in our own codec.
"""

import os
import select
import signal
import time
from pathlib import Path
from typing import Any

import msgspec
import ray

from dora_rl.engines.registry import Interpreter
from dora_rl.runtime.control import messages as ms
from dora_rl.runtime.launchers.local.channel import Gone
from dora_rl.runtime.launchers.local.processes import WorkerProcess
from dora_rl.runtime.launchers.local.site import Site
from dora_rl.runtime.launchers.ray.objects import PEERS, ObjectActor
from dora_rl.runtime.launchers.ray.ranks import free_address

GROUPS = {"inbox": 1, "outbox": 1, "control": 2, **PEERS}
_GATHER_S = 0.001  # for the rest of what a worker says at once: a call costs as much
_LOOK_S = 1.0  # between two looks whether a worker that reads nothing has ended


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What an actor is to start."""

    name: str
    setup: bytes  # an encoded `messages.Setup`
    site: str  # encoded; its parent is the driver
    log: str
    variables: dict[str, str]  # of the driver's environment
    python: str | None = None  # of an engine with an environment of its own
    python_variables: dict[str, str] = {}
    objects: bool = False  # whether it has a way to the object store
    meets: bool = False  # it is rank 0 of a trainer: it listens for the others


class Started(msgspec.Struct, frozen=True):
    """The answer to an order; or why the node cannot have the worker."""

    node: str
    refusal: str | None = None
    address: str | None = None
    """Where rank 0 of a trainer listens for the others."""


class WorkerActor(ObjectActor):
    """Hosts one worker process, from `start` until it ends."""

    def __init__(self) -> None:
        super().__init__()
        self._process: WorkerProcess | None = None
        # Ray's own handler would end the actor, and with it the worker amid its work.
        signal.signal(signal.SIGTERM, self._pass_on)

    def _pass_on(self, number: int, _: object) -> None:
        """Who asks the actor to go asks its worker, which has its work handed over first."""
        if self._process is not None:
            self._process.send_signal(number)

    @property
    def _started(self) -> WorkerProcess:
        assert self._process is not None, "it is started first"
        return self._process

    @ray.method(concurrency_group="control")
    def start(self, encoded: bytes) -> bytes:
        """Start the process of an `Order`; the answer is an encoded `Started`."""
        order = msgspec.msgpack.decode(encoded, type=Order)
        node = ray.get_runtime_context().get_node_id()
        site = Site.parse(order.site)._replace(parent=os.getpid())
        setup = ms.decode(order.setup)
        assert isinstance(setup, ms.Setup)
        python = order.python
        paths = [site.run, site.model, *([] if python is None else [python])]
        absent = next((path for path in paths if not os.path.exists(path)), None)
        if absent is not None:
            return msgspec.msgpack.encode(Started(node, absent))
        os.environ.update(order.variables)
        interpreter = None if python is None else Interpreter(Path(python), order.python_variables)
        address = None
        if order.meets:
            address = str(free_address())
            setup.config["train"]["rendezvous"] = address
            setup.config["train"].setdefault("threads", setup.threads)  # of the others, too
        with self._linked(site, order.objects) as site:
            self._process = WorkerProcess(order.name, setup, site, Path(order.log), interpreter)
        return msgspec.msgpack.encode(Started(node, address=address))

    @ray.method(concurrency_group="inbox")
    def deliver(self, framed: bytes, peers: dict[str, Any] | None = None) -> None:
        """Give the worker these messages; waits until it has taken them, or is gone.

        `peers` are the actors to ask for what the messages make the worker want.
        """
        self._introduce(peers or {})
        channel = self._started.channel
        try:
            channel.send_bytes(framed)
            while channel.unsent:
                select.select([], [channel.socket], [], _LOOK_S)
                channel.flush()
        except Gone:
            return

    @ray.method(concurrency_group="outbox")
    def collect(self, wait_s: float) -> bytes | None:
        """What the worker has said, after waiting for some of it; None if it has ended."""
        channel = self._started.channel
        try:
            if not channel.wait(wait_s):
                return b""
            time.sleep(_GATHER_S)
            return channel.receive_bytes()
        except Gone:
            return None

    @ray.method(concurrency_group="control")
    def exit(self) -> tuple[int, bool, str]:
        """How the worker ended; what it had started is ended, too."""
        process = self._started
        ended = process.exit()
        process.kill()
        self._close_objects()
        return ended.code, ended.killed, ended.words

    @ray.method(concurrency_group="control")
    def kill(self) -> None:
        """End the worker at once, whatever it does."""
        self._started.kill()

    @ray.method(concurrency_group="control")
    def end(self) -> None:
        """Ask the worker to end, and see to it that it does."""
        self._started.end()
        self._close_objects()
