"""Rewards and environments for two askers: each reply goes to who asked, under its own name."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from dora_rl.runtime.control.task_workers import TaskWorkers
from dora_rl.sandbox.protocol import UserFunction
from dora_rl.tasks.environment_pool import EnvironmentPool, EnvReply
from dora_rl.tasks.scores import Outcome, ScoreJob, ScorePool
from tests.patience import PATIENCE_S
from tests.runtime.rewards import Counting

ASKERS = ("trajectory 0", "evaluation")


def noisy(response: str, example: dict[str, Any]) -> float:
    print(response)
    return float(len(response))


@pytest.fixture
def log() -> dict[str, list[str]]:
    return defaultdict(list)


@pytest.fixture
def workers(log: dict[str, list[str]]) -> Iterator[TaskWorkers]:
    task: Any = SimpleNamespace(
        rewards=(UserFunction(name="noisy", function=noisy),),
        has_environment=True,
        score_pool=lambda: ScorePool(
            [UserFunction(name="noisy", function=noisy)], workers=1, timeout_s=PATIENCE_S
        ),
        environment_pool=lambda: EnvironmentPool(
            UserFunction(name="counting", function=Counting), workers=1, timeout_s=PATIENCE_S
        ),
    )
    found = TaskWorkers(task, lambda about, text: log[about].append(text))
    found.start()
    yield found
    found.close()


def until(done: Callable[[], bool], poll: Callable[[float], int]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < deadline, f"not done after {PATIENCE_S:.0f} s"
        poll(1.0)


def test_outcomes_and_what_rewards_print_go_to_who_asked(
    workers: TaskWorkers, log: dict[str, list[str]]
) -> None:
    found: dict[str, list[float]] = {about: [] for about in ASKERS}

    def take(about: str, outcome: Outcome) -> None:
        found[about].append(outcome.reward)

    for length in (1, 2, 3):
        for about in ASKERS:
            text = about[0] * length
            workers.score(ScoreJob(response=text), about, partial(take, about))
    until(lambda: sum(map(len, found.values())) == 6, workers.poll_scores)
    assert found == {about: [1.0, 2.0, 3.0] for about in ASKERS}
    for about in ASKERS:
        assert "".join(log[about]).split() == [about[0] * n for n in (1, 2, 3)]


def test_a_session_replies_to_who_opened_it_until_it_is_discarded(workers: TaskWorkers) -> None:
    heard: dict[str, list[Any]] = {about: [] for about in ASKERS}
    sessions = {
        about: workers.open({"prompt": about, "turns": 9}, about, heard[about].append)
        for about in ASKERS
    }
    until(lambda: all(heard.values()), workers.poll_environments)
    assert [heard[about][0].observation for about in ASKERS] == [f"{a} begin" for a in ASKERS]
    for about in ASKERS:
        sessions[about].step("x")
    sessions[ASKERS[0]].discard()
    sessions[ASKERS[0]].discard()  # it has ended already
    until(lambda: len(heard[ASKERS[1]]) == 2, workers.poll_environments)
    assert heard[ASKERS[1]][1].reward == 1.0
    sessions[ASKERS[1]].step("x")
    until(lambda: len(heard[ASKERS[1]]) == 3, workers.poll_environments)
    assert len(heard[ASKERS[0]]) == 1


def test_a_session_that_another_reply_discards_is_not_heard() -> None:
    """Both replies came at once: the second is of a session that has ended meanwhile."""
    pool = Mock(poll=lambda _: [EnvReply(ticket=ticket) for ticket in (0, 1)])
    task: Any = SimpleNamespace(rewards=(), has_environment=True, environment_pool=lambda: pool)
    workers = TaskWorkers(task, Mock())
    workers.start()
    heard: list[int] = []

    def take(reply: EnvReply) -> None:
        heard.append(reply.ticket)
        for session in sessions:
            session.discard()

    sessions = [workers.open({}, about, take) for about in ASKERS]
    assert workers.poll_environments() == 2
    assert heard == [0]
