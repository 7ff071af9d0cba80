"""Migrations of one rollout instance: what it hands over, keeps, takes over and undoes.

Source: `hand_over`, then `release` or `undo`. Target: `reserve`, `take_over`, and `undo` if it is
aborted. What fails leaves every trajectory where it was.
"""

import msgspec

from dora_rl.config.text import one_line
from dora_rl.core.protocol import commands as cm
from dora_rl.core.protocol import events as ev
from dora_rl.core.protocol.errors import UserError
from dora_rl.core.protocol.types import Fence, MigrationId, Placement
from dora_rl.runtime.control import messages as ms
from dora_rl.runtime.workers.partial_trajectory import Parcel, pack, unpack
from dora_rl.runtime.workers.placements import PlacedTrajectory, Placements, Stage
from dora_rl.transports.kv import KvTransport

_REMEMBERED = 256  # migrations that were completed or ended here, and may be named again


class Migrations:
    """Performs both ends of a migration on `here`; messages to the driver go to `outbox`."""

    def __init__(self, here: Placements, kv: KvTransport, outbox: list[ms.FromRollout]) -> None:
        self._here = here
        self._kv = kv
        self._outbox = outbox
        self._outgoing: dict[MigrationId, list[PlacedTrajectory]] = {}
        self._incoming: dict[MigrationId, list[PlacedTrajectory]] = {}
        self._reserved: dict[MigrationId, int] = {}
        self._ended: dict[MigrationId, None] = {}  # released or undone, in that order

    def reserve(self, command: cm.Reserve) -> None:
        migration = command.migration
        taken = self._here.num_running + sum(self._reserved.values())
        if command.version not in self._here.digests:
            failure = f"version {command.version} is not here"
        elif taken + len(command.moves) > self._here.slots:
            failure = "no_room"
        else:
            self._reserved[migration] = len(command.moves)
            self._here.report(ev.MigrationReserved(migration))
            return
        self._here.report(ev.MigrationFailed(migration, failure))

    def hand_over(self, message: ms.HandOver) -> None:
        migration = message.migration
        if migration in self._ended:  # else what continues here would stop, and never be released
            failure = f"migration {migration} has ended here"
            self._outbox.append(ms.HandedOver(migration, failure=failure))
            return
        if migration not in self._outgoing and not self._write_out(message):
            return
        moved = tuple(Placement(placed.id, placed.fence) for placed in self._outgoing[migration])
        self._outbox.append(ms.HandedOver(migration, moved))  # a duplicate gets the same answer

    def _write_out(self, message: ms.HandOver) -> bool:
        """Stop what is to move and put it into the transport; else all continues, as is told."""
        parcels: list[Parcel] = []
        candidates: list[tuple[PlacedTrajectory, Fence]] = []
        for trajectory, fence, new_fence in message.moves:
            placed = self._here.get(trajectory, fence)
            if placed is None or placed.stage is Stage.KEPT:
                continue
            candidates.append((placed, new_fence))
        self._outgoing[message.migration] = []
        try:
            for placed, new_fence in candidates:
                kv = self._take_out(placed)
                self._outgoing[message.migration].append(placed)
                placement = Placement(placed.id, placed.fence)
                parcels.append(Parcel(placement, new_fence, placed.partial, placed.paused, kv))
            self._kv.put(message.migration, pack(parcels))
        except (UserError, OSError) as error:
            self.undo(message.migration)
            self._outbox.append(ms.HandedOver(message.migration, failure=one_line(error)))
            return False
        return True

    def _take_out(self, placed: PlacedTrajectory) -> bytes | None:
        """Stop a trajectory until it is released or undone; its KV, if it can be handed over."""
        kv = placed.stash
        if placed.stage is Stage.HERE and self._here.engine.capabilities.kv_export:
            kv = self._here.engine.export_trajectory(placed.id)
        elif placed.stage is Stage.HERE:
            self._here.engine.cancel(placed.id)
        placed.kept_from = placed.stage
        self._here.change(placed, stage=Stage.KEPT)
        return kv

    def take_over(self, message: ms.TakeOver) -> None:
        migration = message.migration
        if migration in self._incoming:
            return  # a duplicate: what came is remembered, lest an abort leaves it here
        self._reserved.pop(migration, None)
        if migration in self._ended:
            self._kv.discard(migration)
            self._here.report(
                ev.MigrationFailed(migration, f"migration {migration} has ended here")
            )
            return
        arrived = self._incoming[migration] = []
        while len(self._incoming) > _REMEMBERED:
            del self._incoming[next(iter(self._incoming))]
        try:
            parcels = unpack(self._kv.take(migration))
            for parcel in parcels:
                self._here.enter_engine(parcel.partial, paused=parcel.paused, kv=parcel.kv)
                placed = PlacedTrajectory(parcel.new_fence, parcel.partial, paused=parcel.paused)
                self._here.add(placed)
                arrived.append(placed)
        except (UserError, OSError, msgspec.DecodeError) as error:
            self.undo(migration)
            self._here.report(ev.MigrationFailed(migration, one_line(error)))
        else:
            moved = tuple(parcel.placement for parcel in parcels)
            self._here.report(ev.MigrationCompleted(migration, moved))

    def undo(self, migration: MigrationId) -> None:
        """The target forgets what came, the source continues what it kept."""
        self._reserved.pop(migration, None)
        self._end(migration)
        for placed in self._incoming.pop(migration, ()):
            if self._here.trajectories.get(placed.id) is placed:
                self._here.forget(placed)
        for placed in self._outgoing.pop(migration, ()):
            if self._here.trajectories.get(placed.id) is placed and placed.stage is Stage.KEPT:
                if placed.kept_from is not Stage.HERE:
                    self._here.change(placed, stage=placed.kept_from)
                elif self._here.engine.capabilities.kv_export:
                    self._here.engine.resume(placed.id)
                    self._here.change(placed, stage=Stage.HERE)
                elif self._here.bring(placed, None):
                    self._here.change(placed, stage=Stage.HERE)

    def release(self, migration: MigrationId) -> None:
        """It is committed: the copies that were kept are forgotten."""
        self._end(migration)
        for placed in self._outgoing.pop(migration, ()):
            if self._here.trajectories.get(placed.id) is placed:
                self._here.forget(placed)

    def _end(self, migration: MigrationId) -> None:
        self._ended[migration] = None
        while len(self._ended) > _REMEMBERED:
            del self._ended[next(iter(self._ended))]
