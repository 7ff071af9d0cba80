"""Processes that start, report, crash, hang, slow down, leave and come back."""

from typing import Any

import pytest

from dora_rl.core.protocol import commands as cmd
from dora_rl.core.protocol import events as ev
from dora_rl.core.protocol.types import Length, Segment
from dora_rl.simulator.errors import WorldError
from dora_rl.simulator.faults import FaultParams
from tests.simulator.scripted import STEP_S, Script, build, check_memory, installing, shape


def restarting() -> Any:
    """Installs on whoever joins, and starts trajectory 0 on instance 0 at 1 s."""
    script = installing()
    script.at(1.0, cmd.Start(0, 1, 0, 0))
    return script


def test_everybody_joins_at_the_start() -> None:
    script = Script()
    world = build(script, instances=3, slots=4, version_slots=2)
    world.run(until_s=1.0)
    assert script.events[0] == (0.0, ev.WeightsPublished(0, "v0"))
    capacity = world.instances[0].capacity
    joined = [e for _, e in script.seen(ev.InstanceJoined)]
    assert joined == [ev.InstanceJoined(i, 1, 4, capacity, 2) for i in range(3)]


def test_an_expelled_process_dies_with_its_work_and_comes_back_as_another() -> None:
    script = restarting()
    script.at(3.0, cmd.Expel(0, 1, "test"), cmd.Expel(0, 1, "test"))
    script.at(3.5, cmd.Start(1, 2, 0, 0), cmd.Cancel(0, 1, 0), cmd.Install(0, 1, 0))
    script.at(20.0, cmd.Expel(0, 1, "late copy"))
    world = build(script, {0: shape(900)}, restart_s=5.0, report_period_s=1.0)
    world.run(until_s=30)
    joins = [(now, e.incarnation) for now, e in script.seen(ev.InstanceJoined)]
    assert joins == [(0.0, 1), (8.0, 2)]
    assert not script.seen(ev.TrajectoryFinished)
    assert not [now for now, _ in script.seen(ev.InstanceProgressed) if 3.0 < now < 8.0]
    assert world.instances[0].versions == {0: "v0"}
    assert world.usage.read(30.0).slots_s == pytest.approx(4 * 25.0)
    check_memory(world)


def test_a_command_for_a_process_that_the_core_has_not_met_is_void() -> None:
    """The process is new, its joining is still on its way, and the core speaks to the old one."""
    script = Script()
    script.on(ev.InstanceJoined, lambda e: [])
    world = build(script)
    world.run(until_s=1.0)
    instance = world.instances[0]
    instance.incarnation += 1
    for command in (cmd.Start(0, 1, 0, 0), cmd.Evict(0, 1, 0), cmd.Cancel(0, 1, 0)):
        world._perform[type(command)](command)
    assert not instance.runs


def test_a_crash_is_told_or_silent() -> None:
    told = []
    for silent_share in (0.0, 1.0):
        script = restarting()
        faults = FaultParams(crash_per_hour=1200.0, silent_share=silent_share)
        world = build(script, faults=faults, restart_s=1.0)
        world.run(until_s=60)
        crashes = [fault for fault in world.faults.log if fault.kind == "crash"]
        assert crashes
        failed = [(e.incarnation, e.reason) for _, e in script.seen(ev.InstanceFailed)]
        told.append(len(failed))
        if not silent_share:
            assert failed == [(i + 1, "crash") for i in range(len(crashes))]
    assert told[0] > 0
    assert told[1] == 0


def hanging(partition_share: float, seed: int) -> tuple[Any, Any]:
    script = installing()
    script.on(ev.VersionInstalled, lambda e: [cmd.Start(0, 1, 0, 0)])
    faults = FaultParams(hang_per_hour=600.0, hang_s=30.0, partition_share=partition_share)
    world = build(script, {0: shape(400)}, seed=seed, faults=faults, report_period_s=0.5)
    world.run(until_s=300)
    return world, script


def first_hang(world: Any) -> tuple[float, float]:
    fault = next(fault for fault in world.faults.log if fault.kind == "hang")
    return fault.time, fault.time + float(fault.subject.split(" for ")[1].rstrip("s"))


def test_a_frozen_process_stops_and_goes_on_later() -> None:
    hit = 0
    for seed in range(40):
        world, script = hanging(0.0, seed)
        begin, end = first_hang(world)
        silent = [now for now, _ in script.events if begin < now < end - 0.2]
        assert all(isinstance(e, ev.TimerFired) for now, e in script.events if now in silent)
        if 0.6 < begin < 4.4:
            hit += 1
            ended_at = script.seen(ev.TrajectoryFinished)[0][0]
            assert ended_at >= 0.5 + 400 * STEP_S + (end - begin) - 0.2
    assert hit


