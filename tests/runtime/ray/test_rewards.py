"""Reward workers on nodes: jobs in, outcomes out, every job exactly one, whatever is lost."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest

from dora_rl.core.protocol.commands import Command
from dora_rl.core.protocol.errors import UserError
from dora_rl.core.protocol.events import Event, TrajectoryFinished
from dora_rl.runtime.control.listeners import Listener
from dora_rl.runtime.errors import RunFailed
from dora_rl.runtime.execution import carry_out
from dora_rl.runtime.prepare.plan import prepare, read_config
from dora_rl.tasks.scores import Outcome, ScoreJob
from tests.runtime.harness import PROMPTS, Seen, assert_sound, run, settings
from tests.runtime.test_local import ALONE, by
from tests.runtime.test_local import nobody_is_left_behind as nobody_is_left_behind

pytestmark = pytest.mark.ray
ZYGOTE = "dora_rl.sandbox.zygote_main"


class RewardKiller(Listener):
    """Kills the actor of a reward worker once some trajectories have finished."""

    def __init__(self) -> None:
        self.left = 4
        self.beside_driver = 0
        self.killed: psutil.Process | None = None

    def observed(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        self.left -= isinstance(event, TrajectoryFinished)
        if self.left > 0 or self.killed is not None:
            return
        zygotes = [
            process
            for process in psutil.Process().children(recursive=True)
            if ZYGOTE in process.cmdline() and ZYGOTE not in process.parent().cmdline()
        ]
        self.beside_driver = sum(process.ppid() == os.getpid() for process in zygotes)
        if zygotes:
            self.killed = zygotes[0].parent()
            self.killed.kill()


def test_rewards_on_nodes_survive_the_loss_of_a_worker(
    ray_address: str, model: Path, tmp_path: Path
) -> None:
    rewards = {"number": 2, "cpus": 0.5}
    kind = {"kind": "ray", "ray": {"address": ray_address, "rewards": rewards}}
    killer, seen = RewardKiller(), Seen(tmp_path / "run")
    ended = run(model, tmp_path / "run", killer, seen, **by(ALONE, kind))
    assert_sound(ended)
    assert killer.killed is not None and killer.beside_driver == 0
    assert ended.audit.failed == 0
    rewards_given = {sample.reward for sample in seen.samples}
    assert len(rewards_given) > 1 and all(0 <= reward <= 1 for reward in rewards_given)


def test_rewards_that_are_objects_are_refused(
    ray_address: str, model: Path, tmp_path: Path
) -> None:
    kind = {"kind": "ray", "ray": {"address": ray_address, "rewards": {"number": 1}}}
    given = settings(model, tmp_path / "run", **by(ALONE, kind), task={"reward": None})
    plan = prepare(read_config(given), prompts=PROMPTS, reward=lambda response, **_: 1.0)
    with pytest.raises(UserError, match=r"named by import path: `.*` is an object\. Use module:"):
        carry_out(plan, progress=False)
    assert not plan.out.exists()


# The driver's side, with actors that do as they are told


class Actor:
    """Stands for an actor: its calls are answered by hand, in any order."""

    def __init__(self) -> None:
        self.calls: list[Future[bytes]] = []
        self.jobs: list[bytes] = []
        self.start = SimpleNamespace(remote=self._call)
        self.score = SimpleNamespace(remote=self._call)

    def _call(self, content: bytes) -> Any:
        future: Future[bytes] = Future()
        self.calls.append(future)
        self.jobs.append(content)
        return SimpleNamespace(future=lambda: future)

    def serves(self) -> None:
        from dora_rl.runtime.launchers.ray.rewards import RewardStarted

        self.calls.pop(0).set_result(msgspec.msgpack.encode(RewardStarted("node")))
        self.jobs.pop(0)

    def answers(self, reward: float) -> None:
        outcome = Outcome(ticket=-1, reward=reward)
        self.jobs.pop(0)
        self.calls.pop(0).set_result(msgspec.msgpack.encode(outcome))

    def dies(self) -> None:
        calls, self.calls = self.calls, []
        for call in calls:
            call.set_exception(RuntimeError("the node is gone"))


class World:
    """A scorer with two workers, and what it was told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from dora_rl.runtime.launchers.ray import rewards
        from dora_rl.runtime.launchers.ray.remote_worker import CallQueue
        from dora_rl.runtime.launchers.ray.settings import RewardWorkers

        self.actors: list[Actor] = []
        self.outcomes: dict[str, Outcome] = {}
        monkeypatch.setattr(rewards.Placement, "make_actor", lambda *_: self._make_actor())
        monkeypatch.setattr("ray.kill", lambda actor: None)
        self.calls = CallQueue()
        order = rewards.RewardOrder(rewards=(), options={}, variables={})
        self.scorer = rewards.RemoteScorer(
            order,
            RewardWorkers(number=2, cpus=0),  # so that there is no placement group
            self.calls,
            lambda *_: None,
            patience_s=0.0,
            py_executable=None,
        )
        self.scorer.start()

    def _make_actor(self) -> Actor:
        self.actors.append(Actor())
        return self.actors[-1]

    def ask(self, *names: str) -> None:
        for name in names:
            self.scorer.score(ScoreJob(response=name), name, partial(self._reply, name))

    def _reply(self, name: str, outcome: Outcome) -> None:
        assert name not in self.outcomes, "one outcome each"
        self.outcomes[name] = outcome

    def turn(self) -> None:
        self.calls.run()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    found = World(monkeypatch)
    yield found
    found.calls.close()


