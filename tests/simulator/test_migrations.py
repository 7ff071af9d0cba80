"""Two phases, a copy that is kept, and everything that can cut a migration short."""

from typing import Any

import pytest

from dora_rl.core.protocol import commands as cmd
from dora_rl.core.protocol import events as ev
from dora_rl.core.protocol.types import Move, Placement, Segment
from dora_rl.simulator.errors import WorldError
from dora_rl.simulator.faults import FaultParams
from tests.simulator.scripted import KV_BYTES, STEP_S, build, capacity_of, check_memory, installing
from tests.simulator.scripted import shape as make_shape

BEGUN_S = 1.0
MOVED_S = 3.0


def moving(*extra: int) -> Any:
    """Trajectory 0 runs on instance 0 from 1 s on; at 3 s it is to move to instance 1."""
    script = installing()
    names = (0, *extra)
    script.at(BEGUN_S, *(cmd.Start(t, t + 1, 0, 0) for t in names))
    moves = tuple(Move(t, t + 1, t + 101) for t in names)
    script.at(MOVED_S, cmd.Reserve(0, 0, 1, 0, moves))
    return script


def transfer(script: Any) -> None:
    script.on(ev.MigrationReserved, lambda e: [cmd.Transfer(e.migration)])


def release(script: Any) -> None:
    script.on(ev.MigrationCompleted, lambda e: [cmd.Release(e.migration)])


SHAPES = {0: make_shape(500, prompt=10)}


def test_a_moved_trajectory_goes_on_where_it_was() -> None:
    script = moving()
    transfer(script)
    release(script)
    world = build(script, SHAPES, instances=2)
    world.run(until_s=MOVED_S + 0.005)
    assert world.instances[1].reserved_slots == 1
    world.run(until_s=MOVED_S + 1)
    check_memory(world)
    source, target = world.instances
    assert not source.runs and source.used == 0
    assert list(target.runs) == [101]
    assert (target.reserved_slots, target.reserved_kv) == (0, 0)
    world.run(until_s=20)
    now, finished = script.seen(ev.TrajectoryFinished)[0]
    assert finished == ev.TrajectoryFinished(0, 101, 500, (Segment(0, "v0", 500),))
    assert now == pytest.approx(BEGUN_S + 500 * STEP_S, abs=0.03)
    assert script.last(ev.MigrationCompleted).moved == (Placement(0, 1),)
    assert world.facts.kv_bytes_moved == pytest.approx((10 + 201) * KV_BYTES, rel=0.01)
    assert world.facts.prefilled_tokens == 10
    assert (world.facts.migrations, world.facts.migrated) == (1, 1)


def test_without_a_kv_path_the_target_computes_it_again() -> None:
    script = moving()
    transfer(script)
    release(script)
    world = build(script, SHAPES, instances=2, kv_migration=False)
    world.run(until_s=20)
    assert script.last(ev.TrajectoryFinished).tokens == 500
    assert world.facts.kv_bytes_moved == 0
    assert world.facts.reprefilled_tokens == pytest.approx(211, abs=2)
    assert world.facts.prefilled_tokens == 10 + world.facts.reprefilled_tokens


def test_the_source_keeps_its_copy_until_it_is_released_and_an_abort_resumes_it() -> None:
    script = moving()
    transfer(script)
    script.at(4.0, cmd.AbortMigration(0), cmd.AbortMigration(0))
    world = build(script, SHAPES, instances=2)
    world.run(until_s=3.5)
    source, target = world.instances
    assert (source.size, target.size) == (0, 1)
    assert source.used > 200
    check_memory(world)
    world.run(until_s=4.1)
    assert (source.size, target.size, target.used) == (1, 0, 0)
    check_memory(world)
    world.run(until_s=20)
    now, finished = script.seen(ev.TrajectoryFinished)[0]
    assert (finished.fence, finished.tokens) == (1, 500)
    assert now > BEGUN_S + 500 * STEP_S + 0.9


def test_an_abort_before_the_end_leaves_it_where_it_was() -> None:
    script = moving()
    script.on(ev.MigrationReserved, lambda e: [cmd.AbortMigration(e.migration)])
    script.at(4.0, cmd.Transfer(0), cmd.Release(0))
    world = build(script, SHAPES, instances=2)
    world.run(until_s=20)
    assert script.last(ev.TrajectoryFinished).fence == 1
    assert world.instances[1].reserved_slots == world.instances[1].reserved_kv == 0
    assert not script.seen(ev.MigrationCompleted)


