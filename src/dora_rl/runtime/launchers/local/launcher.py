"""Workers as processes of one machine: starts, stops and reaches them, and reports their facts."""

import selectors
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import TypeAlias

from dora_rl.runtime.control import messages as ms
from dora_rl.runtime.control.decisions import Death, Role, Worker
from dora_rl.runtime.control.memory import Watch
from dora_rl.runtime.launchers import handle
from dora_rl.runtime.launchers.local.channel import Gone
from dora_rl.runtime.launchers.local.forkserver_client import worker_fork
from dora_rl.runtime.launchers.local.processes import WorkerProcess
from dora_rl.runtime.launchers.wall_clock import WallClockRuntime
from dora_rl.runtime.records.run_files import RunFiles

Receive: TypeAlias = handle.Receive[WorkerProcess]


class LocalRuntime(WallClockRuntime[WorkerProcess]):
    """Carries a run's messages over socket pairs."""

    def __init__(
        self,
        files: RunFiles,
        memory: Watch | None = None,
        *,
        around_receive: Callable[[Receive], Receive] = lambda receive: receive,
    ) -> None:
        super().__init__(files, memory, around_receive=around_receive)
        self._forks = worker_fork().in_force
        self._writing: set[WorkerProcess] = set()  # whose socket has yet to take something

    def _spawn(self, worker: Worker, setup: ms.Setup, log: str) -> WorkerProcess:
        interpreter = None if worker.role is Role.TRAINER else self._interpreter
        path = self._files.plan.out / "logs" / f"{log}.log"
        process = WorkerProcess(
            str(worker), setup, self._site, path, interpreter, forked=self._forks
        )
        serve = partial(self._serve, process)
        self._selector.register(process.channel.socket, selectors.EVENT_READ, serve)
        return process

    def _serve(self, process: WorkerProcess, mask: int) -> None:
        try:
            if mask & selectors.EVENT_WRITE:
                process.channel.flush()
                self._watch_writes(process)
            if mask & selectors.EVENT_READ:
                for message in process.channel.receive():
                    self._receive(process, message)
        except Gone:
            self._gone(process)

    def _gone(self, process: WorkerProcess) -> None:
        self._selector.unregister(process.channel.socket)
        self._writing.discard(process)
        process.channel.close()
        deaths = self._memory.deaths
        why = process.death(self._memory.blame)
        process.kill()
        if self._memory.deaths > deaths:
            self._killed_short(why)
        self._died(process, Death(why, own_error=process.failed))

    def _end(self, processes: Iterable[WorkerProcess]) -> None:
        for process in processes:
            with suppress(KeyError, ValueError):
                self._selector.unregister(process.channel.socket)
            process.end()

    def _send(self, process: WorkerProcess, message: ms.Message) -> None:
        with suppress(Gone):  # its death is noticed on reading
            process.channel.send(message)
            self._watch_writes(process)

    def _watch_writes(self, process: WorkerProcess) -> None:
        unsent = process.channel.unsent
        if unsent == (process in self._writing):
            return
        events = selectors.EVENT_READ
        if unsent:
            self._writing.add(process)
            events |= selectors.EVENT_WRITE
        else:
            self._writing.discard(process)
        with suppress(KeyError, ValueError):
            serve = partial(self._serve, process)
            self._selector.modify(process.channel.socket, events, serve)
