"""Virtual time: a queue of things to do, each at its time.

Invariant: actions run in order of (time, order of scheduling), so a run is a pure function of
what was scheduled. Knows nothing of what the actions are, and never looks at real time.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

Action = Callable[[Any], None]


class Clock:
    """A heap of (time, number, action, argument). What became void is for the action to see."""

    __slots__ = ("_heap", "_number", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Action, Any]] = []
        self._number = 0

    def __len__(self) -> int:
        return len(self._heap)

    def at(self, time: float, action: Action, argument: Any = None) -> None:
        """Call `action(argument)` at `time`; a time that has passed means now."""
        self._number = number = self._number + 1
        now = self.now
        heappush(self._heap, (time if time > now else now, number, action, argument))

    def after(self, delay_s: float, action: Action, argument: Any = None) -> None:
        """Call `action(argument)` in `delay_s` seconds."""
        self.at(self.now + delay_s, action, argument)

    def next_time(self) -> float | None:
        """When the next action is due, or None where nothing is left to do."""
        return self._heap[0][0] if self._heap else None

    def step(self) -> None:
        """Move to the next action and run it."""
        self.now, _, action, argument = heappop(self._heap)
        action(argument)
