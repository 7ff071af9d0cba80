"""Every wait has an end: the deadlines that the core has set itself.

A timer is never cancelled. When it fires, whoever set it looks whether it is still waiting.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from heapq import heappop, heappush
from typing import NamedTuple


class Wait(StrEnum):
    """What is waited for; the comment names the two numbers that identify it."""

    HEARTBEAT = "heartbeat"  # instance, incarnation
    INSTALL = "install"  # instance, fence
    MIGRATION = "migration"  # migration
    PARKING = "parking"  # instance, fence
    SWITCH = "switch"  # instance, fence
    SCORE = "score"  # trajectory, fence
    JUDGE = "judge"  # group, attempt
    TRAIN = "train"  # step, attempt
    PUBLISH = "publish"  # version, attempt
    PROMPTS = "prompts"  # first, attempt
    REBALANCE = "rebalance"
    FLEET = "fleet"


class Timer(NamedTuple):
    at: float
    wait: Wait
    subject: int
    ticket: int


@dataclass(slots=True)
class Timers:
    heap: list[Timer] = field(default_factory=list)
    armed_at: float | None = None

    def set(self, at: float, wait: Wait, subject: int = 0, ticket: int = 0) -> None:
        heappush(self.heap, Timer(at, wait, subject, ticket))

    def due(self, now: float) -> list[Timer]:
        """Take out every timer whose time has come, in order."""
        fired = []
        heap = self.heap
        while heap and heap[0][0] <= now:
            fired.append(heappop(heap))
        self.armed_at = None
        return fired

    def rearm(self) -> float | None:
        """The time to ask the world for, if it is not the one asked for already."""
        heap = self.heap
        if not heap:
            return None
        first = heap[0][0]
        if self.armed_at is not None and self.armed_at <= first:
            return None
        self.armed_at = first
        return first
