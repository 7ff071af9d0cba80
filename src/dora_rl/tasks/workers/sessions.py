"""Environments in processes: many sessions in each worker, each call under the time limit."""

import json
import math
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import msgspec

from dora_rl.tasks.errors import TaskError
from dora_rl.tasks.workers.crew import Answered, Crew, Lost
from dora_rl.tasks.workers.pool import Pool
from dora_rl.tasks.workers.wire import LARGEST, Limits, Part, Program, clipped

_UNEVEN = 2  # sessions that a worker may have more than the emptiest


class EnvReply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `open` (text, messages, or None for the row's prompt) or to `step`.

    After a failure the session is gone.
    """

    ticket: int
    observation: str | list[dict[str, Any]] | None = None
    reward: float = 0.0
    done: bool = False
    failure: str | None = None
    seconds: float = 0.0


class EnvironmentPool(Pool):
    """Sessions of one environment, spread over workers.

    A worker answers one call at a time. When one hangs or crashes, every session on that worker
    is lost and gets a reply that says so; the sessions of other workers go on.
    """

    def __init__(
        self,
        environment: Part,
        *,
        workers: int = 2,
        timeout_s: float = 10.0,
        memory_mb: int = 1024,
        network: bool = False,
        writable: tuple[str, ...] = (),
    ) -> None:
        limits = Limits(
            timeout_s=timeout_s, memory_mb=memory_mb, network=network, writable=writable
        )
        program = Program(kind="environment", parts=(environment,), limits=limits)
        super().__init__(Crew(program, workers))
        self._sessions: dict[int, _Session] = {}  # by ticket
        self._next = 0
        self._openings: deque[tuple[_Session, bytes]] = deque()
        self._calls: dict[int, deque[tuple[_Session, bytes]]] = {}  # worker -> what it is to do
        self._running: dict[int, _Session] = {}  # worker -> whose call
        self._done: deque[EnvReply] = deque()

    @property
    def sessions(self) -> list[int]:
        """The tickets of all sessions."""
        return list(self._sessions)

    def open(self, ticket: int, example: dict[str, Any]) -> None:
        """Start a session; its first observation comes from `poll`."""
        if ticket in self._sessions:
            raise ValueError(f"session {ticket} is open already")
        session = _Session(ticket, self._next)
        request = _request("open", session, example=example)
        self._next += 1
        self._sessions[ticket] = session
        self._openings.append((session, request))
        self._hand_out()

    def step(self, ticket: int, text: str) -> None:
        """Give a session what the policy wrote; its answer comes from `poll`."""
        session = self._sessions.get(ticket)
        if session is None or session.worker is None or session.awaited:
            raise ValueError(f"session {ticket} is not there, or has not answered yet")
        self._call(session, _request("step", session, text=text))
        session.awaited = True
        self._hand_out()

    def discard(self, ticket: int) -> None:
        """End a session; whatever it still says is not heard. Unknown tickets are ignored."""
        session = self._sessions.pop(ticket, None)
        if session is None:
            return
        if session.worker is None:
            self._openings = deque(call for call in self._openings if call[0] is not session)
            return
        calls = self._calls.get(session.worker, deque())
        self._calls[session.worker] = deque(call for call in calls if call[0] is not session)
        self._call(session, _request("close", session))
        self._hand_out()

    def poll(self, timeout_s: float = 0.0) -> list[EnvReply]:
        """Replies so far; waits for one up to the time given."""
        deadline = time.monotonic() + timeout_s
        self._tend(0.0)
        while (
            not self._done
            and any(session.awaited for session in self._sessions.values())
            and (left := deadline - time.monotonic()) > 0
        ):
            self._tend(left)
        done = list(self._done)
        self._done.clear()
        return done

    def _tend(self, timeout_s: float) -> None:
        for event in self._crew.tend(timeout_s):
            if isinstance(event, Answered):
                self._answered(event)
            else:
                self._lost(event)
        self._hand_out()

    def _answered(self, event: Answered) -> None:
        session = self._running.pop(event.worker)
        if self._sessions.get(session.ticket) is not session:
            return  # it was discarded
        session.awaited = False
        reply = _reply(session.ticket, event)
        self._done.append(reply)
        if reply.failure is not None:
            self.discard(session.ticket)

    def _lost(self, event: Lost) -> None:
        culprit = self._running.pop(event.worker, None)
        self._calls.pop(event.worker, None)
        for session in [s for s in self._sessions.values() if s.worker == event.worker]:
            del self._sessions[session.ticket]
            if session is culprit:
                why = event.why
            elif culprit is None:
                why = f"its worker ended between calls: {event.why}"
            else:
                why = f"another session on its worker failed: {event.why}"
            self._done.append(EnvReply(ticket=session.ticket, failure=why, seconds=event.seconds))

    def _call(self, session: "_Session", request: bytes) -> None:
        assert session.worker is not None
        self._calls.setdefault(session.worker, deque()).append((session, request))

    def _hand_out(self) -> None:
        broken = self._crew.broken
        while broken is not None and self._openings:
            session, _ = self._openings.popleft()
            del self._sessions[session.ticket]
            self._done.append(EnvReply(ticket=session.ticket, failure=broken))
        load = dict.fromkeys(self._crew.workers(), 0)
        for session in self._sessions.values():
            if session.worker in load:  # else it waits to be opened, or to hear that it is lost
                load[session.worker] += 1
        # The emptiest first, and none gets far ahead of another that is busy or starting.
        full = min(load.values(), default=0) + _UNEVEN
        for worker in sorted(load, key=lambda number: (load[number], number)):
            if not self._crew.idle(worker):
                continue
            calls = self._calls.get(worker)
            if calls:
                session, request = calls.popleft()
            elif self._openings and load[worker] < full:
                session, request = self._openings.popleft()
                session.worker = worker
            else:
                continue
            self._running[worker] = session
            self._crew.ask(worker, request)


@dataclass(slots=True, eq=False)
class _Session:
    """A ticket may be used again; the number is not."""

    ticket: int
    number: int
    worker: int | None = None  # None: not opened yet
    awaited: bool = True  # a call of it has no reply yet


class _Reply(msgspec.Struct, frozen=True):
    """What a worker may say; checked, since it ran on what a policy wrote."""

    observation: str | list[dict[str, Any]] | None = None
    reward: float = 0.0
    done: bool = False
    failure: str | None = None


def _request(do: str, session: _Session, **fields: Any) -> bytes:
    try:
        content = json.dumps({"do": do, "session": session.number, **fields}).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise TaskError(f"an example must be JSON: {error}. Check the rows.") from None
    if len(content) > LARGEST:
        raise TaskError(f"a call of {len(content)} bytes; {LARGEST} are the most. Cut the rows.")
    return content


def _reply(ticket: int, event: Answered) -> EnvReply:
    try:
        reply = msgspec.json.decode(event.content, type=_Reply)
        if not math.isfinite(reply.reward):
            raise ValueError("not finite")
    except (RecursionError, ValueError, msgspec.MsgspecError):
        return EnvReply(
            ticket=ticket, failure="the worker's answer cannot be read", seconds=event.seconds
        )
    return EnvReply(
        ticket=ticket,
        observation=reply.observation,
        reward=reply.reward,
        done=reply.done,
        failure=None if reply.failure is None else clipped(reply.failure),
        seconds=event.seconds,
    )
