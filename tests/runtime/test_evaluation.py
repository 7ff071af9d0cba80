"""Evaluations that are cut short: what was asked for one is not taken for the next."""

from collections import Counter
from collections.abc import Sequence
from typing import Any
from unittest.mock import Mock

import pytest

from dora_rl.core import events as ev
from dora_rl.core.events import Event
from dora_rl.core.types import Segment, Version
from dora_rl.runtime import messages as ms
from dora_rl.runtime.evaluation import EVALUATOR, FIRST_TICKET, EvalRecord, Examiner
from dora_rl.samples import Trajectory
from dora_rl.tasks.workers.scores import Outcome
from dora_rl.tasks.workers.sessions import EnvReply

PROMPTS = 3


class World:
    """Who generates and who scores; both answer when the test says so."""

    def __init__(self, *, rewards: bool = True, environment: bool = False) -> None:
        self.begun: list[ms.Begin] = []
        self.jobs: list[int] = []
        self.opened: list[int] = []
        self.steps: list[int] = []
        self.open: Counter[int] = Counter()
        self.records: list[EvalRecord] = []
        self.posted: list[Event] = []
        encoder = Mock(encode=lambda *_: [1], decode=lambda _: "x", observation=lambda _: [2])
        prompts = [Mock(example={}) for _ in range(PROMPTS)]
        self.task = Mock(
            encoder=encoder,
            eval_stream=Mock(read=lambda first, count: prompts[first : first + count]),
            settings=Mock(eval_every=1, eval_samples=1, max_turns=9),
            rewards=("a reward",) if rewards else (),
            has_environment=environment,
        )
        self.examiner = Examiner(self.task, self, self.posted.append, 60.0, [self.records.append])

    # Outside

    def now(self) -> float:
        return 0.0

    def to_evaluator(self, message: ms.ToRollout) -> None:
        if isinstance(message, ms.Begin):
            self.begun.append(message)

    def score(self, ticket: int, job: Any) -> None:
        self.jobs.append(ticket)

    def open_episode(self, ticket: int, example: dict[str, object]) -> None:
        assert ticket not in self.opened, "a ticket is used once"
        self.opened.append(ticket)
        self.open[ticket] = 1

    def step_episode(self, ticket: int, text: str) -> None:
        self.steps.append(ticket)

    def discard_episode(self, ticket: int) -> None:
        del self.open[ticket]

    # What the others say

    def publish(self, *versions: Version) -> None:
        for version in versions:
            self.examiner.observed(0.0, ev.WeightsPublished(version, "digest"), [])

    def install(self, version: Version) -> None:
        self.report(ev.VersionInstalled(EVALUATOR, 0, version, "digest"))

    def report(self, event: Event) -> None:
        self.examiner.from_evaluator(ms.Reported.of(event))

    def finish(self, begun: Sequence[ms.Begin]) -> None:
        for message in begun:
            whole = Trajectory(
                trajectory=message.trajectory,
                group=message.group,
                version=message.version,
                prompt=message.prompt,
                tokens=(1, 2),
                logprobs=(0.0, 0.0),
                segments=(Segment(message.version, "digest", 2),),
                truncated=False,
            )
            self.examiner.from_evaluator(ms.Finished(message.fence, whole))

    def reward(self, tickets: Sequence[int], reward: float, failure: str | None = None) -> None:
        for ticket in tickets:
            self.examiner.scored(Outcome(ticket=ticket, reward=reward, failure=failure))

    @property
    def found(self) -> list[tuple[Version, int, int, float]]:
        return [(r.version, r.responses, r.failed, r.reward_mean) for r in self.records]


@pytest.mark.parametrize("failure", [None, "it raised"])
@pytest.mark.parametrize("generated", [False, True])
def test_rewards_of_a_lost_evaluation_are_not_those_of_the_next(
    failure: str | None, generated: bool
) -> None:
    world = World()
    world.publish(1, 2)
    world.install(1)
    world.finish(world.begun)
    old = list(world.jobs)
    assert len(old) == PROMPTS and min(old) >= FIRST_TICKET
    world.examiner.lost()
    world.install(2)
    if generated:
        world.finish(world.begun[PROMPTS:])
    world.reward(old, 9.0, failure)  # they were being computed
    if not generated:
        world.finish(world.begun[PROMPTS:])
    world.reward(world.jobs[PROMPTS:], 1.0)
    assert world.found == [(1, 0, PROMPTS, 0.0), (2, PROMPTS, 0, 1.0)]
    assert not world.examiner.busy


def test_nothing_is_scored_before_it_is_written() -> None:
    world = World()
    world.publish(1)
    world.install(1)
    world.reward(range(FIRST_TICKET, FIRST_TICKET + PROMPTS), 9.0)
    assert not world.found
    world.finish(world.begun)
    world.reward(world.jobs, 1.0)
    assert world.found == [(1, PROMPTS, 0, 1.0)]


def test_episodes_of_a_lost_evaluation_are_discarded_and_not_heard() -> None:
    world = World(rewards=False, environment=True)
    world.publish(1, 2)
    world.install(1)
    old = list(world.opened)
    world.examiner.answered(EnvReply(ticket=old[0]))
    world.examiner.lost()
    assert not +world.open
    world.install(2)
    new = world.opened[PROMPTS:]
    for ticket in old:
        world.examiner.answered(EnvReply(ticket=ticket, reward=9.0))
    assert len(world.begun) == 1, "nobody of the second has been answered yet"
    for ticket in new:
        world.examiner.answered(EnvReply(ticket=ticket, reward=1.0))
    world.finish(world.begun[1:])
    assert world.found == [(1, 0, PROMPTS, 0.0), (2, PROMPTS, 0, 1.0)]
    assert not +world.open


def test_the_episode_of_a_trajectory_that_failed_is_discarded() -> None:
    world = World(environment=True)
    world.publish(1)
    world.install(1)
    for ticket in world.opened:
        world.examiner.answered(EnvReply(ticket=ticket))
    for message in world.begun:
        world.report(ev.TrajectoryFailed(message.trajectory, message.fence, "too long"))
    assert world.found == [(1, 0, PROMPTS, 0.0)]
    assert not +world.open


def test_a_turn_goes_to_the_episode_of_its_own_evaluation() -> None:
    world = World(rewards=False, environment=True)
    world.publish(1, 2)
    world.install(1)
    world.examiner.lost()
    world.install(2)
    new = world.opened[PROMPTS:]
    world.examiner.answered(EnvReply(ticket=new[1]))
    (begun,) = world.begun
    ended = ms.TurnEnded(begun.trajectory, begun.fence, 0, (1,), room=50)
    world.examiner.from_evaluator(ended)
    assert world.steps == [new[1]]
