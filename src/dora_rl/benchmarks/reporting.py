"""What a measurement tells while it runs: what it does, and what it has measured so far.

Every `measure` is handed a `Reporter`. It registers, once, the function that makes a result of
what was collected; after that the result can be shown at any moment, whole or not:

    samples = []
    reporter.collects(lambda: Result(samples) if samples else None)
    reporter.phase("batch 8")
    for repeat in repeats(3, budget_s=60):
        reporter.step(f"repeat {repeat + 1} of 3")
        samples.append(...)        # one append for each measurement: an interrupt finds it or not
    return Result(samples)

Knows neither the terminal nor what is measured.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol


class Result(Protocol):
    """Must not need anything that ends with the measurement, such as files or processes."""

    def to_json(self) -> dict[str, Any]: ...
    def summary(self) -> list[str]: ...


class Say(Protocol):
    """Shows a line of progress; `begins` if a phase begins with it."""

    def __call__(self, line: str, begins: bool) -> None: ...


def _nobody(line: str, begins: bool) -> None:
    """Nobody listens."""


class Reporter:
    def __init__(self, say: Say = _nobody) -> None:
        self._say = say
        self._phase = ""
        self._result: Callable[[], Result | None] = lambda: None

    def collects(self, result: Callable[[], Result | None]) -> None:
        """Register what makes a result of the measurements so far; None if there are none."""
        self._result = result

    def so_far(self) -> Result | None:
        return self._result()

    def phase(self, name: str) -> None:
        """A part of the measurement that takes a while begins."""
        self._phase = name
        self._say(name, True)

    def step(self, what: str) -> None:
        """Something within the phase begins."""
        self._say(f"{self._phase}, {what}", False)


def repeats(
    count: int, budget_s: float, clock: Callable[[], float] = time.monotonic
) -> Iterator[int]:
    """The numbers from 0, `count` of them, but for those that would end after the budget.

    A repeat is expected to take as long as the longest so far. The first one is always given.
    """
    began = clock()
    longest = 0.0
    for number in range(count):
        at = clock()
        if number and at - began + longest > budget_s:
            return
        yield number
        longest = max(longest, clock() - at)
