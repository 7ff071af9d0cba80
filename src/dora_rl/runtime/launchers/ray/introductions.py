"""Which actor a worker is to ask for what a message makes it want, and which transports those are.

An install is delivered with the trainer's actor, which has the versions; the end of a migration
with its source's. When the core deletes a version, the trainer's actor lets go of its objects.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from ray.exceptions import RayError

from dora_rl.core.protocol import commands as cm
from dora_rl.core.protocol.events import Event
from dora_rl.core.protocol.types import MigrationId
from dora_rl.runtime.config import RunConfig
from dora_rl.runtime.control import messages as ms
from dora_rl.runtime.control.listeners import Listener
from dora_rl.runtime.launchers.ray.installation import on_cluster
from dora_rl.runtime.launchers.ray.remote_worker import RemoteWorker
from dora_rl.transports.kv.object_store import key_of
from dora_rl.transports.objects.gateway import WEIGHTS

_REMEMBERED = 256  # migrations: one that is aborted may be discarded long after it was handed over


def with_transports(config: RunConfig) -> RunConfig:
    """The configuration with a transport where it names none.

    Between machines the object store: a version crosses the network once for each node, and not
    through the file system that all of them share. On this machine its files are mapped.
    """
    runtime = config.runtime
    best = "object_store" if on_cluster(runtime) else "directory"
    weights, kv = (
        settings.model_copy(update={"transport": settings.transport or best})
        for settings in (runtime.weights, runtime.kv)
    )
    runtime = runtime.model_copy(update={"weights": weights, "kv": kv})
    return config.model_copy(update={"runtime": runtime})


def uses_objects(config: RunConfig) -> bool:
    """Whether anything goes through the object store, beside messages."""
    runtime = config.runtime
    return "object_store" in (runtime.weights.transport, runtime.kv.transport)


class Introductions(Listener):
    """`peers_for` each message that is sent; `discard` is the driver's end of the KV transport."""

    def __init__(self, trainer: Callable[[], RemoteWorker | None]) -> None:
        self._trainer = trainer
        self._sources: dict[MigrationId, RemoteWorker] = {}

    def peers_for(self, process: RemoteWorker, message: ms.Message) -> dict[str, Any]:
        """The actors to ask, by what for; None for one that is not there now."""
        match message:
            case ms.Perform() if message.is_a(cm.Install):
                trainer = self._trainer()
                return {WEIGHTS: None if trainer is None else trainer.actor}
            case ms.HandOver():
                self._sources[message.migration] = process
                while len(self._sources) > _REMEMBERED:
                    del self._sources[next(iter(self._sources))]
            case ms.TakeOver():
                source = self._sources.get(message.migration)
                return {key_of(message.migration): None if source is None else source.actor}
        return {}

    def discard(self, migration: MigrationId) -> None:
        source = self._sources.pop(migration, None)
        if source is not None and source.actor is not None:
            with suppress(RayError):  # it has died, and what it had with it
                source.actor.discard.remote(key_of(migration))

    def observed(self, now: float, event: Event, commands: Sequence[cm.Command]) -> None:
        retired = [command.version for command in commands if isinstance(command, cm.Delete)]
        trainer = self._trainer()
        if retired and trainer is not None and trainer.actor is not None:
            for version in retired:
                with suppress(RayError):
                    trainer.actor.retire.remote(version)
