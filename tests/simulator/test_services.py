"""Prompts, rewards, judgement."""

import pytest

from dora_rl.core.protocol import commands as cmd
from dora_rl.core.protocol import events as ev
from dora_rl.simulator.faults import FaultParams
from tests.simulator.scripted import STEP_S, Script, build, installing, shape


def test_prompts_are_endless_or_counted() -> None:
    for prompts, answers in ((None, [(0, 5, False)] * 2), (4, [(0, 4, True)] * 2)):
        script = Script()
        script.at(1.0, cmd.FetchPrompts(0, 5), cmd.FetchPrompts(0, 5))
        world = build(script, prompts=prompts)
        world.run(until_s=5)
        got = [(e.first, e.count, e.exhausted) for _, e in script.seen(ev.PromptsAvailable)]
        assert got == answers
    script = Script()
    script.at(1.0, cmd.FetchPrompts(4, 5))
    world = build(script, prompts=4)
    world.run(until_s=5)
    assert script.last(ev.PromptsAvailable) == ev.PromptsAvailable(4, 0, True)


def test_rewards_wait_for_a_worker() -> None:
    for workers, apart in ((None, 0.0), (1, 2.0)):
        script = installing()
        script.at(1.0, cmd.Start(0, 1, 0, 0), cmd.Start(1, 2, 0, 0))
        script.on(ev.TrajectoryFinished, lambda e: [cmd.Score(e.trajectory, e.fence)] * 2)
        shapes = {0: shape(100, reward_s=2.0), 1: shape(100, reward_s=2.0)}
        world = build(script, shapes, reward_workers=workers)
        world.run(until_s=20)
        (first, _), (second, _) = script.seen(ev.TrajectoryScored)
        assert first == pytest.approx(1.0 + 100 * STEP_S + 2.0, rel=1e-4)
        assert second - first == pytest.approx(apart, abs=1e-6)


def test_the_answer_carries_the_fence_of_the_last_question() -> None:
    script = installing()
    script.at(1.0, cmd.Start(0, 1, 0, 0))
    script.at(3.0, cmd.Score(0, 1))
    script.at(4.0, cmd.Score(0, 9))
    script.at(8.0, cmd.Score(0, 11))
    world = build(script, {0: shape(100, reward_s=2.0)})
    world.run(until_s=20)
    assert [e.fence for _, e in script.seen(ev.TrajectoryScored)] == [9, 11]


def test_a_failed_reward_can_be_asked_for_again() -> None:
    script = installing()
    script.at(1.0, cmd.Start(0, 1, 0, 0))
    script.on(ev.TrajectoryFinished, lambda e: [cmd.Score(e.trajectory, e.fence)])
    script.on(ev.TrajectoryFailed, lambda e: [cmd.Score(e.trajectory, e.fence + 1)])
    world = build(script, seed=3, faults=FaultParams(failed_reward=0.9))
    world.run(until_s=2000)
    assert script.seen(ev.TrajectoryFailed)
    assert {e.reason for _, e in script.seen(ev.TrajectoryFailed)} == {"reward_failed"}
    assert len(script.seen(ev.TrajectoryScored)) == 1


def test_judgement_is_a_function_of_the_group_and_the_seed() -> None:
    def judged(seed: int) -> list[str | None]:
        script = Script()
        script.at(1.0, *(cmd.Judge(g, (g,)) for g in [*range(400), *range(400)]))
        world = build(script, seed=seed, filter_rate=0.3)
        world.run(until_s=5)
        return [e.filtered for _, e in script.seen(ev.GroupJudged)]

    first = judged(0)
    assert first[:400] == first[400:]
    assert set(first) == {None, "no_signal"}
    assert 0.2 < sum(f is not None for f in first) / 800 < 0.4
    assert judged(1) != first
