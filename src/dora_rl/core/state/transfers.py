"""Migrations under way: two phases, and the source keeps its copy until the target has it.

A migration moves trajectories of one version from one instance to another of the same
version. It either commits, with new fences, or leaves every member where it was.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from dora_rl.core.protocol.types import InstanceId, MigrationId, Move, Version


class Phase(StrEnum):
    RESERVING = "reserving"
    TRANSFERRING = "transferring"


@dataclass(slots=True)
class Migration:
    id: MigrationId
    source: InstanceId
    target: InstanceId
    version: Version
    moves: tuple[Move, ...]
    began_at: float
    phase: Phase = Phase.RESERVING


@dataclass(slots=True)
class Migrations:
    live: dict[MigrationId, Migration] = field(default_factory=dict)
    next_id: MigrationId = 0
    committed: int = 0  # trajectories moved
    undone: int = 0  # migrations

    def open(
        self,
        source: InstanceId,
        target: InstanceId,
        version: Version,
        moves: tuple[Move, ...],
        now: float,
    ) -> Migration:
        migration = Migration(self.next_id, source, target, version, moves, now)
        self.live[migration.id] = migration
        self.next_id += 1
        return migration

    def touching(self, instance: InstanceId) -> list[Migration]:
        return [m for m in self.live.values() if instance in (m.source, m.target)]
