"""Counts of running work, from the stream alone, against the core's own books under faults."""

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from dora_rl.core.protocol import commands as c
from dora_rl.core.protocol import events as e
from dora_rl.core.protocol.commands import Command
from dora_rl.core.protocol.events import Event
from dora_rl.core.protocol.settings import OnFailedMember, ParadigmName, Settings
from dora_rl.core.protocol.types import Move, Placement
from dora_rl.core.state.run import State
from dora_rl.observe.placements import Placements
from tests.core.adversary import Adversary, stir

SEEDS = range(40)


def truth(state: State) -> Counter[tuple[int, int]]:
    """What generates where, as the core has it."""
    running: Counter[tuple[int, int]] = Counter()
    for name, instance in state.fleet.instances.items():
        for version, residents in instance.residents.items():
            for trajectory in residents:
                running[name, version] += not state.work.trajectories[trajectory].paused
    return +running


def storm_settings(paradigm: ParadigmName, rng: random.Random, crowded: bool) -> Settings:
    return Settings(
        paradigm=paradigm,
        groups_per_step=1 if crowded else rng.randint(1, 4),
        group_size=rng.randint(1, 4),
        max_staleness=3 if crowded else rng.randint(0, 3),
        version_slots=rng.randint(1, 2),
        max_retries=rng.randint(0, 2),
        on_failed_member=rng.choice(list(OnFailedMember)),
        turn_s=20.0,
        heartbeat_timeout_s=rng.choice((60.0, 400.0)),
        trajectory_timeout_s=rng.choice((15.0, 60.0, 1800.0)),
    )


@pytest.mark.parametrize("paradigm", ParadigmName)
def test_running_work_is_counted_as_the_core_counts_it(paradigm: ParadigmName) -> None:
    seen: Counter[type] = Counter()
    for seed in SEEDS:
        rng = random.Random(seed)
        placements = Placements()

        def observe(now: float, event: Event, commands: list[Command]) -> None:
            placements.observe(now, event, commands)  # noqa: B023
            seen.update(type(x) for x in [event, *commands])

        crowded = seed % 3 == 0  # more versions than places for them: work is parked
        settings = storm_settings(paradigm, rng, crowded)
        world = Adversary(settings, observe)
        for name in range(1 if crowded else rng.randint(2, 5)):
            world.join(name, slots=rng.randint(2, 5), version_slots=1 if crowded else 2)
        for _ in range(60):
            stir(world, rng, 8, faults=True)
            state = world.core.state
            assert placements.running == truth(state), f"seed {seed}"
            assert placements.instances == {
                name: instance.incarnation for name, instance in state.fleet.instances.items()
            }
            by_version: Counter[int] = Counter()
            for (_, version), count in truth(state).items():
                by_version[version] += count
            assert placements.versions_running() == by_version
    assert seen[c.Start] and seen[c.Cancel] and seen[e.InstanceFailed] and seen[e.TrajectoryPaused]
    if paradigm is ParadigmName.MULTI_VERSION:
        assert seen[c.Release] and seen[e.TrajectoriesParked] and seen[c.Unpark]


def test_counts_can_be_read_while_they_change() -> None:
    placements = Placements()
    placements.observe(0.0, e.InstanceJoined(0, 0, 4, 100), [])
    starts: Sequence[Command] = [
        c.Start(n, n + 1, 0, version) for n, version in enumerate((2, 1, 2))
    ]
    placements.observe(1.0, e.TimerFired(), starts)
    counts = placements.versions_running()
    placements.observe(2.0, e.TimerFired(), [c.Cancel(0, 1, 0)])
    assert list(counts.items()) == [(1, 1), (2, 2)]
    assert placements.versions_running() == {1: 1, 2: 1}


# What storms meet too rarely


def test_a_late_cancel_spares_the_newer_placement() -> None:
    placements = Placements()
    placements.observe(0.0, e.InstanceJoined(0, 0, 4, 100), [])
    placements.observe(1.0, e.TimerFired(), [c.Start(7, 1, 0, 0)])
    placements.observe(2.0, e.TimerFired(), [c.Start(7, 5, 0, 0), c.Cancel(7, 1, 0)])
    assert placements.running == {(0, 0): 1}


def test_parked_work_is_not_parked_twice() -> None:
    placements = Placements()
    parked = (Placement(7, 1),)
    answer = e.TrajectoriesParked(0, 0, parked)
    placements.observe(0.0, e.InstanceJoined(0, 0, 4, 100), [])
    placements.observe(1.0, e.TimerFired(), [c.Start(7, 1, 0, 0), c.Park(0, 0, parked)])
    placements.observe(2.0, answer, [c.Install(0, 0, 1, 0)])
    assert placements.running == {}
    placements.observe(3.0, e.TimerFired(), [c.Unpark(0, 0, parked)])
    placements.observe(4.0, answer, [])  # the same again
    assert placements.running == {(0, 0): 1}


def test_what_is_parked_on_its_way_stays() -> None:
    placements = Placements()
    for name in (0, 1):
        placements.observe(0.0, e.InstanceJoined(name, 0, 4, 100), [])
    move, parked = c.Reserve(0, 0, 1, 0, (Move(7, 1, 2),)), (Placement(7, 1),)
    placements.observe(1.0, e.TimerFired(), [c.Start(7, 1, 0, 0), move, c.Park(0, 0, parked)])
    placements.observe(2.0, e.TrajectoriesParked(0, 0, parked), [])
    done = e.MigrationCompleted(0, parked)
    placements.observe(3.0, done, [c.Release(0), c.Cancel(7, 2, 1)])
    assert placements.running == {}
    placements.observe(4.0, e.TimerFired(), [c.Unpark(0, 0, parked)])
    assert placements.running == {(0, 0): 1}
