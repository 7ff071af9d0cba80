"""What the driver takes for news, with a core and workers that say what the test wants."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from dora_rl.core.protocol.commands import Score, Start, Train
from dora_rl.core.protocol.events import Event, TrajectoryFailed, TrajectoryScored
from dora_rl.core.protocol.settings import Settings
from dora_rl.core.protocol.types import Fence, Segment
from dora_rl.core.state.run import TrainerPhase
from dora_rl.runtime.control import messages as ms
from dora_rl.runtime.control.driver import Driver
from dora_rl.samples import Trajectory, pack, unpack
from dora_rl.tasks.environment_pool import EnvReply
from dora_rl.tasks.scores import Outcome
from dora_rl.transports.samples.memory import SampleMemory


class World:
    """All that a driver needs. The core asks for the score of whatever has finished."""

    def __init__(self, *, environment: bool = False) -> None:
        self.samples = SampleMemory()
        self.heard: list[Event] = []
        self.rewards: list[Callable[[Outcome], None]] = []
        self.environments, self.workers = Mock(), Mock()
        encoder = Mock(decode=lambda _: "text", encode=lambda _: [1])
        task = Mock(encoder=encoder, stream=Mock(read=lambda *_: [Mock()]), rewards=("a reward",))
        task.has_environment = environment
        task.encode_opening = lambda *_: (1,)
        self.core = Mock(settings=Settings(group_size=2), handle=self._handle)
        self.core.state.trainer.phase = TrainerPhase.IDLE
        self.driver = Driver(
            self.core,
            task,
            Mock(),
            clock=Mock(),
            timer=Mock(),
            workers=self.workers,
            scorer=Mock(score=lambda job, about, reply: self.rewards.append(reply)),
            environments=self.environments,
            weights=Mock(),
            samples=self.samples,
            kv=Mock(),
        )

    def _handle(self, now: float, event: Any) -> list[Score]:
        self.heard.append(event)
        finished = type(event).__name__ == "TrajectoryFinished"
        return [Score(event.trajectory, event.fence)] if finished else []

    def finish(self, fence: Fence, *tokens: int) -> None:
        """Trajectory 0 has written this, in the placement of this fence."""
        whole = Trajectory(
            id=0,
            group=0,
            version=0,
            prompt=(1,),
            tokens=tokens,
            logprobs=(0.0,) * len(tokens),
            segments=(Segment(0, "digest", len(tokens)),),
            truncated=False,
        )
        ref = whole.by_reference(self.samples.put(pack(whole)))
        self.driver.from_rollout(0, ms.Finished(fence, ref))


# Episodes


@pytest.mark.parametrize("frozen", [True, False])
def test_an_environment_that_is_lost_takes_no_step(frozen: bool) -> None:
    """Frozen, the driver tells the core of no failure: the trajectory stays where it is."""
    world = World(environment=True)
    world.driver.perform(Start(0, 1, 0, 0))
    reply = world.environments.open.call_args.args[-1]
    reply(EnvReply(ticket=1))
    if frozen:
        world.driver.freeze()
    for _ in range(2):
        reply(EnvReply(ticket=1, failure="its worker was killed"))
    world.driver.from_rollout(0, ms.TurnEnded(0, 1, 0, (7,), room=50))
    assert not world.environments.open.return_value.step.called
    failed = TrajectoryFailed(0, 1, "environment: its worker was killed")
    assert world.heard == ([] if frozen else [failed])


# Batches


def test_a_batch_is_out_from_when_it_is_sent_until_it_is_answered() -> None:
    world = World()
    driver, trainer = world.driver, world.core.state.trainer
    assert not driver.training
    trainer.phase = TrainerPhase.TRAINING
    assert not driver.training, "a resumed run has not asked again yet"
    driver.perform(Train(0, ()))
    assert driver.training and world.workers.to_trainer.called
    trainer.phase = TrainerPhase.IDLE  # it was rejected
    assert not driver.training


def test_a_batch_that_is_held_is_not_out() -> None:
    world = World()
    world.driver.hold()
    world.core.state.trainer.phase = TrainerPhase.TRAINING
    world.driver.perform(Train(0, ()))
    assert not world.driver.training and not world.workers.to_trainer.called


# Scores


@pytest.mark.parametrize("failure", [None, "it raised"])
@pytest.mark.parametrize("late_first", [True, False])
def test_a_reward_belongs_to_the_response_that_it_was_asked_for(
    failure: str | None, late_first: bool, tmp_path: Path
) -> None:
    """The trajectory was written again, since its first reward took too long."""
    world = World()
    world.finish(1, 5, 6)
    world.finish(2, 7)
    old, new = world.rewards
    late, due = Outcome(ticket=0, reward=9.0, failure=failure), Outcome(ticket=1, reward=1.0)
    world.heard.clear()
    for reply, outcome in [(old, late), (new, due)] if late_first else [(new, due), (old, late)]:
        reply(outcome)
    sample = world.driver.buffer.sample(0)
    whole = unpack(world.samples.get(sample.trajectory.content))
    assert (sample.reward, whole.tokens) == (1.0, (7,))
    assert world.heard == [TrajectoryScored(0, 2)]


def test_the_reward_of_a_trajectory_that_is_terminal_changes_nothing() -> None:
    world = World()
    world.finish(1, 5)
    world.driver.buffer.discard(0)
    world.heard.clear()
    (reply,) = world.rewards
    reply(Outcome(ticket=0, reward=1.0))
    assert not world.heard
