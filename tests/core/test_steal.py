"""Turns that queue on a full instance are moved to idle slots of their version."""

import json

import pytest

from dora_rl.core.orchestrator import Orchestrator
from dora_rl.core.protocol import commands as cm
from dora_rl.core.protocol import events as ev
from tests.core.adversary import Adversary
from tests.core.test_orchestrator import commands, drain, finish, world_of


def crowded(**settings) -> Adversary:
    """Instance 0 has two slots, two running and two that queue; instance 1 is full as well."""
    world = world_of(instances=2, slots=2, groups_per_step=1, group_size=2, **settings)
    paused = sorted(world.engines[0].running)
    for trajectory in paused:
        fence = world.engines[0].running[trajectory].fence
        world.send(ev.TrajectoryPaused(trajectory, fence, 1))
    drain(world)
    assert len(world.engines[0].running) == 4, "their slots were given away"
    for trajectory in paused:
        fence = world.engines[0].running[trajectory].fence
        world.send(ev.TrajectoryResumed(trajectory, fence, 1))
    instance = world.core.state.fleet.instances[0]
    assert [queued.trajectory for queued in instance.queue] == paused
    return world


def free_a_slot(world: Adversary) -> list[cm.Reserve]:
    before = len(commands(world, cm.Reserve))
    finish(world, min(world.engines[1].running))
    world.deliver(-1)
    return commands(world, cm.Reserve)[before:]


def test_an_idle_slot_takes_the_last_of_a_queue_that_has_waited() -> None:
    world = crowded()
    last = world.core.state.fleet.instances[0].queue[-1].trajectory
    world.now += 5.0
    (move,) = free_a_slot(world)
    assert (move.source, move.target) == (0, 1)
    assert [m.trajectory for m in move.moves] == [last]
    drain(world)
    assert last in world.engines[1].running
    assert len(world.core.state.fleet.instances[0].queue) == 1


def test_a_wait_shorter_than_a_move_is_waited_out() -> None:
    world = crowded(migration_estimate_s=10.0)
    world.now += 14.0  # less than `migration_gain` times the move
    assert free_a_slot(world) == []


def test_the_first_in_the_queue_has_the_slot_that_becomes_free() -> None:
    world = crowded()
    instance = world.core.state.fleet.instances[0]
    first, last = (queued.trajectory for queued in instance.queue)
    running = min(set(world.engines[0].running) - {first, last})
    finish(world, running)
    world.deliver(-1)
    assert [queued.trajectory for queued in instance.queue] == [last]


def test_a_failed_move_is_not_made_again_at_once() -> None:
    world = crowded()
    world.now += 5.0
    (move,) = free_a_slot(world)
    before = len(commands(world, cm.Reserve))
    world.send(ev.MigrationFailed(move.migration, "no room"))
    assert len(commands(world, cm.Reserve)) == before
    world.now += 5.0
    moved = [m.trajectory for again in free_a_slot(world) for m in again.moves]
    assert move.moves[0].trajectory in moved


@pytest.mark.parametrize("paradigm", ["in_flight", "partial"])
def test_paradigms_without_migration_leave_queues_alone(paradigm: str) -> None:
    world = crowded(paradigm=paradigm)
    world.now += 5.0
    assert free_a_slot(world) == []


def test_a_restored_queue_is_stolen_from_alike() -> None:
    world = crowded()
    world.now += 5.0
    twin = Orchestrator.restore(json.loads(json.dumps(world.core.snapshot())))
    finish(world, min(world.engines[1].running))
    event = world.pool[-1]
    expected = world.core.handle(world.now, event)
    assert twin.handle(world.now, event) == expected
    assert any(isinstance(command, cm.Reserve) for command in expected)
