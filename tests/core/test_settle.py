"""Settled is settled: what lets an event that changed nothing skip the actions (`settle.py`)."""

from collections import Counter
from collections.abc import Callable
from random import Random

import pytest

from dora_rl.core.actions import settle as settling
from dora_rl.core.orchestrator import Orchestrator
from dora_rl.core.protocol.settings import ParadigmName, Settings
from dora_rl.core.state.run import State
from tests.core.adversary import Adversary, stir


def storm(seed: int) -> Adversary:
    """Some hundred events of a seeded run with faults, waits that expire and late answers."""
    rng = Random(seed)
    world = Adversary(
        Settings(
            paradigm=rng.choice([*ParadigmName, ParadigmName.MULTI_VERSION]),
            groups_per_step=rng.randint(1, 3),
            group_size=2,
            max_staleness=rng.randint(0, 3),
            version_slots=rng.randint(1, 2),
            fill_older=rng.random() < 0.5,
            score_timeout_s=20.0,
            install_timeout_s=20.0,
            migration_timeout_s=20.0,
        )
    )
    for name in range(rng.randint(1, 4)):
        world.join(name, slots=2, version_slots=2)
    world.deliver(0)
    stir(world, rng, 400, faults=True)
    return world


def settle_twice(patch: pytest.MonkeyPatch) -> None:
    """Take all actions where one look would do, and twice where they are taken anyway."""
    watch_idle = settling.watch_idle
    inside = False

    def act(state: State) -> None:
        nonlocal inside
        if inside:
            return watch_idle(state)
        inside = True
        settling._act(state)
        inside = False

    patch.setattr(settling, "watch_idle", act)


@pytest.mark.parametrize("seed", range(40))
def test_to_settle_again_decides_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    world = storm(seed)
    again = Orchestrator(world.core.settings)
    settle_twice(monkeypatch)
    for now, event, commands in world.log:
        assert again.handle(now, event) == commands, event
    assert again.snapshot() == world.core.snapshot()


def test_storms_take_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the test above would compare nothing."""
    calls = Counter[str]()

    def counted(name: str) -> Callable[[State], None]:
        action = getattr(settling, name)

        def call(state: State) -> None:
            calls[name] += 1
            action(state)

        return call

    for name in ("_act", "watch_idle"):
        monkeypatch.setattr(settling, name, counted(name))
    for seed in range(20):
        storm(seed)
    assert calls["watch_idle"] - calls["_act"] > 50
