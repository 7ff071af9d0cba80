"""Deliberate breakages of the core: the invariants or the audit must catch each of them."""

import random

import pytest

from dora_rl.core.actions import host, migrate, supply, train
from dora_rl.core.audit import Audit
from dora_rl.core.audit.invariants import check
from dora_rl.core.handlers import trajectories
from dora_rl.core.protocol.errors import InvariantViolation
from dora_rl.core.protocol.settings import Settings
from dora_rl.core.protocol.types import HostState
from dora_rl.core.state.fleet import Instance
from dora_rl.core.state.versions import VersionRecord
from dora_rl.core.state.work import Work
from tests.core.adversary import Adversary, stir

SEEDS = range(60)


def breaches(seed: int) -> str:
    """What a storm of one seed shows to be broken; empty if every promise holds."""
    rng = random.Random(seed)
    settings = Settings(
        groups_per_step=rng.randint(1, 4),
        group_size=rng.randint(1, 3),
        max_staleness=rng.randint(1, 3),
        version_slots=rng.randint(1, 2),
        turn_s=20.0,
    )
    audit = Audit(settings)
    world = Adversary(settings, audit.observe)
    for name in range(rng.randint(2, 5)):
        world.join(name, slots=rng.randint(2, 5), version_slots=2)
    for _ in range(60):
        stir(world, rng, 20, faults=True)
        try:
            check(world.core.state)
        except InvariantViolation as violation:
            return str(violation)
        report = audit.report()
        if not report.ok:
            return "\n".join(report.summary())
    return ""


def overtake_a_deadline(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(train, "overdue", lambda *_: None)


def admit_without_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(supply, "schedulable", lambda *_: 100)
    patch.setattr(train, "overdue", lambda *_: None)


def forget_a_lease(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(VersionRecord, "leased", property(lambda self: bool(self.instances)))


def accept_a_zombie(patch: pytest.MonkeyPatch) -> None:
    def placed(state, event, name, fence, *, on_its_way=False):
        return state.work.trajectories.get(name)

    patch.setattr(trajectories, "placed_trajectory", placed)


def drop_a_group(patch: pytest.MonkeyPatch) -> None:
    def forget(work: Work, group, reason: str) -> None:
        work._move_group(group, "filtered")
        work._close(group)

    patch.setattr(Work, "filter", forget)


def mix_versions_on_migration(patch: pytest.MonkeyPatch) -> None:
    def serves_any(self: Instance, version: int) -> bool:
        return HostState.READY in self.hosts.values() and not self.leaving

    patch.setattr(Instance, "serves", serves_any)


def serve_before_the_install_is_verified(patch: pytest.MonkeyPatch) -> None:
    def serves(self: Instance, version: int) -> bool:
        return version in self.hosts and self.outgoing != version and not self.leaving

    original = host._install

    def install(state, instance, *rest, **options) -> None:
        original(state, instance, *rest, **options)
        state.fleet.offer(instance)
        state.unplaced.update(instance.hosts)

    patch.setattr(Instance, "serves", serves)
    patch.setattr(host, "_install", install)


def lose_what_a_dead_instance_carried(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(host, "requeue", lambda state, trajectory: None)


def move_without_a_new_fence(patch: pytest.MonkeyPatch) -> None:
    original = migrate._arrive
    patch.setattr(
        migrate,
        "_arrive",
        lambda state, migration, trajectory, fence: original(
            state, migration, trajectory, trajectory.fence
        ),
    )


def train_a_group_twice(patch: pytest.MonkeyPatch) -> None:
    original = Work.batch_next
    last = {}

    def batch_next(work: Work, version: int):
        group = original(work, version)
        again, last["group"] = last.get("group"), group
        return again if again is not None and again.id in work.groups else group

    patch.setattr(Work, "batch_next", batch_next)


def fail_for_age(patch: pytest.MonkeyPatch) -> None:
    """Dropping what is late instead of waiting for it, as others do."""
    original = train.overdue

    def drop_late(outstanding, taken, *rest):
        late = original(outstanding, taken, *rest)
        if late is not None:
            outstanding[late] = taken.get(late, 0)
        return None

    patch.setattr(train, "overdue", drop_late)


MUTATIONS = [
    overtake_a_deadline,
    admit_without_end,
    forget_a_lease,
    accept_a_zombie,
    drop_a_group,
    mix_versions_on_migration,
    serve_before_the_install_is_verified,
    lose_what_a_dead_instance_carried,
    move_without_a_new_fence,
    train_a_group_twice,
    fail_for_age,
]


def test_the_core_as_it_is_breaks_nothing() -> None:
    assert not any(breaches(seed) for seed in SEEDS)


@pytest.mark.parametrize("mutate", MUTATIONS)
def test_a_broken_core_is_caught(mutate, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    for seed in SEEDS:
        try:
            found = breaches(seed)
        except InvariantViolation as violation:
            found = str(violation)
        except (AssertionError, KeyError, AttributeError, ValueError):
            continue  # the world or the core itself broke down; that is not what is tested
        if found:
            return
    pytest.fail(f"{mutate.__name__} went unnoticed in {len(SEEDS)} storms")
