"""Actors without workers: they put and get objects for processes that come from elsewhere.

For measurements and tests of the object store as a transport, apart from a run. A process listens
at a socket of its node, its actor connects to it:

    with lone_actors(2, store_bytes=1 << 30) as (sender, receiver):
        sender.serve(weights)
        copies = receiver.connect(weights, path)     # the process has an `ObjectLink` at that path
        receiver.introduce(sender)                   # … which can receive versions from now on
"""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray

from dora_rl.core.protocol.types import Version
from dora_rl.machine import processor
from dora_rl.runtime.launchers.ray.cluster import machine_cluster
from dora_rl.runtime.launchers.ray.objects import PEERS, ObjectActor, RayStore
from dora_rl.transports.objects.gateway import WEIGHTS, Gateway
from dora_rl.transports.objects.host import ObjectHost
from dora_rl.transports.objects.scratch import Scratch

_ANSWER_S = 120.0  # for a call: a busy machine takes long to start an actor


class _Actor(ObjectActor):
    def serve(self, weights: str) -> None:
        self._host = ObjectHost(RayStore(), Path(weights))

    def connect(self, weights: str, path: str) -> str:
        self._close_objects()
        self.serve(weights)
        link = socket.socket(socket.AF_UNIX)
        link.connect(path)
        self._gateway = Gateway(link, self._objects)
        self._scratch = Scratch()
        return str(self._scratch.path)

    def introduce(self, key: str, actor: Any) -> None:
        self._introduce({key: actor})

    def end(self) -> None:
        self._close_objects()


class LoneActor:
    """One actor, as whoever measures has it. What fails is an exception of Ray's."""

    def __init__(self) -> None:
        remote: Any = ray.remote
        made = remote(concurrency_groups=PEERS)(_Actor)
        self.actor = made.options(num_cpus=0, max_restarts=0).remote()

    def serve(self, weights: Path) -> None:
        """Offer the versions of this store, as the actor of a trainer does."""
        ray.get(self.actor.serve.remote(str(weights)), timeout=_ANSWER_S)

    def connect(self, weights: Path, path: Path) -> Path:
        """Serve the process that listens there; a directory for its copies, until the next one."""
        found = self.actor.connect.remote(str(weights), str(path))
        return Path(ray.get(found, timeout=_ANSWER_S))

    def introduce(self, sender: "LoneActor | None", key: str = WEIGHTS) -> None:
        told = self.actor.introduce.remote(key, None if sender is None else sender.actor)
        ray.get(told, timeout=_ANSWER_S)

    def retire(self, version: Version) -> None:
        ray.get(self.actor.retire.remote(version), timeout=_ANSWER_S)

    def kill(self) -> None:
        ray.kill(self.actor)

    def end(self) -> None:
        ray.get(self.actor.end.remote(), timeout=_ANSWER_S)


@contextmanager
def lone_actors(count: int, store_bytes: int) -> Iterator[list[LoneActor]]:
    """So many, on a cluster of this machine with an object store of this size."""
    with machine_cluster(processor.cores(), store_bytes):
        actors = [LoneActor() for _ in range(count)]
        yield actors
        for actor in actors:
            actor.end()