def test_a_process_that_is_cut_off_works_on_and_its_news_come_late() -> None:
    hit = 0
    for seed in range(40):
        world, script = hanging(1.0, seed)
        begin, end = first_hang(world)
        if 0.6 < begin < 4.4 < 5.0 < end:
            hit += 1
            ended_at, finished = script.seen(ev.TrajectoryFinished)[0]
            assert ended_at == pytest.approx(end, abs=0.1)
            assert finished.tokens == 400
    assert hit


def test_a_zombie_reads_its_mail_when_it_wakes() -> None:
    for seed in range(40):
        script = restarting()
        faults = FaultParams(hang_per_hour=900.0, hang_s=20.0)
        world = build(script, {0: shape(400)}, seed=seed, faults=faults, restart_s=2.0)
        world.run(until_s=0.9)
        while not world.instances[0].cut_off and world.now < 100:
            world.run(until_s=world.now + 0.1)
        if not world.instances[0].cut_off:
            continue
        world._perform[cmd.Expel](cmd.Expel(0, 1, "silent"))
        assert world.instances[0].alive
        _, end = first_hang(world)
        world.run(until_s=end + 3.0)
        assert script.last(ev.InstanceJoined).incarnation == 2
        return
    raise AssertionError("no hang")


def test_a_slow_spell_stretches_time() -> None:
    script = restarting()
    faults = FaultParams(slow_per_hour=3600.0, slow_factor=3.0, slow_s=1e6)
    world = build(script, {0: shape(400)}, faults=faults)
    world.run(until_s=60)
    begin = next(fault.time for fault in world.faults.log if fault.kind == "slow")
    ended_at = script.seen(ev.TrajectoryFinished)[0][0]
    before = max(0.0, begin - 1.0)
    assert ended_at == pytest.approx(1.0 + before + 3 * (400 * STEP_S - before), abs=0.1)


def test_a_graceful_leave_waits_for_its_dismissal_and_returns() -> None:
    script = installing()
    script.on(ev.InstanceLeaving, lambda e: [cmd.Dismiss(e.instance, e.incarnation)])
    world = build(script, faults=FaultParams(leave_per_hour=360.0, rejoin_s=2.0))
    world.run(until_s=120)
    leaves = [e.incarnation for _, e in script.seen(ev.InstanceLeaving)]
    joins = [e.incarnation for _, e in script.seen(ev.InstanceJoined)]
    assert len(leaves) > 2
    assert leaves == list(range(1, len(leaves) + 1))
    assert joins == list(range(1, len(joins) + 1))


def test_a_dismissed_instance_must_be_empty() -> None:
    script = installing()
    script.on(ev.VersionInstalled, lambda e: [cmd.Start(0, 1, 0, 0)])
    script.on(ev.InstanceLeaving, lambda e: [cmd.Dismiss(e.instance, e.incarnation)])
    world = build(script, {0: shape(10**6)}, faults=FaultParams(leave_per_hour=360.0))
    with pytest.raises(WorldError, match="trajectory 0 is there"):
        world.run(until_s=120)


# Saved prefixes


def saving(*events: Any) -> Any:
    script = restarting()
    script.at(3.4, *events)
    return script


def test_a_saved_prefix_survives_and_is_prefilled_again() -> None:
    script = saving(cmd.Expel(0, 1, "test"))
    script.at(9.0, cmd.Start(0, 2, 0, 0, prefix_tokens=150))
    world = build(script, {0: shape(400)}, restart_s=2.0, report_period_s=0.5, save_period_s=1.0)
    world.run(until_s=20)
    saved = [e.saved for _, e in script.seen(ev.InstanceProgressed) if e.saved]
    assert saved == [(Length(0, 1, n),) for n in (99, 199)] or saved[-1][0].tokens >= 199
    now, finished = script.seen(ev.TrajectoryFinished)[0]
    assert finished == ev.TrajectoryFinished(0, 2, 400, (Segment(0, "v0", 400),))
    assert now == pytest.approx(9.0 + 250 * STEP_S, abs=0.05)
    assert world.facts.reprefilled_tokens == 150


def test_a_prefix_of_an_episode_begins_in_the_right_turn() -> None:
    script = installing()
    shapes = {0: shape((100, 1.0, 7), (100, 1.0, 9), 100)}
    script.at(1.0, cmd.Start(0, 1, 0, 0))
    script.at(5.4, cmd.Cancel(0, 1, 0), cmd.Start(0, 2, 0, 0, prefix_tokens=200))
    world = build(script, shapes, report_period_s=0.5, save_period_s=0.5)
    world.run(until_s=5.41)
    run = world.instances[0].runs[2]
    assert (run.turn, run.done) == (2, 200)
    assert run.context == 10 + 200 + 7 + 9
    world.run(until_s=20)
    assert script.last(ev.TrajectoryFinished).tokens == 300
    assert [e.turn for _, e in script.seen(ev.TrajectoryPaused)] == [1, 2]