def test_repeated_commands_are_answered_again_and_done_once() -> None:
    script = moving()
    transfer(script)
    reserve = cmd.Reserve(0, 0, 1, 0, (Move(0, 1, 101),))
    script.at(3.001, reserve)
    script.at(3.5, reserve, cmd.Transfer(0))
    script.at(4.0, cmd.Release(0), cmd.Release(0))
    script.at(4.5, reserve, cmd.Transfer(0))
    world = build(script, SHAPES, instances=2)
    world.run(until_s=20)
    assert world.facts.migrations == 1
    assert len(script.seen(ev.TrajectoryFinished)) == 1
    assert len(script.seen(ev.MigrationReserved)) == 2
    assert len(script.seen(ev.MigrationCompleted)) >= 2


def test_a_member_that_ended_before_the_cut_is_not_listed() -> None:
    script = moving(1)
    script.on(ev.MigrationReserved, lambda e: [cmd.Cancel(1, 2, 0), cmd.Transfer(e.migration)])
    release(script)
    world = build(script, {0: make_shape(500), 1: make_shape(500)}, instances=2)
    world.run(until_s=20)
    assert script.last(ev.MigrationCompleted).moved == (Placement(0, 1),)
    assert [e.trajectory for _, e in script.seen(ev.TrajectoryFinished)] == [0]


def test_no_room_at_the_target_fails_the_reservation() -> None:
    script = moving()
    script.at(BEGUN_S, cmd.Start(8, 50, 1, 0))
    world = build(script, SHAPES | {8: make_shape(900)}, instances=2, slots=1)
    world.run(until_s=20)
    assert script.last(ev.MigrationFailed) == ev.MigrationFailed(0, "no_room")
    assert script.seen(ev.TrajectoryFinished)[0][1].fence == 1


def test_no_kv_room_at_the_target_fails_the_reservation() -> None:
    script = moving()
    script.at(BEGUN_S, cmd.Start(8, 50, 1, 0))
    shapes = {0: make_shape(400), 8: make_shape(290, prompt=200)}
    world = build(script, shapes, instances=2, efficiency=capacity_of(500))
    world.run(until_s=20)
    assert script.last(ev.MigrationFailed).reason == "no_room"
    assert len(script.seen(ev.TrajectoryFinished)) == 2


def test_a_target_must_serve_the_version() -> None:
    script = installing()
    script.at(BEGUN_S, cmd.Start(0, 1, 0, 0), cmd.Evict(1, 1, 0))
    script.at(MOVED_S, cmd.Reserve(0, 0, 1, 0, (Move(0, 1, 101),)))
    with pytest.raises(WorldError, match="does not serve version 0"):
        build(script, SHAPES, instances=2).run(until_s=20)
    script = moving()
    script.on(ev.MigrationReserved, lambda e: [cmd.Evict(1, 1, 0)])
    with pytest.raises(WorldError, match="or moves there"):
        build(script, SHAPES, instances=2).run(until_s=20)


def test_a_released_migration_must_be_done() -> None:
    script = moving()
    script.on(ev.MigrationReserved, lambda e: [cmd.Release(e.migration)])
    with pytest.raises(WorldError, match="released before it is done"):
        build(script, SHAPES, instances=2).run(until_s=20)


@pytest.mark.parametrize("dies", [0, 1])
@pytest.mark.parametrize("when", ["reserving", "moving"])
def test_a_death_on_either_side_fails_it_and_the_source_goes_on(dies: int, when: str) -> None:
    script = moving()
    if when == "moving":
        transfer(script)
        # 211 tokens take 0.08 ms to move: the death falls in between.
        script.at(MOVED_S + 0.01001, cmd.Expel(dies, 1, "test"))
    else:
        script.at(MOVED_S + 0.001, cmd.Expel(dies, 1, "test"))
    world = build(script, SHAPES, instances=2)
    world.run(until_s=20)
    assert script.last(ev.MigrationFailed) == ev.MigrationFailed(0, "instance_lost")
    finished = [e.fence for _, e in script.seen(ev.TrajectoryFinished)]
    assert finished == ([] if dies == 0 else [1])
    assert world.instances[1].reserved_slots == 0


