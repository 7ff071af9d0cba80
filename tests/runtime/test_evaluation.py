"""Evaluations that are cut short: what was asked for one is not taken for the next."""

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import Mock

import pytest

from dora_rl.core.protocol import events as ev
from dora_rl.core.protocol.events import Event
from dora_rl.core.protocol.types import Length, Segment, Version
from dora_rl.core.state.versions import Versions
from dora_rl.runtime.control import messages as ms
from dora_rl.runtime.control.decisions import EVALUATOR_INSTANCE
from dora_rl.runtime.control.evaluator import EvalRecord, Evaluator
from dora_rl.samples import Trajectory, pack
from dora_rl.tasks.environment_pool import EnvReply
from dora_rl.tasks.scores import Outcome
from dora_rl.transports.samples.memory import SampleMemory

PROMPTS = 3
TIMEOUT_S = 60.0


class Env:
    """One session; the test says what it replies."""

    def __init__(self, reply: Callable[[EnvReply], None]) -> None:
        self._reply = reply
        self.steps = 0
        self.open = True

    def step(self, text: str) -> None:
        self.steps += 1

    def discard(self) -> None:
        self.open = False

    def says(self, **said: Any) -> None:
        self._reply(EnvReply(ticket=0, **said))


class World:
    """Who generates and who scores; both answer when the test says so."""

    def __init__(self, *, rewards: bool = True, environment: bool = False) -> None:
        self.time = 0.0
        self.begun: list[ms.Begin] = []
        self.concluded: list[ms.Conclude] = []
        self.jobs: list[Callable[[Outcome], None]] = []
        self.opened: list[Env] = []
        self.records: list[EvalRecord] = []
        self.posted: list[Event] = []
        encoder = Mock(encode=lambda *_: [1], decode=lambda _: "x", observation=lambda _: [2])
        prompts = [Mock(example={}) for _ in range(PROMPTS)]
        self.task = Mock(
            encoder=encoder,
            encode_opening=lambda *_: (1,),
            eval_stream=Mock(read=lambda first, count: prompts[first : first + count]),
            settings=Mock(eval_every=1, eval_samples=1, max_turns=9),
            rewards=("a reward",) if rewards else (),
            has_environment=environment,
        )
        outside: Any = self
        self.samples = SampleMemory()
        self.evaluator = Evaluator(
            self.task,
            self.posted.append,
            TIMEOUT_S,
            [self.records.append],
            clock=outside,
            workers=outside,
            samples=self.samples,
            scorer=outside,
            environments=outside,
        )

    # Its services

    def now(self) -> float:
        return self.time

    def to_evaluator(self, message: ms.ToRollout) -> None:
        if isinstance(message, ms.Begin):
            self.begun.append(message)
        if isinstance(message, ms.Conclude):
            self.concluded.append(message)

    def score(self, job: Any, about: str, reply: Callable[[Outcome], None]) -> None:
        assert about == "evaluation"
        self.jobs.append(reply)

    def open(
        self, example: dict[str, object], about: str, reply: Callable[[EnvReply], None]
    ) -> Env:
        assert about == "evaluation"
        self.opened.append(Env(reply))
        return self.opened[-1]

    @property
    def still_open(self) -> list[Env]:
        return [environment for environment in self.opened if environment.open]

    # What the others say

    def publish(self, *versions: Version) -> None:
        for version in versions:
            self.evaluator.observed(0.0, ev.WeightsPublished(version, "digest"), [])

    def install(self, version: Version) -> None:
        self.report(ev.VersionInstalled(EVALUATOR_INSTANCE, 0, version, "digest"))

    def report(self, event: Event) -> None:
        arrived = ms.decode(ms.encode(ms.Reported.of(event)))
        assert isinstance(arrived, ms.Reported)
        self.evaluator.from_evaluator(arrived)

    def finish(self, begun: Sequence[ms.Begin]) -> None:
        for message in begun:
            whole = Trajectory(
                id=message.trajectory,
                group=message.group,
                version=message.version,
                prompt=message.prompt,
                tokens=(1, 2),
                logprobs=(0.0, 0.0),
                segments=(Segment(message.version, "digest", 2),),
                truncated=False,
            )
            ref = whole.by_reference(self.samples.put(pack(whole)))
            self.evaluator.from_evaluator(ms.Finished(message.fence, ref))

    def reward(
        self,
        jobs: Sequence[Callable[[Outcome], None]],
        reward: float,
        failure: str | None = None,
    ) -> None:
        for reply in jobs:
            reply(Outcome(ticket=0, reward=reward, failure=failure))

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
    assert len(old) == PROMPTS
    world.evaluator.lost()
    world.install(2)
    if generated:
        world.finish(world.begun[PROMPTS:])
    world.reward(old, 9.0, failure)  # they were being computed
    if not generated:
        world.finish(world.begun[PROMPTS:])
    world.reward(world.jobs[PROMPTS:], 1.0)
    assert world.found == [(1, 0, PROMPTS, 0.0), (2, PROMPTS, 0, 1.0)]
    assert not world.evaluator.busy


def test_nothing_is_scored_before_it_is_written() -> None:
    world = World()
    world.publish(1)
    world.install(1)
    assert not world.jobs, "there is nobody to reply to yet"
    world.finish(world.begun)
    world.reward(world.jobs, 1.0)
    assert world.found == [(1, PROMPTS, 0, 1.0)]


