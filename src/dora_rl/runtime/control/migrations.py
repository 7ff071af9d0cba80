"""Migrations: KV from one instance to another, by the transport that both of them have.

Reserve → the target has room → Transfer → the source puts → the target takes
        → MigrationCompleted → Release; or AbortMigration, which leaves all where it was
"""

from collections.abc import Callable

from dora_rl.core.protocol import commands as cm
from dora_rl.core.protocol import events as ev
from dora_rl.core.protocol.events import Event
from dora_rl.core.protocol.types import MigrationId
from dora_rl.runtime.control import messages as ms
from dora_rl.runtime.control.placements import Placements
from dora_rl.runtime.control.services import WorkerLink
from dora_rl.transports.kv import KvControl


class Migrations:
    """The migrations that the core has asked for, and not released or aborted."""

    def __init__(
        self,
        workers: WorkerLink,
        placements: Placements,
        post: Callable[[Event], None],
        kv: KvControl,
    ) -> None:
        self._workers = workers
        self._placements = placements
        self._post = post
        self._kv = kv
        self._reserved: dict[MigrationId, cm.Reserve] = {}

    def reserve(self, command: cm.Reserve) -> None:
        self._reserved[command.migration] = command
        self._workers.to_rollout(command.target, ms.Perform.of(command))

    def transfer(self, command: cm.Transfer) -> None:
        reserve = self._reserved[command.migration]
        self._workers.to_rollout(reserve.source, ms.HandOver(command.migration, reserve.moves))

    def handed_over(self, message: ms.HandedOver) -> None:
        reserve = self._reserved.get(message.migration)
        if reserve is None:
            self._kv.discard(message.migration)
        elif message.failure is not None:
            self._post(ev.MigrationFailed(message.migration, message.failure))
        else:
            self._workers.to_rollout(reserve.target, ms.TakeOver(message.migration))

    def completed(self, event: ev.MigrationCompleted) -> None:
        reserve = self._reserved.get(event.migration)
        self._post(event)
        if reserve is None or event.migration in self._reserved:
            return  # the core did not take it
        fences = {(move.trajectory, move.fence): move.new_fence for move in reserve.moves}
        for placement in event.moved:
            name, fence = placement
            self._placements.move(name, fence, reserve.target, fences[placement])

    def release(self, command: cm.Release) -> None:
        reserve = self._reserved.pop(command.migration)
        self._workers.to_rollout(reserve.source, ms.Perform.of(command))

    def abort(self, command: cm.AbortMigration) -> None:
        reserve = self._reserved.pop(command.migration, None)
        if reserve is None:
            return
        for instance in (reserve.source, reserve.target):
            self._workers.to_rollout(instance, ms.Perform.of(command))
        self._kv.discard(command.migration)
        for move in reserve.moves:
            self._placements.answer_again(move.trajectory)
