"""What rewards and environments print, and where they break, reaches whoever asks for it."""

from collections.abc import Callable
from typing import Any

import pytest

from dora_rl.sandbox.output import PRINTED, TRACED
from dora_rl.sandbox.protocol import UserFunction
from dora_rl.tasks.environment_pool import EnvironmentPool
from dora_rl.tasks.scores import Outcome, ScoreJob, ScorePool
from tests.patience import PATIENCE_S
from tests.tasks import noisy


def forked(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same without an import path."""
    return lambda response: function(response)


WAYS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "imported": lambda function: function,
    "forked": forked,
}


def scored(
    function: Any, response: str = "two", timeout_s: float = PATIENCE_S
) -> tuple[Outcome, str]:
    """An outcome, and all that was logged under its ticket."""
    told: list[tuple[int, str]] = []
    part = UserFunction(name="noisy", function=function)
    with ScorePool([part], workers=1, timeout_s=timeout_s) as pool:
        pool.log = lambda ticket, text: told.append((ticket, text))
        pool.submit(7, ScoreJob(response="two"))
        while not (outcomes := pool.poll(PATIENCE_S)):
            pass
    assert all(ticket == 7 for ticket, _ in told)
    return outcomes[0], "".join(text for _, text in told)


@pytest.mark.parametrize("way", WAYS)
def test_what_a_reward_prints_is_told(way: str) -> None:
    outcome, said = scored(WAYS[way](noisy.says))
    assert outcome.reward == 1.0
    assert said == "scoring two\na warning\n"


@pytest.mark.parametrize("way", WAYS)
def test_an_exception_has_its_traceback(way: str) -> None:
    outcome, said = scored(WAYS[way](noisy.raises))
    assert outcome.failure == "reward `noisy` raised LookupError: nothing for two"
    assert said.startswith("before it breaks\nTraceback (most recent call last):\n")
    assert "in _inner" in said and "noisy.py" in said
    assert said.endswith(f"{outcome.failure}\n")


def test_the_next_request_does_not_say_it_again() -> None:
    told: list[tuple[int, str]] = []
    with ScorePool([UserFunction(name="noisy", function=noisy.raises)], workers=1) as pool:
        pool.log = lambda ticket, text: told.append((ticket, text))
        for ticket in (1, 2):
            pool.submit(ticket, ScoreJob(response=str(ticket)))
            while not pool.poll(PATIENCE_S):
                pass
    assert [ticket for ticket, _ in told] == [1, 2]
    assert "nothing for 1" not in told[1][1] and told[1][1].count("Traceback") == 1


def test_a_logger_of_the_first_request_is_heard_in_the_next() -> None:
    told: list[str] = []
    with ScorePool([UserFunction(name="noisy", function=noisy.logs)], workers=1) as pool:
        pool.log = lambda ticket, text: told.append(text)
        for response in ("one", "two"):
            assert pool.run(ScoreJob(response=response)).reward == 1.0
    assert told == ["heard one\n", "heard two\n"]


def test_a_flood_is_cut_and_what_broke_is_told_all_the_same() -> None:
    outcome, said = scored(noisy.floods)
    assert "after the flood" in str(outcome.failure)
    assert said.startswith("x" * 100) and "more characters]" in said
    assert "ValueError: after the flood" in said
    assert len(said) < PRINTED + TRACED + 1000


def test_output_without_end_ends_with_the_time_limit() -> None:
    outcome, said = scored(noisy.never_ends, timeout_s=0.5)
    assert outcome.failure == "timeout after 0.5 s"
    assert said == "timeout after 0.5 s\n"


@pytest.mark.parametrize(
    "function", [noisy.steers, noisy.takes_the_streams, noisy.uses_all_of_the_stream]
)
def test_whatever_it_does_to_the_streams_the_reward_counts(function: Any) -> None:
    outcome, _ = scored(function)
    assert outcome.reward == 1.0 and outcome.failure is None


def test_what_cannot_be_shown_fails_as_before() -> None:
    outcome, said = scored(noisy.raises_what_cannot_be_shown)
    assert outcome.failure is not None and "Unshown" in outcome.failure
    assert said.endswith(f"{outcome.failure}\n")


def test_an_environment_is_told_alike() -> None:
    told: list[tuple[int, str]] = []
    with EnvironmentPool(UserFunction(name="room", function=noisy.Room), workers=1) as pool:
        pool.log = lambda ticket, text: told.append((ticket, text))
        pool.open(3, {})
        while not pool.poll(PATIENCE_S):
            pass
        pool.step(3, "break")
        while not pool.poll(PATIENCE_S):
            pass
    assert told[0] == (3, "a room is opened\n")
    ticket, said = told[1]
    assert ticket == 3 and said.startswith("it hears break\nTraceback")
    assert said.endswith("step raised OSError: the room is broken\n")
