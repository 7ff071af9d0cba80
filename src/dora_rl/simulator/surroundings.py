"""What every engine of one world shares: time, costs, accounts."""

from collections.abc import Callable
from typing import Protocol

from dora_rl.simulator.clock import Clock
from dora_rl.simulator.costs import Costs
from dora_rl.simulator.runs import Run
from dora_rl.simulator.usage import Facts, Recorder, Usage


class Settles(Protocol):
    """Something that must be put in order before time advances."""

    def settle(self) -> None:
        """Do so."""


class Surroundings:
    """Handed to every part at its making; parts know it, and not each other."""

    __slots__ = ("clock", "costs", "dirty", "facts", "hangs", "recorder", "usage")

    def __init__(self, clock: Clock, costs: Costs, recorder: Recorder | None) -> None:
        self.clock = clock
        self.costs = costs
        self.usage = Usage()
        self.facts = Facts()
        self.recorder = recorder
        self.dirty: list[Settles] = []  # to settle before time advances
        self.hangs: Callable[[Run], bool] | None = None  # draws endless environments