def test_either_phase_can_fail() -> None:
    reasons = set()
    for seed in range(20):
        script = moving()
        transfer(script)
        release(script)
        faults = FaultParams(failed_migration=0.5)
        world = build(script, SHAPES, instances=2, seed=seed, faults=faults)
        world.run(until_s=20)
        (finished,) = (e for _, e in script.seen(ev.TrajectoryFinished))
        reasons.update(e.reason for _, e in script.seen(ev.MigrationFailed))
        assert finished.tokens == 500
        assert finished.fence == (1 if script.seen(ev.MigrationFailed) else 101)
    assert reasons == {"reserve_failed", "transfer_failed"}


def test_a_lost_last_word_frees_what_is_held_after_the_lease() -> None:
    script = moving()
    transfer(script)
    faults = FaultParams(failed_kv_path=1e-9)
    world = build(script, SHAPES, instances=2, faults=faults, migration_lease_s=50.0)
    world.run(until_s=30)
    assert world.instances[0].used > 200
    world.run(until_s=60)
    assert world.instances[0].used == 0
    assert not world.instances[0].runs


def test_an_episode_moves_while_it_waits_for_its_environment() -> None:
    script = moving()
    transfer(script)
    release(script)
    shapes = {0: make_shape((100, 4.0, 10), 50)}
    world = build(script, shapes, instances=2)
    world.run(until_s=MOVED_S + 1)
    assert world.instances[1].size == 0
    assert world.instances[1].used == 110
    world.run(until_s=20)
    now, resumed = script.seen(ev.TrajectoryResumed)[0]
    assert resumed == ev.TrajectoryResumed(0, 101, 1)
    assert now == pytest.approx(BEGUN_S + 100 * STEP_S + 4.0, rel=1e-4)
    assert script.last(ev.TrajectoryFinished).tokens == 150


def test_an_answer_that_comes_during_the_move_is_told_on_arrival() -> None:
    script = moving()
    script.on(ev.MigrationReserved, lambda e: [cmd.Transfer(e.migration)])
    release(script)
    shapes = {0: make_shape((100, MOVED_S + 0.01002 - 2.0, 10), 50)}
    world = build(script, shapes, instances=2)
    world.run(until_s=20)
    resumed = [e for _, e in script.seen(ev.TrajectoryResumed)]
    assert len(resumed) == 1
    assert script.last(ev.TrajectoryFinished) == ev.TrajectoryFinished(
        0, 101, 150, (Segment(0, "v0", 150),)
    )
    check_memory(world)


# Parking


def test_parked_work_leaves_the_device_and_comes_back() -> None:
    script = installing()
    script.at(BEGUN_S, cmd.Start(0, 1, 0, 0), cmd.Start(1, 2, 0, 0))
    park = cmd.Park(0, 1, (Placement(0, 1), Placement(9, 77)))
    script.at(2.0, park, park)
    script.at(5.0, cmd.Unpark(0, 1, (Placement(0, 1),)), cmd.Unpark(0, 1, (Placement(0, 1),)))
    world = build(script, {0: make_shape(500), 1: make_shape(1000)})
    world.run(until_s=4.0)
    assert {e.parked for _, e in script.seen(ev.TrajectoriesParked)} == {(Placement(0, 1),)}
    assert world.instances[0].size == 1
    check_memory(world)
    world.run(until_s=20)
    ends = {e.trajectory: now for now, e in script.seen(ev.TrajectoryFinished)}
    assert ends[0] == pytest.approx(BEGUN_S + 5.0 + 3.0, abs=0.1)
    assert world.facts.prefilled_tokens == 20
    assert world.facts.parked == 1


def test_parked_work_survives_its_version_and_moves_to_where_that_is_served() -> None:
    script = installing()
    script.at(BEGUN_S, cmd.Start(0, 1, 0, 0))
    script.at(2.0, cmd.Park(0, 1, (Placement(0, 1),)))
    script.at(2.5, cmd.Evict(0, 1, 0))
    script.at(MOVED_S, cmd.Reserve(0, 0, 1, 0, (Move(0, 1, 101),)))
    transfer(script)
    release(script)
    world = build(script, SHAPES, instances=2)
    world.run(until_s=20)
    assert script.last(ev.TrajectoryFinished).tokens == 500
    assert world.facts.prefilled_tokens == 10


def test_unparking_needs_the_version() -> None:
    script = installing()
    script.at(BEGUN_S, cmd.Start(0, 1, 0, 0))
    script.at(2.0, cmd.Park(0, 1, (Placement(0, 1),)))
    script.at(2.5, cmd.Evict(0, 1, 0))
    script.at(3.0, cmd.Unpark(0, 1, (Placement(0, 1),)))
    with pytest.raises(WorldError, match="does not serve version 0"):
        build(script, SHAPES).run(until_s=20)
