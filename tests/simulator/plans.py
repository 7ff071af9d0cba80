"""Questions that tests plan, small enough for seconds, and how they are planned."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from dora_rl.simulator.planning import Plan, Question, make_plan, pose, search
from dora_rl.simulator.planning.reduction import reduce, without_own_sizes
from dora_rl.simulator.simulate import Result, simulate

LONG_TAIL = Question(
    model="qwen2.5-1.5b",
    devices=8,
    batch=(16, 4),
    mean_length=500,
    max_length=6000,
    overrides=("rollout.slots=8", "efficiency.switch_s=2"),
)
ALL_ALIKE = Question(
    model="qwen2.5-1.5b",
    devices=2,
    batch=(16, 4),
    mean_length=500,
    length_sigma=0,
    overrides=("rollout.slots=8", "efficiency.switch_s=0"),
)
UNSURE = replace(LONG_TAIL, overrides=("rollout.slots=8",))  # of every fixed cost
SMALL = replace(UNSURE, devices=2, batch=(4, 2), max_length=1000)


def frozen() -> float:
    """A clock that never lets the budget end."""
    return 0.0


def planned(question: Question, **options: Any) -> Plan:
    return make_plan(pose(question), clock=frozen, **options)


def searched(question: Question) -> search.Search:
    """A search that has simulated nothing yet, at full size."""
    reduction = reduce(without_own_sizes(pose(question).scenario), 1e9, 4)
    return search.Search(reduction, 4, 1.0)


def interrupt_after(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Iterator[int] = iter(range(1000))

    def run(*args: Any) -> Result:
        if next(calls) == count:
            raise KeyboardInterrupt
        return simulate(*args)

    monkeypatch.setattr(search, "simulate", run)
