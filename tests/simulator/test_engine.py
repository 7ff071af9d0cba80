"""One engine: decode in closed form, queue, prefill, sharing, turns, a full memory."""

from heapq import heappop, heappush
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_rl.core.protocol import commands as cmd
from dora_rl.core.protocol import events as ev
from dora_rl.simulator.cost_parameters import Efficiency, Model, device_named
from dora_rl.simulator.costs import Costs
from tests.simulator.scripted import (
    STEP_S,
    build,
    capacity_of,
    check_memory,
    installing,
    shape,
)

INSTALLED_S = 0.5 + 2e6 / 1e9


def starts(*fences: int, version: int = 0, at_instance: int = 0) -> list[cmd.Start]:
    """Trajectory n is started with fence n + 1."""
    return [cmd.Start(fence - 1, fence, at_instance, version) for fence in fences]


def test_a_trajectory_takes_its_steps_and_reports_who_sampled_it() -> None:
    script = installing()
    script.on(ev.VersionInstalled, lambda e: starts(1))
    world = build(script, {0: shape(100, prompt=10)})
    world.run(until_s=10)
    (now, finished), *rest = script.seen(ev.TrajectoryFinished)
    assert not rest
    assert finished == ev.TrajectoryFinished(0, 1, 100, ((0, "v0", 100),))
    assert now == pytest.approx(INSTALLED_S + 100 * STEP_S, rel=1e-6)
    assert world.facts.generated_tokens == 100
    assert world.facts.prefilled_tokens == 10
    check_memory(world)


def test_more_than_the_slots_wait_in_line() -> None:
    script = installing()
    script.on(ev.VersionInstalled, lambda e: starts(1, 2, 3))
    world = build(script, {0: shape(100), 1: shape(50), 2: shape(10)}, slots=2)
    world.run(until_s=10)
    ends = {e.trajectory: now for now, e in script.seen(ev.TrajectoryFinished)}
    assert ends == {
        1: pytest.approx(INSTALLED_S + 0.50, rel=1e-5),
        2: pytest.approx(INSTALLED_S + 0.60, rel=1e-5),
        0: pytest.approx(INSTALLED_S + 1.00, rel=1e-5),
    }


def test_siblings_share_the_prefill_of_their_prompt() -> None:
    script = installing()
    script.on(ev.VersionInstalled, lambda e: starts(1, 2, 3))
    world = build(script, {i: shape(100, prompt=50) for i in range(3)}, group_size=2)
    world.run(until_s=INSTALLED_S + 0.495)
    world.instances[0].advance(world.now)
    check_memory(world)
    assert world.facts.prefilled_tokens == 100
    assert world.facts.shared_tokens == 50
    assert world.instances[0].used == 2 * 50 + 3 * 49


def test_a_cancelled_placement_is_forgotten() -> None:
    script = installing()
    script.on(ev.VersionInstalled, lambda e: starts(1, 2))
    script.at(1.0, cmd.Cancel(0, 1, 0), cmd.Cancel(0, 1, 0), cmd.Cancel(7, 99, 0))
    world = build(script, {0: shape(1000), 1: shape(1000)})
    world.run(until_s=2.0)
    check_memory(world)
    assert list(world.instances[0].runs) == [2]
    assert world.facts.cancelled_tokens == pytest.approx((1.0 - INSTALLED_S) / STEP_S, abs=1)
    world.run(until_s=20.0)
    assert [e.trajectory for _, e in script.seen(ev.TrajectoryFinished)] == [1]


def test_a_repeated_start_is_void() -> None:
    script = installing()
    script.on(ev.VersionInstalled, lambda e: starts(1) + starts(1))
    script.at(0.8, *starts(1))
    world = build(script)
    world.run(until_s=10)
    assert len(script.seen(ev.TrajectoryFinished)) == 1


# Turns


def test_between_turns_the_slot_is_free_and_the_kv_is_kept() -> None:
    script = installing()
    script.on(ev.VersionInstalled, lambda e: starts(1))
    turns = shape((100, 2.0, 30), (50, 9.0, 99), prompt=10)
    world = build(script, {0: turns})
    world.run(until_s=INSTALLED_S + 2.0)
    instance = world.instances[0]
    assert (instance.size, instance.used) == (0, 110)
    world.run(until_s=10)
    paused, resumed, ended = (
        script.seen(kind)[0]
        for kind in (ev.TrajectoryPaused, ev.TrajectoryResumed, ev.TrajectoryFinished)
    )
    assert paused == (pytest.approx(INSTALLED_S + 1.0, rel=1e-5), ev.TrajectoryPaused(0, 1, 1))
    assert resumed == (pytest.approx(INSTALLED_S + 3.0, rel=1e-5), ev.TrajectoryResumed(0, 1, 1))
    assert ended[0] == pytest.approx(INSTALLED_S + 3.5, rel=1e-5)
    assert ended[1].tokens == 150
    assert world.facts.prefilled_tokens == 10 + 30
    assert instance.used == 0


def test_who_comes_back_from_its_environment_goes_before_who_is_new() -> None:
    script = installing()
    script.on(ev.VersionInstalled, lambda e: starts(1, 2, 3))
    shapes = {0: shape((10, 0.05, 0), 10), 1: shape(40), 2: shape(10)}
    world = build(script, shapes, slots=1)
    world.run(until_s=10)
    order = [e.trajectory for _, e in script.seen(ev.TrajectoryFinished)]
    assert order == [1, 0, 2]


