"""Rewards in processes: jobs in, outcomes out, every job exactly one outcome."""

import json
import math
from collections import deque
from collections.abc import Sequence
from typing import Any, Unpack

import msgspec

from dora_rl.samples import Trajectory
from dora_rl.sandbox.pool import Pool, PoolOptions
from dora_rl.sandbox.protocol import LARGEST, UserFunction, clipped
from dora_rl.sandbox.worker_pool import Answered
from dora_rl.tasks.errors import TaskError

_MOST_PARTS = 1000  # each is a metric of its own


class ScoreJob(msgspec.Struct, frozen=True, kw_only=True):
    """A response, and what a reward may want to know of it."""

    response: str
    example: dict[str, Any] = {}
    prompt: str | list[dict[str, Any]] = ""
    answer: Any = None
    trajectory: Trajectory | None = None


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a job; `reward` is NaN if it failed, so that it cannot pass for a score."""

    ticket: int
    reward: float
    parts: dict[str, float] = {}
    failure: str | None = None
    seconds: float = 0.0
    output: str = ""
    """What the reward printed, and its traceback."""


def encode_job(job: ScoreJob) -> bytes:
    """As it goes to a worker."""
    try:
        content = json.dumps(msgspec.to_builtins(job)).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise TaskError(f"an example must be JSON: {error}. Check the rows.") from None
    if len(content) > LARGEST:
        raise TaskError(f"a job of {len(content)} bytes; {LARGEST} are the most. Cut the rows.")
    return content


class ScorePool(Pool[Outcome]):
    """Workers that compute the same weighted rewards; each has one job at a time."""

    def __init__(self, rewards: Sequence[UserFunction], **options: Unpack[PoolOptions]) -> None:
        super().__init__("dora_rl.tasks.serving:scorer", rewards, **options)
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._running: dict[int, int] = {}  # worker -> ticket
        self._tickets: set[int] = set()
        self._own = -1  # tickets of `run`, below those of others

    @property
    def outstanding(self) -> int:
        return len(self._tickets)

    def submit(self, ticket: int, job: ScoreJob) -> None:
        """Score a response; the outcome comes from `poll` under this ticket."""
        if ticket in self._tickets:
            raise ValueError(f"ticket {ticket} is out already")
        content = encode_job(job)
        self._tickets.add(ticket)
        self._waiting.append((ticket, content))
        self._hand_out()

    def run(self, job: ScoreJob) -> Outcome:
        """Score one response and wait for it. Outcomes of other jobs stay for `poll`."""
        ticket = self._own
        self._own -= 1
        self.submit(ticket, job)
        while True:
            for outcome in self._done:
                if outcome.ticket == ticket:
                    self._done.remove(outcome)
                    return outcome
            self._tend(1.0)

    def _awaited(self) -> bool:
        return bool(self._tickets)

    def _tend(self, timeout_s: float) -> None:
        for event in self._workers.tend(timeout_s):
            ticket = self._running.pop(event.worker, None)
            if ticket is None:
                continue
            if isinstance(event, Answered):
                self._finish(_outcome(ticket, event))
            else:
                self._finish(_failed(ticket, event.why, event.seconds))
        self._hand_out()

    def _hand_out(self) -> None:
        broken = self._workers.broken
        while broken is not None and self._waiting:
            self._finish(_failed(self._waiting.popleft()[0], broken, 0.0))
        for worker in self._workers.workers():
            if not self._waiting:
                break
            if self._workers.idle(worker):
                ticket, content = self._waiting.popleft()
                self._running[worker] = ticket
                self._workers.ask(worker, content)

    def _finish(self, outcome: Outcome) -> None:
        self._log(outcome.ticket, outcome.output, outcome.failure)
        self._tickets.discard(outcome.ticket)
        self._done.append(outcome)


class _Reply(msgspec.Struct, frozen=True):
    """What a worker may say of a job; checked, since it ran on what a policy wrote."""

    reward: float | None = None
    parts: dict[str, float] = {}
    failure: str | None = None
    output: str = ""


def _outcome(ticket: int, event: Answered) -> Outcome:
    try:
        reply = msgspec.json.decode(event.content, type=_Reply)
    except (RecursionError, msgspec.MsgspecError):
        return _failed(ticket, "the worker's answer cannot be read", event.seconds)
    if reply.failure is not None or reply.reward is None:
        why = clipped(reply.failure or "") or "the worker gave no reward"
        return _failed(ticket, why, event.seconds, reply.output)
    if not all(map(math.isfinite, (reply.reward, *reply.parts.values()))):
        why = "the worker's reward is not finite"
        return _failed(ticket, why, event.seconds, reply.output)
    if len(reply.parts) > _MOST_PARTS:
        why = f"a reward of {len(reply.parts)} parts; {_MOST_PARTS} are the most"
        return _failed(ticket, why, event.seconds, reply.output)
    return Outcome(
        ticket=ticket,
        reward=reply.reward,
        parts=reply.parts,
        seconds=event.seconds,
        output=reply.output,
    )


def _failed(ticket: int, why: str, seconds: float, output: str = "") -> Outcome:
    return Outcome(ticket=ticket, reward=math.nan, failure=why, seconds=seconds, output=output)