def test_jobs_go_to_who_has_the_fewest_and_no_further_ahead_than_two(world: World) -> None:
    world.ask("a", "b", "c", "d", "e")
    for actor in world.actors:
        assert len(actor.jobs) == 1, "its start"
        actor.serves()
    world.turn()
    first = world.actors[0]
    assert [len(actor.jobs) for actor in world.actors] == [2, 2]
    first.answers(0.5)
    world.turn()
    assert world.outcomes["a"].reward == 0.5
    assert [len(actor.jobs) for actor in world.actors] == [2, 2]


def test_the_jobs_of_a_worker_that_is_lost_are_scored_by_others(world: World) -> None:
    first, second = world.actors
    first.serves()
    world.turn()
    world.ask("a", "b")
    first.dies()
    world.turn()
    assert not world.outcomes and len(world.actors) == 3
    second.serves()
    world.turn()
    for reward in (0.1, 0.2):
        second.answers(reward)
        world.turn()
    assert {name: outcome.reward for name, outcome in world.outcomes.items()} == {
        "a": 0.1,
        "b": 0.2,
    }


def test_a_job_that_workers_are_lost_with_again_and_again_fails(world: World) -> None:
    """Not the one behind it, which they had not begun."""
    world.ask("deadly", "harmless")
    for number in (0, 2, 3):
        world.actors[number].serves()
        world.turn()
        world.actors[number].dies()
        world.turn()
    assert set(world.outcomes) == {"deadly"}
    failure = world.outcomes["deadly"].failure
    assert failure == "3 reward workers were lost with it: the node is gone"
    world.actors[1].serves()
    world.turn()
    world.actors[1].answers(1.0)
    world.turn()
    assert world.outcomes["harmless"].reward == 1.0


def test_a_worker_whose_node_is_drained_finishes_and_is_replaced(world: World) -> None:
    first = world.actors[0]
    first.serves()
    world.turn()
    world.ask("a")
    world.scorer.drained({"node"})
    world.ask("b")
    assert len(first.jobs) == 1 and len(world.actors) == 2
    first.answers(1.0)
    world.turn()
    assert set(world.outcomes) == {"a"} and len(world.actors) == 3


def test_workers_that_never_start_end_the_run(world: World) -> None:
    world.scorer.check()
    world.ask("a")
    with pytest.raises(RunFailed, match="no reward worker has started"):
        world.scorer.check()
    with pytest.raises(RunFailed, match="6 reward workers ended before they started: the node is"):
        for number in range(9):
            world.actors[number].dies()
            world.turn()
