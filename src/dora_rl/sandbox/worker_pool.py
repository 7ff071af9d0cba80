"""The driver's side of the workers: start, feed, watch, kill, replace.

Every worker has at most one request at a time, and a time limit for it. The end of a worker is
reported once, as an event. Knows nothing of rewards and environments.
"""

import selectors
import signal
import socket
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from dora_rl.sandbox.errors import LoadError
from dora_rl.sandbox.protocol import (
    KEY_BYTES,
    Answer,
    Ended,
    Frames,
    Isolation,
    Kill,
    Program,
    Ready,
    Report,
    Spawn,
    Word,
    frame,
)
from dora_rl.sandbox.zygote_start import Zygote, start_zygote

_CHUNK = 1 << 18
_EXIT_REPORT_S = 1.0  # between a closed socket and the report of how the worker ended
_START_S = 60.0  # for a worker to be there; a zygote that takes longer is hung
_MOST_FAILED_STARTS = 4  # consecutive ones, besides all workers at once


class Answered(NamedTuple):
    """A worker has done what it was asked."""

    worker: int
    content: bytes
    seconds: float


class Lost(NamedTuple):
    """A worker is gone, with its request if it had one; another replaces it under a new number."""

    worker: int
    why: str
    seconds: float


Event = Answered | Lost


class _Forged(Exception):
    """A message on a worker's channel from another process, such as code that a reward runs."""


@dataclass(slots=True)
class _Worker:
    channel: socket.socket
    frames: Frames = field(default_factory=Frames)
    unsent: bytearray = field(default_factory=bytearray)
    key: bytes | None = None  # seals its answers; none until it is ready
    asked: int = 0  # how often
    asked_at: float | None = None
    hung_up_at: float | None = None
    wanted_at: float = field(default_factory=time.monotonic)

    @property
    def ready(self) -> bool:
        return self.key is not None


