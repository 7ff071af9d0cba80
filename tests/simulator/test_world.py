"""The loop: time, observers, ends; and the real core in it."""

from collections.abc import Sequence
from typing import Any

import pytest
from pydantic import ValidationError

from dora_rl.core.orchestrator import Orchestrator
from dora_rl.core.protocol import commands as cmd
from dora_rl.core.protocol import events as ev
from dora_rl.core.protocol.commands import Command
from dora_rl.core.protocol.errors import UserError
from dora_rl.core.protocol.events import Event
from dora_rl.core.protocol.settings import ParadigmName, Settings
from dora_rl.simulator.cost_parameters import Model
from dora_rl.simulator.distributions import Constant, LogNormal, Uniform
from dora_rl.simulator.errors import WorldError
from dora_rl.simulator.faults import FaultParams
from dora_rl.simulator.params import WorldParams
from dora_rl.simulator.workload import Sampler, Workload
from dora_rl.simulator.world import World
from tests.simulator.scripted import Script, build, check_memory

MODEL = Model(parameters=7.6e9, layers=28, heads=28, kv_heads=4, head_dim=128)
WORKLOAD = Workload(
    prompt_tokens=Uniform(low=50, high=200),
    response_tokens=LogNormal(mean=600, sigma=1.0, max=4000),
    turns=Uniform(low=1, high=3),
    environment_s=Uniform(low=0, high=10),
    observation_tokens=Constant(value=50),
    reward_s=Constant(value=1),
)
STORM = FaultParams(
    crash_per_hour=4,
    hang_per_hour=4,
    hang_s=60,
    slow_per_hour=4,
    leave_per_hour=3,
    lost=0.01,
    duplicated=0.02,
    delayed=0.05,
    failed_migration=0.1,
    failed_kv_path=0.1,
    failed_publication=0.1,
    failed_install=0.05,
    wrong_digest=0.01,
    failed_train=0.05,
    rejected_batch=0.02,
    endless_environment=0.01,
    failed_reward=0.01,
)


def test_a_timer_replaces_the_one_before() -> None:
    script = Script()
    script.on(ev.WeightsPublished, lambda e: [cmd.SetTimer(5.0), cmd.SetTimer(3.0)])
    world = build(script)
    world.run(until_s=10)
    assert [now for now, _ in script.seen(ev.TimerFired)] == [3.0]


def test_halt_ends_the_run_at_once() -> None:
    script = Script()
    script.on(ev.WeightsPublished, lambda e: [cmd.Halt(False, "no more"), cmd.SetTimer(1.0)])
    outcome = build(script).run()
    assert outcome == (False, "no more", 0.0, 0)
    assert len(script.events) == 1


def test_until_stops_between_events_and_can_go_on() -> None:
    script = Script()
    script.at(2.0)
    world = build(script)
    assert world.run(until_s=1.5) == (True, "1.5 s passed", 1.5, 0)
    assert world.now == 1.5
    assert not script.seen(ev.TimerFired)
    world.run(until_s=2.5)
    assert [now for now, _ in script.seen(ev.TimerFired)] == [2.0]


def test_a_core_that_stops_time_is_found_out() -> None:
    script = Script()
    script.on(ev.WeightsPublished, lambda e: [cmd.SetTimer(1.0)])
    script.on(ev.TimerFired, lambda e: [cmd.SetTimer(1.0)])
    with pytest.raises(WorldError, match="for ever"):
        build(script).run(until_s=10)


def test_a_workload_must_fit_the_memory() -> None:
    params = WorldParams(instances=1, model=MODEL, device="H800")
    workload = Workload(response_tokens=Constant(value=10_000_000))
    with pytest.raises(UserError, match="longest trajectory must fit"):
        World(Script(), params, Sampler(workload, 0), 0, group_size=1)


@pytest.mark.parametrize(
    "wrong", [{"instances": 0}, {"slots": 0}, {"filter_rate": 1.5}, {"unknown": 1}]
)
def test_parameters_have_ranges(wrong: dict[str, Any]) -> None:
    known: dict[str, Any] = {"instances": 1, "model": MODEL, "device": "H800"}
    with pytest.raises(ValidationError):
        WorldParams(**(known | wrong))


# The real core


def run_core(
    paradigm: str, seed: int, faults: FaultParams | None = None, **params: Any
) -> tuple[World, Any, list[tuple[float, Event, Sequence[Command]]]]:
    colocated = paradigm in ("sync", "partial")
    version_slots = 1 + seed % 2
    settings = Settings(
        paradigm=ParadigmName(paradigm),
        groups_per_step=8,
        group_size=4,
        max_steps=4,
        version_slots=version_slots,
        heartbeat_timeout_s=47.3,
        trajectory_timeout_s=300,
        score_timeout_s=60,
        install_timeout_s=60,
        migration_timeout_s=30,
        prompt_timeout_s=30,
        train_timeout_s=600,
        publish_timeout_s=60,
        max_train_attempts=9,
        max_publish_attempts=9,
        max_retries=9,
    )
    known: dict[str, Any] = {
        "instances": 8 if colocated else 4,
        "slots": 8,
        "version_slots": version_slots,
        "train_devices": 0 if colocated else 4,
        "model": MODEL,
        "device": "H800",
        "save_period_s": 30.0,
        "faults": faults or FaultParams(),
    }
    world = World(
        Orchestrator(settings),
        WorldParams(**(known | params)),
        Sampler(WORKLOAD, seed),
        seed,
        group_size=4,
    )
    journal: list[tuple[float, Event, Sequence[Command]]] = []
    world.observe(lambda now, event, commands: journal.append((now, event, commands)))
    outcome = world.run(until_s=8 * 3600)
    return world, outcome, journal


@pytest.mark.parametrize("paradigm", list(ParadigmName))
def test_every_paradigm_trains_its_steps(paradigm: ParadigmName) -> None:
    for seed in (0, 1):
        world, outcome, journal = run_core(paradigm, seed)
        assert (outcome.ok, outcome.steps) == (True, 4)
        for instance in world.instances:
            instance.advance(world.now)
        check_memory(world)
        finished = [e for _, e, _ in journal if isinstance(e, ev.TrajectoryFinished)]
        sampler = Sampler(WORKLOAD, seed)
        for event in finished:
            drawn = sampler.trajectory(event.trajectory // 4, event.trajectory % 4)
            assert event.tokens == drawn.generated_tokens
        pinned = paradigm not in (ParadigmName.PARTIAL, ParadigmName.IN_FLIGHT)
        if pinned:
            assert all(len(event.segments) == 1 for event in finished)
            assert world.facts.reprefilled_tokens == 0
        assert world.facts.generated_tokens >= sum(event.tokens for event in finished)


@pytest.mark.parametrize("faults", [FaultParams(), STORM], ids=["calm", "storm"])
def test_a_run_is_a_function_of_scenario_and_seed(faults: FaultParams) -> None:
    first = run_core("multi_version", 3, faults)
    again = run_core("multi_version", 3, faults)
    assert first[2] == again[2]
    assert first[0].faults.log == again[0].faults.log
    assert first[2] != run_core("multi_version", 5, faults)[2]


@pytest.mark.parametrize("paradigm", list(ParadigmName))
def test_a_storm_ends_in_every_step_trained(paradigm: ParadigmName) -> None:
    for seed in range(6):
        world, outcome, _ = run_core(paradigm, seed, STORM, filter_rate=0.1, reward_workers=8)
        assert (outcome.ok, outcome.steps) == (True, 4), (seed, outcome)
        assert world.faults.log
