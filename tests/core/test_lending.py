"""Loans of devices: the rule by hand, and the core's way of carrying it out."""

import random

import pytest

from dora_rl.core.audit import Audit
from dora_rl.core.audit.invariants import violations
from dora_rl.core.policy.lending import IdleInstances, Wait, due_back
from dora_rl.core.protocol import commands as cm
from dora_rl.core.protocol import events as ev
from dora_rl.core.protocol.errors import IllegalTransition, SettingsError
from dora_rl.core.protocol.settings import Elastic, ParadigmName, Settings
from dora_rl.core.protocol.types import SleepState
from dora_rl.core.state.run import TrainerPhase
from tests.core.adversary import Adversary, stir

ELASTIC = 5

# The rule


def wait(**changes: float) -> Wait:
    """Alone it takes 100 s; a loan doubles the slots, for all but 20 s of the wait."""
    values = {
        "missing": 50,
        "groups_per_s": 0.5,
        "own_slots": 64,
        "more_slots": 64,
        "wake_s": 12.0,
        "sleep_s": 8.0,
    }
    return Wait(**{**values, **changes})  # type: ignore[arg-type]


def test_what_a_loan_to_rollout_saves() -> None:
    # 60 s with it: 20 s at 0.5 groups/s are 10 groups, 40 s at 1 group/s the other 40.
    assert wait().alone_s == 100.0
    assert wait().saved_s == pytest.approx(40.0)
    assert wait().pays(5.0) and not wait().pays(5.1)  # at stake are 8 s


@pytest.mark.parametrize(
    "changes",
    [
        {"missing": 0},
        {"missing": -3},
        {"missing": 10},  # there in 20 s, which the switches take
        {"more_slots": 0},
        {"own_slots": 0},
        {"groups_per_s": 0.0},  # never seen: there is no telling
        {"wake_s": 92.0},
    ],
)
def test_a_loan_that_saves_nothing_is_not_made_even_if_it_costs_nothing(
    changes: dict[str, float],
) -> None:
    assert wait(**changes).saved_s == 0.0
    assert not wait(**changes).pays(1.0)


def test_what_a_loan_to_training_saves() -> None:
    # 90 s are left when two are there beside the six: they do a quarter of it.
    idle = IdleInstances(instances=2, trainer_instances=6, left_s=100.0, wake_s=5.0, sleep_s=10.0)
    assert idle.saved_s == pytest.approx(22.5)
    assert idle.pays(4.5) and not idle.pays(4.6)
    assert not idle._replace(left_s=10.0).pays(1.0)
    assert not idle._replace(instances=0).pays(1.0)


def test_devices_are_asked_for_as_early_as_they_take_to_come_back() -> None:
    assert not due_back(missing=10, groups_per_s=1.0, sleep_s=9.9)
    assert due_back(missing=10, groups_per_s=1.0, sleep_s=10.0)
    assert due_back(missing=0, groups_per_s=0.0, sleep_s=0.0)
    assert not due_back(missing=1, groups_per_s=0.0, sleep_s=1e9)


