"""Environments in processes: many episodes in each worker, each call under the time limit."""

import json
import math
from collections import deque
from dataclasses import dataclass
from typing import Any, Unpack

import msgspec

from dora_rl.sandbox.pool import Pool, PoolOptions
from dora_rl.sandbox.protocol import LARGEST, UserFunction, clipped
from dora_rl.sandbox.worker_pool import Answered, Lost
from dora_rl.tasks.errors import TaskError

_UNEVEN = 2  # episodes that a worker may have more than the emptiest


class EnvReply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `open` (text, messages, or None for the row's prompt) or to `step`.

    After a failure the episode is gone.
    """

    ticket: int
    observation: str | list[dict[str, Any]] | None = None
    reward: float = 0.0
    done: bool = False
    failure: str | None = None
    seconds: float = 0.0
    output: str = ""
    """What the environment printed, and its traceback."""


class EnvironmentPool(Pool[EnvReply]):
    """Episodes with one environment, spread over workers.

    A worker answers one call at a time. When one hangs or crashes, every episode on that worker
    is lost and gets a reply that says so; the episodes on other workers continue.
    """

    def __init__(self, environment: UserFunction, **options: Unpack[PoolOptions]) -> None:
        super().__init__("dora_rl.tasks.serving:environments", (environment,), **options)
        self._episodes: dict[int, _Episode] = {}  # by ticket
        self._next = 0
        self._openings: deque[tuple[_Episode, bytes]] = deque()
        self._calls: dict[int, deque[tuple[_Episode, bytes]]] = {}  # worker -> what it is to do
        self._running: dict[int, _Episode] = {}  # worker -> whose call

    @property
    def episodes(self) -> list[int]:
        """The tickets of all episodes."""
        return list(self._episodes)

    def open(self, ticket: int, example: dict[str, Any]) -> None:
        """Start an episode; its first observation comes from `poll`."""
        if ticket in self._episodes:
            raise ValueError(f"episode {ticket} is open already")
        episode = _Episode(ticket, self._next)
        request = _request("open", episode, example=example)
        self._next += 1
        self._episodes[ticket] = episode
        self._openings.append((episode, request))
        self._hand_out()

    def step(self, ticket: int, text: str) -> None:
        """Give an episode what the policy wrote; its answer comes from `poll`."""
        episode = self._episodes.get(ticket)
        if episode is None or episode.worker is None or episode.awaited:
            raise ValueError(f"episode {ticket} is not there, or has not answered yet")
        self._call(episode, _request("step", episode, text=text))
        episode.awaited = True
        self._hand_out()

    def discard(self, ticket: int) -> None:
        """End an episode; a reply that is still to come is dropped. Unknown tickets are ignored."""
        episode = self._episodes.pop(ticket, None)
        if episode is None:
            return
        if episode.worker is None:
            self._openings = deque(call for call in self._openings if call[0] is not episode)
            return
        calls = self._calls.get(episode.worker, deque())
        self._calls[episode.worker] = deque(call for call in calls if call[0] is not episode)
        self._call(episode, _request("close", episode))
        self._hand_out()

    def _awaited(self) -> bool:
        return any(episode.awaited for episode in self._episodes.values())

    def _tend(self, timeout_s: float) -> None:
        for event in self._workers.tend(timeout_s):
            if isinstance(event, Answered):
                self._answered(event)
            else:
                self._lost(event)
        self._hand_out()

    def _answered(self, event: Answered) -> None:
        episode = self._running.pop(event.worker)
        if self._episodes.get(episode.ticket) is not episode:
            return  # it was discarded
        episode.awaited = False
        reply = _reply(episode.ticket, event)
        self._log(reply.ticket, reply.output, reply.failure)
        self._done.append(reply)
        if reply.failure is not None:
            self.discard(episode.ticket)

    def _lost(self, event: Lost) -> None:
        culprit = self._running.pop(event.worker, None)
        self._calls.pop(event.worker, None)
        for episode in [s for s in self._episodes.values() if s.worker == event.worker]:
            del self._episodes[episode.ticket]
            if episode is culprit:
                why = event.why
            elif culprit is None:
                why = f"its worker ended between calls: {event.why}"
            else:
                why = f"another episode on its worker failed: {event.why}"
            self._log(episode.ticket, "", why)
            self._done.append(EnvReply(ticket=episode.ticket, failure=why, seconds=event.seconds))

    def _call(self, episode: "_Episode", request: bytes) -> None:
        assert episode.worker is not None
        self._calls.setdefault(episode.worker, deque()).append((episode, request))

    def _hand_out(self) -> None:
        broken = self._workers.broken
        while broken is not None and self._openings:
            episode, _ = self._openings.popleft()
            del self._episodes[episode.ticket]
            self._done.append(EnvReply(ticket=episode.ticket, failure=broken))
        load = dict.fromkeys(self._workers.workers(), 0)
        for episode in self._episodes.values():
            if episode.worker in load:  # else it waits to be opened, or to hear that it is lost
                load[episode.worker] += 1
        # The emptiest first, and none gets far ahead of another that is busy or starting.
        full = min(load.values(), default=0) + _UNEVEN
        for worker in sorted(load, key=lambda number: (load[number], number)):
            if not self._workers.idle(worker):
                continue
            calls = self._calls.get(worker)
            if calls:
                episode, request = calls.popleft()
            elif self._openings and load[worker] < full:
                episode, request = self._openings.popleft()
                episode.worker = worker
            else:
                continue
            self._running[worker] = episode
            self._workers.ask(worker, request)


@dataclass(slots=True, eq=False)
class _Episode:
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
    output: str = ""


def _request(do: str, episode: _Episode, **fields: Any) -> bytes:
    try:
        content = json.dumps({"do": do, "episode": episode.number, **fields}).encode()
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
        output=reply.output,
    )
