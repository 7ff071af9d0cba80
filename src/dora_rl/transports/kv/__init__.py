"""Running trajectories on their way between instances, by the number of the migration."""

from typing import Protocol

from dora_rl.core.protocol.types import MigrationId


class KvControl(Protocol):
    """The driver's end: what is under way goes when a migration is aborted."""

    def discard(self, migration: MigrationId) -> None:
        """Nobody will take it. Unknown: does nothing."""


class KvTransport(KvControl, Protocol):
    """An instance's end."""

    def put(self, migration: MigrationId, data: bytes) -> None:
        """At the source: all of it, or an `OSError` and nothing."""

    def take(self, migration: MigrationId) -> bytes:
        """At the target, once; an `OSError` if it is not there."""