def test_episodes_of_a_lost_evaluation_are_discarded_and_not_heard() -> None:
    world = World(rewards=False, environment=True)
    world.publish(1, 2)
    world.install(1)
    old = list(world.opened)
    old[0].says()
    world.evaluator.lost()
    assert not world.still_open
    world.install(2)
    new = world.opened[PROMPTS:]
    for environment in old:
        environment.says(reward=9.0)  # under way when it was discarded
    assert len(world.begun) == 1, "nobody of the second has been answered yet"
    for environment in new:
        environment.says(reward=1.0)
    world.finish(world.begun[1:])
    assert world.found == [(1, 0, PROMPTS, 0.0), (2, PROMPTS, 0, 1.0)]
    assert not world.still_open


@pytest.mark.parametrize("end", [ev.TrajectoryFailed, ev.TrajectoryRefused])
def test_the_episode_of_a_trajectory_that_failed_is_discarded(end: Any) -> None:
    world = World(environment=True)
    world.publish(1)
    world.install(1)
    for environment in world.opened:
        environment.says()
    for message in world.begun:
        world.report(end(message.trajectory, message.fence, "too long"))
    assert world.found == [(1, 0, PROMPTS, 0.0)]
    assert not world.still_open


def test_a_turn_goes_to_the_episode_of_its_own_evaluation() -> None:
    world = World(rewards=False, environment=True)
    world.publish(1, 2)
    world.install(1)
    world.evaluator.lost()
    world.install(2)
    new = world.opened[PROMPTS:]
    new[1].says()
    (begun,) = world.begun
    ended = ms.TurnEnded(begun.trajectory, begun.fence, 0, (1,), room=50)
    world.evaluator.from_evaluator(ended)
    assert [environment.steps for environment in new] == [0, 1, 0]


@pytest.mark.parametrize("done", [False, True])
def test_an_episode_is_truncated_by_an_observation_without_room_alone(done: bool) -> None:
    world = World(rewards=False, environment=True)
    world.publish(1)
    world.install(1)
    world.opened[0].says()
    (begun,) = world.begun
    # One token is left, and the observation is one: nothing could be sampled after it.
    world.evaluator.from_evaluator(ms.TurnEnded(begun.trajectory, begun.fence, 0, (1,), room=1))
    world.opened[0].says(observation="x", done=done)
    assert [message.truncated for message in world.concluded] == [not done]


def test_what_has_a_record_is_not_evaluated_again_when_the_run_goes_on() -> None:
    """The core did not hear that it was done: the run was killed, or had come to its end."""
    world, versions = World(), Versions()
    for version in range(4):
        versions.publish(version, "digest")
    for version in (0, 1, 2):
        versions.live[version].pins.add("evaluation")
    world.evaluator.take_over(versions, 1, halted=False)
    assert world.posted == [ev.VersionUnpinned(version, "evaluation") for version in (0, 1)]
    world.install(2)
    world.finish(world.begun)
    world.reward(list(world.jobs), 1.0)
    assert [record.version for record in world.records] == [2]
    assert not world.evaluator.busy


def test_what_is_due_when_an_ended_run_goes_on_is_evaluated_in_order_and_once() -> None:
    world, versions = World(), Versions()
    for version in range(4):
        versions.publish(version, "digest")
    for version in (2, 3):
        versions.live[version].pins.add("evaluation")
    world.evaluator.take_over(versions, 1, halted=True)
    for version in (2, 3):
        world.install(version)
        world.finish(world.begun)
        world.reward(list(world.jobs), 1.0)
    assert [record.version for record in world.records] == [2, 3]
    assert not world.evaluator.busy


# How long nothing may come


def heartbeat(*lengths: Length) -> ev.InstanceProgressed:
    return ev.InstanceProgressed(EVALUATOR_INSTANCE, 0, 5, lengths)


def later(world: World, act: Callable[[], object]) -> bool:
    """Whether an act, just before the evaluation would be overdue, puts that off."""
    world.time += TIMEOUT_S - 1.0
    act()
    world.time += 2.0
    return not world.evaluator.overdue(world.time)


def test_heartbeats_do_not_put_off_that_an_evaluation_is_overdue() -> None:
    world = World()
    world.publish(1)
    world.install(1)
    assert later(world, lambda: world.report(heartbeat(Length(0, 2, 5))))
    assert not later(world, lambda: world.report(heartbeat()))
    used = ms.Used(1.0, 1.0, 1, 1, 0, 0)
    assert not later(world, lambda: world.evaluator.from_evaluator(used))


def test_rewards_put_off_that_an_evaluation_is_overdue() -> None:
    """The evaluator itself has nothing more to say."""
    world = World()
    world.publish(1, 2)
    world.install(1)
    world.finish(world.begun)
    lost = list(world.jobs)
    assert later(world, lambda: world.reward(lost[:1], 1.0))
    world.evaluator.lost()
    world.install(2)
    assert not later(world, lambda: world.reward(lost[1:], 1.0)), "they are of another evaluation"


@pytest.mark.parametrize("said", [{}, {"failure": "its worker was killed"}])
def test_environments_put_off_that_an_evaluation_is_overdue(said: dict[str, Any]) -> None:
    world = World(rewards=False, environment=True)
    world.publish(1)
    world.install(1)
    first, *_ = world.opened
    assert later(world, first.says)  # its opening
    (begun,) = world.begun
    world.evaluator.from_evaluator(ms.TurnEnded(begun.trajectory, begun.fence, 0, (1,), room=50))
    assert later(world, lambda: first.says(**said))
