"""A transport under test: a sender that is a process of its own, and receivers in this one."""

import multiprocessing
import os
import signal
import socket
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

from dora_rl.transports.objects.gateway import WEIGHTS, Gateway
from dora_rl.transports.objects.host import LocalPeer, ObjectHost
from dora_rl.transports.objects.link import ObjectLink
from dora_rl.transports.objects.store import MemoryStore, Peer
from dora_rl.transports.weights import WeightReceiver
from dora_rl.transports.weights.registry import make_receiver
from dora_rl.transports.weights.settings import WeightTransportSettings
from dora_rl.weights.loading import open_version
from dora_rl.weights.versions import delete_version, delta_path, path_of
from tests.patience import PATIENCE_S
from tests.transports.weights import sender
from tests.transports.weights.sender import Policy

# A server that has imported torch: a sender is there in a fraction of a second.
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.transports.weights.sender"])


class Harness:
    """Life cycle: `publish` versions, `receiver()`s receive them, `restart` after a death."""

    def __init__(self, root: Path, settings: WeightTransportSettings) -> None:
        self.settings = settings
        self.store = root / "weights"
        self._caches = root / "caches"
        self._receivers: list[WeightReceiver] = []
        self._sender: Any = None
        self._line: Connection | None = None
        self.objects = MemoryStore()
        self.host = ObjectHost(self.objects, self.store)
        self.peer: Peer = LocalPeer(self.host, self.objects)
        self._links: list[ObjectLink] = []

    def restart(self, kill: str = "never") -> None:
        """A new sender over the same store; it kills itself where `sender.py` says."""
        self.stop()
        ours, theirs = _FORKS.Pipe()
        arguments = (theirs, str(self.store), self.settings.model_dump_json(), kill)
        self._sender = _FORKS.Process(target=sender.main, args=arguments, daemon=True)
        self._sender.start()
        theirs.close()
        self._line = ours
        assert self._answer() == "ready"

    def publish(self, version: int, step: int | None = None) -> None:
        """The policy of a step, by default of the same number; it is out when this returns."""
        if self._sender is None:
            self.restart()
        self.ask(version, step)
        assert self._answer() == "published"

    def ask(self, version: int, step: int | None = None) -> None:
        assert self._line is not None
        self._line.send((version, version if step is None else step))

    def await_death(self) -> None:
        assert self._sender is not None
        self._sender.join(PATIENCE_S)
        assert self._sender.exitcode == -signal.SIGKILL

    def pause(self, seconds: float) -> None:
        """The sender hangs for a while."""
        assert self._sender is not None and self._sender.pid is not None
        os.kill(self._sender.pid, signal.SIGSTOP)
        threading.Timer(seconds, os.kill, (self._sender.pid, signal.SIGCONT)).start()

    def receiver(self, **settings: Any) -> WeightReceiver:
        cache = self._caches / str(len(self._receivers))
        mine = self.settings.model_copy(update=settings)
        objects = self.link() if mine.transport == "object_store" else None
        self._receivers.append(make_receiver(mine, self.store, cache, objects))
        return self._receivers[-1]

    def link(self) -> ObjectLink:
        """To an object store in memory; the sender's versions are there for whoever asks."""
        ours, theirs = socket.socketpair()
        gateway = Gateway(ours, ObjectHost(self.objects, self.store))
        gateway.introduce({WEIGHTS: self.peer})
        self._links.append(ObjectLink(theirs))
        return self._links[-1]

    def delete(self, version: int) -> None:
        delete_version(self.store, version)

    def travels(self, version: int) -> list[Path]:
        """The files whose bytes a receiver of the version before is sent."""
        delta = delta_path(self.store, version - 1, version)
        directory = path_of(self.store, version)
        whole = [directory / "manifest.json", directory / "model.safetensors"]
        return [whole[0], delta] if delta.exists() else whole

    def _answer(self) -> str:
        assert self._line is not None and self._line.poll(PATIENCE_S)
        return str(self._line.recv())

    def stop(self) -> None:
        if self._sender is not None and self._line is not None:
            self._sender.kill()
            self._sender.join()
            self._line.close()
            self._sender = None

    def __enter__(self) -> "Harness":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        for receiver in self._receivers:
            receiver.close()
        for link in self._links:
            link.close()
        self.stop()


def arrived(receiver: WeightReceiver, version: int) -> Policy:
    """What an engine would serve: it opens, and so checks, what was received."""
    return open_version(receiver.receive(version)).tensors
