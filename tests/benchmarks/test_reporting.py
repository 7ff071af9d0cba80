"""What a measurement tells, and how its phases are bounded."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_rl.benchmarks.orchestrator import Result as OrchestratorResult
from dora_rl.benchmarks.orchestrator import measure
from dora_rl.benchmarks.reporting import Reporter, repeats
from tests.benchmarks import stubs


def test_steps_are_told_with_their_phase() -> None:
    told: list[tuple[str, bool]] = []
    reporter = Reporter(lambda line, begins: told.append((line, begins)))
    reporter.phase("batch 8")
    reporter.step("repeat 1 of 2")
    assert told == [("batch 8", True), ("batch 8, repeat 1 of 2", False)]


def test_there_is_nothing_to_show_before_something_is_collected() -> None:
    reporter = Reporter()
    assert reporter.so_far() is None
    sizes: list[OrchestratorResult] = []
    reporter.collects(lambda: sizes[-1] if sizes else None)
    assert reporter.so_far() is None
    sizes.append(measure([2], 10))
    assert reporter.so_far() is sizes[0]


def taken(count: int, budget_s: float, seconds: list[float]) -> list[int]:
    """Which repeats are made if they take so long."""
    now = [0.0]
    made = []
    for number in repeats(count, budget_s, lambda: now[0]):
        made.append(number)
        now[0] += seconds[number % len(seconds)]
    return made


@pytest.mark.parametrize(
    ("count", "budget_s", "seconds", "made"),
    [
        (3, 100.0, [10.0], 3),
        (5, 35.0, [10.0], 3),
        (5, 30.0, [10.0], 3),
        (5, 1.0, [10.0], 1),  # the first is always made
        (5, 35.0, [1.0, 20.0, 1.0], 2),  # the longest is expected again
    ],
)
def test_a_repeat_that_would_not_fit_is_not_begun(
    count: int, budget_s: float, seconds: list[float], made: int
) -> None:
    assert taken(count, budget_s, seconds) == list(range(made))


@given(st.integers(1, 20), st.floats(0.1, 100), st.floats(0.01, 50))
def test_equal_repeats_never_end_after_the_budget(count: int, budget: float, each: float) -> None:
    made = len(taken(count, budget, [each]))
    assert made == 1 or made * each <= budget * (1 + 1e-9)


def test_the_orchestrators_sizes_can_be_shown_at_any_moment() -> None:
    def small(reporter: Reporter) -> OrchestratorResult:
        return measure([4, 8], 9_000, reporter)  # three turns of each

    shown = stubs.interrupted_everywhere(small)
    assert len(shown) >= 2
    for result in shown:
        assert isinstance(result, OrchestratorResult)
        assert [size.instances for size in result.sizes] == [4, 8]
    events = [sum(size["events"] for size in result.to_json()["sizes"]) for result in shown]
    assert events == sorted(events) and events[0] > 0
