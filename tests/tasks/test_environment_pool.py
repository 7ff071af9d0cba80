"""Environments in processes: episodes keep their state, and know whose fault their end was."""

from collections.abc import Iterator
from typing import Any

import pytest

from dora_rl.sandbox.errors import LoadError
from dora_rl.sandbox.protocol import UserFunction
from dora_rl.tasks.environment_pool import EnvironmentPool, EnvReply
from dora_rl.tasks.errors import TaskError
from tests.patience import PATIENCE_S
from tests.tasks import samples
from tests.tasks.processes import time_limit


def pool_of(environment: Any, **settings: Any) -> EnvironmentPool:
    settings = {"workers": 1, "timeout_s": PATIENCE_S, "memory_mb": 256} | settings
    return EnvironmentPool(UserFunction(name="count", function=environment), **settings)


@pytest.fixture
def pool() -> Iterator[EnvironmentPool]:
    with pool_of("tests.tasks.samples:Count") as pool:
        yield pool


def replies(pool: EnvironmentPool, count: int) -> dict[int, EnvReply]:
    found: dict[int, EnvReply] = {}
    while len(found) < count:
        batch = pool.poll(PATIENCE_S)
        assert batch, f"{len(found)} of {count} replies"
        for reply in batch:
            assert reply.ticket not in found
            found[reply.ticket] = reply
    assert pool.poll() == []
    return found


def say(pool: EnvironmentPool, ticket: int, text: str) -> EnvReply:
    pool.step(ticket, text)
    return replies(pool, 1)[ticket]


@pytest.mark.parametrize(
    "environment", [samples.Count, samples.AsyncCount, lambda: samples.Count()]
)
def test_episodes_keep_their_state(environment: Any) -> None:
    with pool_of(environment, workers=2) as pool:
        for ticket in range(6):
            pool.open(ticket, {"n": ticket + 1})
        first = replies(pool, 6)
        assert {t: r.observation for t, r in first.items()} == {
            t: f"count to {t + 1}" for t in range(6)
        }
        for turn in range(1, 4):
            for ticket in range(6):
                pool.step(ticket, "go on")
            for ticket, reply in replies(pool, 6).items():
                assert reply.observation == f"{turn} of {ticket + 1}"
                assert reply.reward == turn
                assert reply.done == (turn > ticket)
                assert reply.failure is None


def test_episodes_spread_over_the_workers() -> None:
    with pool_of(samples.Count, workers=2) as pool:
        pool.open(0, {"n": 1})
        replies(pool, 1)
        for ticket in range(1, 8):
            pool.open(ticket, {"n": 1})
        replies(pool, 7)
        for ticket in range(8):
            pool.step(ticket, "who")
        homes = [reply.observation for reply in replies(pool, 8).values()]
    assert sorted(homes.count(home) for home in set(homes)) in ([4, 4], [3, 5])


@pytest.mark.parametrize(
    "first", [None, "hello", [{"role": "user", "content": "hello"}]], ids=["row", "text", "chat"]
)
def test_the_first_observation(pool: EnvironmentPool, first: Any) -> None:
    pool.open(1, {"n": 1, "first": first})
    assert replies(pool, 1)[1].observation == first


def test_a_wrong_first_observation(pool: EnvironmentPool) -> None:
    pool.open(1, {"n": 1, "first": 3})
    assert "reset must return text, messages or None" in str(replies(pool, 1)[1].failure)
    assert pool.episodes == []


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("raise", "step raised ValueError: no such luck"),
        ("wrong", "step must return (observation, reward, done): `'only text'`. Return a Step."),
    ],
)
def test_a_failed_step_ends_its_own_episode_alone(
    pool: EnvironmentPool, what: str, why: str
) -> None:
    pool.open(1, {"n": 3})
    pool.open(2, {"n": 3})
    replies(pool, 2)
    assert say(pool, 1, what).failure == why
    assert pool.episodes == [2]
    assert say(pool, 2, "on").observation == "1 of 3"


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("hang", "timeout after 1.0 s"),
        ("vanish", "the worker exited with code 3"),
        ("crash", "the worker was killed by SIGSEGV"),
    ],
)
def test_neighbours_learn_that_it_was_not_their_fault(what: str, why: str) -> None:
    with pool_of(samples.Count, workers=2) as pool:
        for ticket in range(4):
            pool.open(ticket, {"n": 9})
        replies(pool, 4)
        homes = {ticket: say(pool, ticket, "who").observation for ticket in range(4)}
        victims = {t for t in homes if homes[t] == homes[0]}
        pool.step(0, what)
        for neighbour in victims - {0}:
            pool.step(neighbour, "waits in vain")
        with time_limit(pool, 1.0 if what == "hang" else PATIENCE_S):
            lost = replies(pool, len(victims))
        assert lost.keys() == victims
        assert lost.pop(0).failure == why
        assert {r.failure for r in lost.values()} <= {
            f"another episode on its worker failed: {why}"
        }
        for survivor in set(homes) - victims:
            assert say(pool, survivor, "on").observation == "2 of 9"
        pool.open(0, {"n": 1})
        assert replies(pool, 1)[0].observation == "count to 1"


def test_a_discarded_episode_is_closed_and_not_heard(pool: EnvironmentPool) -> None:
    pool.open(1, {"n": 3})
    pool.open(2, {"n": 3})
    replies(pool, 2)
    pool.step(1, "on")
    pool.discard(1)
    pool.discard(1)
    pool.open(1, {"n": 5})
    assert replies(pool, 1)[1].observation == "count to 5"
    assert say(pool, 2, "closed").observation == "1"
    assert pool.episodes == [2, 1]


def test_an_episode_that_waits_for_a_worker_can_be_discarded(pool: EnvironmentPool) -> None:
    for ticket in range(5):
        pool.open(ticket, {"n": 1})
    pool.discard(4)
    assert replies(pool, 4).keys() == {0, 1, 2, 3}


def test_calls_out_of_turn_are_refused(pool: EnvironmentPool) -> None:
    with pytest.raises(ValueError, match=r"episode 1 is not there"):
        pool.step(1, "on")
    pool.open(1, {"n": 1})
    with pytest.raises(ValueError, match=r"episode 1 is open already"):
        pool.open(1, {"n": 1})
    with pytest.raises(ValueError, match=r"has not answered yet"):
        pool.step(1, "on")
    with pytest.raises(TaskError, match=r"an example must be JSON"):
        pool.open(2, {"n": object()})
    assert replies(pool, 1).keys() == {1}


def test_what_is_no_environment_is_said_at_once() -> None:
    with pytest.raises(LoadError, match=r"task.environment has no `step`"):
        pool_of(samples.NoStep)
    with pytest.raises(LoadError, match=r"task.environment must be a class"):
        pool_of("tests.tasks.samples:NOT_CALLABLE")


def test_tools_are_called() -> None:
    with pool_of(samples.Calculator) as pool:
        pool.open(1, {"answer": "4"})
        assert replies(pool, 1)[1].observation is None
        call = '<tool>{"name": "divide", "arguments": {"a": 8, "b": 2}}</tool>'
        later = '```json\n{"tool": "later", "args": {"x": 1}}\n```'
        assert say(pool, 1, call + later).observation == "4.0\n2"
        assert "ZeroDivisionError" in str(say(pool, 1, call.replace("2", "0")).observation)
        assert "no tool `eval`" in str(say(pool, 1, call.replace("divide", "eval")).observation)
        assert "error: TypeError" in str(say(pool, 1, call.replace('"b"', '"c"')).observation)
        last = say(pool, 1, "4")
        assert (last.observation, last.reward, last.done) == ("", 1.0, True)