class WorkerPool:
    """A fixed number of workers, all of one program."""

    def __init__(self, program: Program, workers: int) -> None:
        self._program = program
        self._timeout_s = program.limits.timeout_s
        self._selector = selectors.DefaultSelector()
        self._workers: dict[int, _Worker] = {}
        self._next = 0
        self._failed_starts = 0
        self._most_failed_starts = _MOST_FAILED_STARTS + workers
        self._last_failure = ""
        self._events: deque[Event] = deque()
        try:
            self._zygote = self._start_zygote()
        except BaseException:
            self._selector.close()
            raise
        for _ in range(workers):
            self._spawn()

    @property
    def isolation(self) -> Isolation:
        return self._zygote.isolation

    @property
    def broken(self) -> str | None:
        """Why no worker can be started any more; None while one can."""
        if self._failed_starts < self._most_failed_starts:
            return None
        return f"{self._failed_starts} workers ended before they could start: {self._last_failure}"

    def workers(self) -> list[int]:
        """All that are there or on their way, oldest first."""
        return list(self._workers)

    def idle(self, worker: int) -> bool:
        found = self._workers.get(worker)
        return (
            found is not None
            and found.ready
            and found.asked_at is None
            and found.hung_up_at is None
        )

    def fileno(self) -> int:
        """One number that stays: readable when `tend` has something to do."""
        return self._selector.fileno()

    def due_in_s(self) -> float | None:
        """When `tend` must be called even if nothing is readable."""
        moments = [
            moment for worker in self._workers.values() if (moment := self._due(worker)) is not None
        ]
        return max(0.0, min(moments) - time.monotonic()) if moments else None

    def ask(self, worker: int, content: bytes) -> None:
        """Send a request to an idle worker; its time runs from now."""
        if not self.idle(worker):
            raise ValueError(f"worker {worker} is not idle")
        found = self._workers[worker]
        found.unsent += frame(content)
        found.asked += 1
        found.asked_at = time.monotonic()
        self._send(worker, found)

    def tend(self, timeout_s: float = 0.0) -> list[Event]:
        """Wait for events up to the time given; none may mean that a worker got ready."""
        due = self.due_in_s()
        wait = 0.0 if self._events else min(timeout_s, due if due is not None else timeout_s)
        for key, mask in self._selector.select(max(0.0, wait)):
            if key.data is None:
                self._read_zygote()
                continue
            worker = self._workers.get(key.data)
            if worker is None or worker.channel is not key.fileobj:
                continue
            if mask & selectors.EVENT_WRITE:
                self._send(key.data, worker)
            if mask & selectors.EVENT_READ:
                self._read(key.data, worker)
        self._check_time()
        events = list(self._events)
        self._events.clear()
        return events

    def replace(self, worker: int) -> None:
        """Kill a worker and start another, without an event."""
        if self._let_go(worker) is not None:
            self._zygote.order(Kill(worker))
            self._spawn()

    def close(self) -> None:
        """End all workers and what they started. May be called twice."""
        for worker in list(self._workers):
            self._let_go(worker)
        with suppress(KeyError, ValueError):
            self._selector.unregister(self._zygote.control)
        self._zygote.close()
        self._selector.close()

    def _start_zygote(self) -> Zygote:
        zygote = start_zygote(self._program)
        self._selector.register(zygote.control, selectors.EVENT_READ, None)
        return zygote

    def _spawn(self) -> None:
        if self.broken is not None:
            return
        ours, theirs = socket.socketpair()
        number = self._next
        self._next += 1
        # If the zygote is gone, the worker is lost and replaced as soon as that is read.
        with theirs, suppress(OSError):
            self._zygote.order(Spawn(number), theirs)
        ours.setblocking(False)
        self._workers[number] = _Worker(ours)
        self._selector.register(ours, selectors.EVENT_READ, number)

    def _send(self, number: int, worker: _Worker) -> None:
        try:
            with suppress(BlockingIOError):
                while worker.unsent:
                    sent = worker.channel.send(worker.unsent)
                    del worker.unsent[:sent]
        except OSError:
            worker.unsent.clear()  # it has hung up, which is seen by reading
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.unsent else 0)
        if worker.hung_up_at is None:
            self._selector.modify(worker.channel, events, number)

    def _read(self, number: int, worker: _Worker) -> None:
        """Read all that a worker has sent."""
        while worker.hung_up_at is None and self._workers.get(number) is worker:
            try:
                data = worker.channel.recv(_CHUNK)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._selector.unregister(worker.channel)
                worker.hung_up_at = time.monotonic()
                return
            try:
                for content in worker.frames.feed(data):
                    self._take(number, worker, msgspec.msgpack.decode(content, type=Word))
            except _Forged:
                self._lose(number, "an answer came that the worker did not seal", kill=True)
                return
            except (ValueError, RecursionError, msgspec.MsgspecError):
                self._lose(number, "the worker sent what is not a message", kill=True)
                return

    def _take(self, number: int, worker: _Worker, word: Ready | Answer) -> None:
        match word:
            case Ready(key) if worker.key is None and len(key) == KEY_BYTES:
                worker.key = key
                self._failed_starts = 0
            case Answer() if worker.key is None or not word.sealed_with(worker.key):
                raise _Forged
            case Answer(asked, content, seconds, spent) if (
                worker.asked_at is not None and asked == worker.asked
            ):
                elapsed = time.monotonic() - worker.asked_at
                if not 0 <= seconds <= elapsed:  # the worker may lie
                    seconds = elapsed
                worker.asked_at = None
                if seconds > self._timeout_s:  # we looked late; the limit holds all the same
                    self._events.append(Lost(number, self._timeout(), seconds))
                    self.replace(number)
                else:
                    self._events.append(Answered(number, content, seconds))
                    if spent:
                        self._lose(number, "the worker was replaced after a failure", kill=True)
            case _:
                raise ValueError("out of turn")

    def _read_zygote(self) -> None:
        reports, alive = self._zygote.reports()
        for content in reports:
            report = msgspec.msgpack.decode(content, type=Report)
            if isinstance(report, Ended) and report.worker in self._workers:
                self._read(report.worker, self._workers[report.worker])
                if report.worker in self._workers:
                    self._lose(report.worker, f"the worker {_how(report.status)}", kill=False)
        if not alive:
            self._renew()

    def _renew(self) -> None:
        """The zygote was killed, and its workers with it: start anew."""
        self._selector.unregister(self._zygote.control)
        self._zygote.close()
        lost = list(self._workers)
        try:
            self._zygote = self._start_zygote()
        except (LoadError, OSError) as error:  # what could be loaded once cannot any more
            self._failed_starts, self._last_failure = self._most_failed_starts, str(error)
        for number in lost:
            self._read(number, self._workers[number])
            if number in self._workers:
                self._lose(number, "the process of all workers was killed", kill=False)

    def _check_time(self) -> None:
        now = time.monotonic()
        for number, worker in list(self._workers.items()):
            due = self._due(worker)
            if due is None or due > now:
                continue
            if not worker.ready and worker.hung_up_at is None:
                self._zygote.kill()  # all is told when its socket is read
                worker.wanted_at = now
                continue
            hung_up = worker.hung_up_at is not None
            why = "the worker closed its socket" if hung_up else self._timeout()
            self._lose(number, why, kill=True)

    def _due(self, worker: _Worker) -> float | None:
        if worker.hung_up_at is not None:
            return worker.hung_up_at + _EXIT_REPORT_S
        if not worker.ready:
            return worker.wanted_at + _START_S
        return None if worker.asked_at is None else worker.asked_at + self._timeout_s

    def _timeout(self) -> str:
        return f"timeout after {float(self._timeout_s)} s"

    def _lose(self, number: int, why: str, *, kill: bool) -> None:
        worker = self._let_go(number)
        if worker is None:
            return
        if kill:
            self._zygote.order(Kill(number))
        if not worker.ready:
            self._failed_starts += 1
            self._last_failure = why
        seconds = 0.0 if worker.asked_at is None else time.monotonic() - worker.asked_at
        self._events.append(Lost(number, why, seconds))
        self._spawn()

    def _let_go(self, number: int) -> _Worker | None:
        worker = self._workers.pop(number, None)
        if worker is not None:
            if worker.hung_up_at is None:
                self._selector.unregister(worker.channel)
            worker.channel.close()
        return worker


def _how(status: int) -> str:
    if status >= 0:
        return f"exited with code {status}"
    with suppress(ValueError):
        return f"was killed by {signal.Signals(-status).name}"
    return f"was killed by signal {-status}"