# The settings


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"elastic": "always"}, "elastic must be one of off, rollout, both: `always`"),
        ({"elastic_gain": 0.5}, "elastic_gain must be >= 1: `0.5`"),
        ({"switch_estimate_s": -1.0}, "switch_estimate_s must be >= 0"),
    ],
)
def test_what_makes_no_sense_is_refused(values: dict[str, object], problem: str) -> None:
    with pytest.raises(SettingsError, match=problem):
        Settings(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize("paradigm", ParadigmName)
def test_only_paradigms_that_split_devices_and_move_work_lend(paradigm: ParadigmName) -> None:
    world = Adversary(Settings(paradigm=paradigm, elastic=Elastic.BOTH))
    lends = paradigm in (ParadigmName.ONE_STEP, ParadigmName.MULTI_VERSION)
    assert (world.core.state.lending is not None) == lends


# The way


def lent(**changes: object) -> Adversary:
    """One step is taken, the next batch is far off, and the trainer's instance is awake."""
    values = {
        "groups_per_step": 4,
        "group_size": 1,
        "max_staleness": 3,
        "elastic": Elastic.ROLLOUT,
        "elastic_gain": 1.0,
        "switch_estimate_s": 0.0,
        "install_estimate_s": 0.0,
        "heartbeat_timeout_s": 1e5,
        "max_retries": 1,
        **changes,
    }
    settings = Settings(**values)  # type: ignore[arg-type]
    audit = Audit(settings)
    world = Adversary(settings, audit.observe)
    world.audit = audit  # type: ignore[attr-defined]
    world.join(0, slots=4)
    world.join(ELASTIC, slots=4, elastic=True)
    for _ in range(200):
        if world.woken:
            break
        world.advance(1.0)
        while world.pool:
            world.deliver(0)
        if world.core.state.trainer.step == 0:
            world.generate(0, "finish")
    assert world.woken == 1
    while world.pool:
        world.deliver(0)
    return world


def sleep_of(world: Adversary) -> SleepState:
    return world.core.state.fleet.instances[ELASTIC].sleep


def finish_batch(world: Adversary) -> None:
    for _ in range(40):
        world.advance(1.0)
        world.generate(0, "finish")
        while world.pool and not isinstance(world.pool[0], ev.InstanceSlept):
            world.deliver(0)
        if sleep_of(world) is SleepState.FALLING_ASLEEP:
            return
    raise AssertionError("it was never sent to sleep")


def test_a_trainer_that_waits_lends_and_trains_when_its_devices_are_back() -> None:
    world = lent()
    assert world.core.state.trainer.phase is TrainerPhase.IDLE
    assert sleep_of(world) is SleepState.AWAKE
    assert world.engines[ELASTIC].running  # it has got work
    steps = len(world.trained)
    finish_batch(world)
    assert len(world.trained) == steps  # the batch may be there, the devices are not
    while world.pool and len(world.trained) == steps:
        world.deliver(0)
        world.generate(0, "finish")
    assert len(world.trained) == steps + 1
    assert sleep_of(world) is SleepState.ASLEEP
    assert not list(violations(world.core.state))
    assert world.audit.report().ok  # type: ignore[attr-defined]


def test_an_instance_that_does_not_sleep_is_asked_again_and_then_given_up() -> None:
    world = lent()
    finish_batch(world)
    sleeps = [c for _, _, commands in world.log for c in commands if isinstance(c, cm.Sleep)]
    assert sleeps == [cm.Sleep(ELASTIC, 0)]
    for _ in range(2):
        world.pool = [e for e in world.pool if not isinstance(e, ev.InstanceSlept)]
        for name in (0, ELASTIC):
            world.report(name)
        world.advance(301.0)
        for name in (0, ELASTIC):
            world.report(name)
    said = [c for _, _, commands in world.log for c in commands]
    assert said.count(cm.Sleep(ELASTIC, 0)) == 2
    assert any(isinstance(c, cm.Expel) and c.instance == ELASTIC for c in said)
    assert not list(violations(world.core.state))


def test_one_loan_a_step_even_if_the_batch_is_taken_away_again() -> None:
    world = lent()
    loans = world.core.state.counters["loans_to_rollout"]
    finish_batch(world)
    while world.pool and world.core.state.trainer.phase is not TrainerPhase.TRAINING:
        world.deliver(0)
        world.generate(0, "finish")
    batch = tuple(group.group for group in world.trained[-1].groups)
    world.pool.clear()
    world.training = False
    world.send(ev.BatchRejected(world.trained[-1].step, batch, "loss is not finite"))
    world.advance(50.0)
    assert world.core.state.trainer.phase is TrainerPhase.IDLE
    assert world.core.state.counters["loans_to_rollout"] == loans


def test_an_illegal_change_of_roles_raises_and_changes_nothing() -> None:
    world = lent()
    instance = world.core.state.fleet.instances[ELASTIC]
    with pytest.raises(IllegalTransition, match="cannot go from `awake` to `asleep`"):
        world.core.state.fleet.set_sleep(instance, SleepState.ASLEEP)
    assert instance.sleep is SleepState.AWAKE


@pytest.mark.parametrize("elastic", [Elastic.ROLLOUT, Elastic.BOTH])
def test_loans_happen_in_storms_and_every_promise_holds(elastic: Elastic) -> None:
    woken = 0
    for seed in range(12):
        settings = Settings(
            groups_per_step=2,
            group_size=2,
            elastic=elastic,
            elastic_gain=1.0,
            switch_estimate_s=0.0,
            heartbeat_timeout_s=1e6,
        )
        audit = Audit(settings)
        world = Adversary(settings, audit.observe)
        for name in range(2):
            world.join(name, slots=3)
            world.join(ELASTIC + name, slots=3, elastic=True)
        for _ in range(20):
            stir(world, random.Random(f"{seed}"), 40, faults=seed % 2 == 1)
            assert not list(violations(world.core.state))
        assert audit.report().ok, audit.report().summary()
        woken += world.woken
        counters = world.core.state.counters
        steps = world.core.state.trainer.step + 1
        assert counters["loans_to_rollout"] <= steps and counters["loans_to_training"] <= steps
    assert woken > 0


def test_only_devices_that_training_can_use_are_lent_to_it() -> None:
    """Such as those of the trainer's own node."""
    asleep: set[int] = set()
    for seed in range(12):
        settings = Settings(
            groups_per_step=2,
            group_size=1,
            elastic=Elastic.BOTH,
            elastic_gain=1.0,
            switch_estimate_s=0.0,
            heartbeat_timeout_s=1e6,
        )
        world = Adversary(settings, lambda *_: None)
        for name in range(4):
            world.join(name, slots=3, lendable=name < 2)
        for _ in range(20):
            stir(world, random.Random(f"{seed}"), 40, faults=False)
        said = [c for _, _, commands in world.log for c in commands]
        asleep |= {c.instance for c in said if isinstance(c, cm.Sleep)}
    assert asleep and asleep <= {0, 1}