# Memory


def test_a_full_memory_parks_the_youngest_and_loses_nothing() -> None:
    script = installing()
    script.on(ev.VersionInstalled, lambda e: starts(1, 2, 3))
    world = build(script, {i: shape(100, prompt=10) for i in range(3)}, efficiency=capacity_of(200))
    assert world.instances[0].capacity == 200
    world.run(until_s=INSTALLED_S + 0.8)
    check_memory(world)
    assert world.instances[0].size == 2
    assert world.facts.preemptions == 1
    world.run(until_s=20)
    check_memory(world)
    finished = [e for _, e in script.seen(ev.TrajectoryFinished)]
    assert [e.trajectory for e in finished] == [0, 1, 2]
    assert all(e.tokens == 100 for e in finished)
    assert world.facts.generated_tokens == 300
    assert world.facts.prefilled_tokens == 30


def test_kv_that_waits_for_its_environment_makes_room_for_who_runs() -> None:
    script = installing()
    script.on(ev.VersionInstalled, lambda e: starts(1))
    script.at(3.0, *starts(2))
    shapes = {0: shape((100, 5.0, 10), 50, prompt=20), 1: shape(120, prompt=20)}
    world = build(script, shapes, efficiency=capacity_of(200))
    world.run(until_s=20)
    assert world.facts.preemptions >= 1
    assert {e.trajectory for _, e in script.seen(ev.TrajectoryFinished)} == {0, 1}
    check_memory(world)


def test_a_trajectory_that_can_never_fit_fails_and_says_why() -> None:
    script = installing()
    script.on(ev.VersionInstalled, lambda e: starts(1, 2))
    shapes = {0: shape(500, prompt=10), 1: shape(5, prompt=300)}
    world = build(script, shapes, efficiency=capacity_of(200))
    world.run(until_s=20)
    failed = [e for _, e in script.seen(ev.TrajectoryFailed)]
    assert [(e.trajectory, e.reason) for e in failed] == [(0, "kv_capacity"), (1, "kv_capacity")]
    assert world.instances[0].used == 0


# Against a loop over single steps


def by_single_steps(costs: Costs, slots: int, lengths: list[tuple[int, int]]) -> dict[int, float]:
    """When each (prompt, tokens) ends: all are in line at time 0, one step after the other."""
    now, line, ends = 0.0, list(enumerate(lengths)), {}
    batch: list[tuple[int, int]] = []  # (step of its end, trajectory)
    step = 0
    while line or batch:
        while line and len(batch) < slots:
            name, (prompt, tokens) = line.pop(0)
            now += costs.prefill_time(prompt, 0)
            heappush(batch, (step + tokens, name))
        context = sum(lengths[name][0] + lengths[name][1] - (end - step) for end, name in batch)
        now += costs.decode.step_time(len(batch), context)
        step += 1
        while batch and batch[0][0] == step:
            ends[heappop(batch)[1]] = now
    return ends


@given(
    st.lists(st.tuples(st.integers(1, 400), st.integers(1, 300)), min_size=1, max_size=12),
    st.integers(1, 5),
)
def test_the_closed_form_agrees_with_single_steps(
    lengths: list[tuple[int, int]], slots: int
) -> None:
    model = Model(parameters=7.6e9, layers=28, heads=28, kv_heads=4, head_dim=128)
    script = installing()
    script.on(ev.VersionInstalled, lambda e: starts(*range(1, len(lengths) + 1)))
    shapes: dict[int, Any] = {i: shape(t, prompt=p) for i, (p, t) in enumerate(lengths)}
    world = build(script, shapes, slots=slots, model=model, device="H800", efficiency=Efficiency())
    world.run(until_s=1e4)
    begin = script.seen(ev.VersionInstalled)[0][0]
    expected = by_single_steps(Costs(model, device_named("H800")), slots, lengths)
    ends = {e.trajectory: now - begin for now, e in script.seen(ev.TrajectoryFinished)}
    assert ends == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert world.facts.generated_tokens == sum(tokens for _, tokens in lengths)
    check_memory(world)


def test_reports_say_how_far_everything_is() -> None:
    script = installing()
    script.on(ev.VersionInstalled, lambda e: starts(1, 2))
    shapes = {0: shape(1000), 1: shape((30, 50.0, 0), 10)}
    world = build(script, shapes, report_period_s=1.0)
    world.run(until_s=3.1)
    first, second, third = (e for _, e in script.seen(ev.InstanceProgressed))
    assert first.lengths == ((0, 1, 49), (1, 2, 30))
    assert second.lengths == ((0, 1, 149),)
    assert third.lengths == ((0, 1, 249),)
    assert third.kv_tokens == 10 + 249 + 10 + 30
    assert third.saved == ()


def test_an_idle_instance_reports_too() -> None:
    script = installing()
    world = build(script, report_period_s=1.0)
    world.run(until_s=2.5)
    reports = [e for _, e in script.seen(ev.InstanceProgressed)]
    assert reports == [ev.InstanceProgressed(0, 1, 0)] * 2
