"""Whom a worker is told to ask, by the message that makes it want something; and the defaults."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dora_rl.core.protocol import commands as cm
from dora_rl.core.protocol.errors import UserError
from dora_rl.core.protocol.types import Move
from dora_rl.runtime.control import messages as ms
from dora_rl.runtime.prepare.plan import read_config
from tests.runtime.harness import settings

pytestmark = pytest.mark.ray


class Recorded:
    """An actor that keeps what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda argument: self.asked.append((name, argument)))


def process(actor: Any) -> Any:
    return SimpleNamespace(actor=actor)


def test_installs_come_with_the_trainer_of_the_moment() -> None:
    from dora_rl.runtime.launchers.ray.introductions import Introductions

    trainers: list[Any] = [None, process(None), process("first"), process("second")]
    found = Introductions(lambda: trainers.pop(0))
    install = ms.Perform.of(cm.Install(0, 0, 7, None))
    instance = process("instance")
    peers = [found.peers_for(instance, install)["weights"] for _ in range(4)]
    assert peers == [None, None, "first", "second"]
    assert found.peers_for(instance, ms.Perform.of(cm.Evict(0, 0, 7))) == {}
    # Its moves are not what the wire makes of them yet.
    reserve = cm.Reserve(3, 0, 1, 7, (Move(1, 1, 2),))
    assert found.peers_for(instance, ms.Perform.of(reserve)) == {}


def test_what_moves_is_asked_of_its_source_until_it_is_discarded() -> None:
    from dora_rl.runtime.launchers.ray.introductions import Introductions

    found = Introductions(lambda: None)
    actor = Recorded()
    source, target = process(actor), process("target")
    assert found.peers_for(source, ms.HandOver(3, (Move(1, 1, 2),))) == {}
    assert found.peers_for(target, ms.TakeOver(3)) == {"migration-3": actor}
    assert found.peers_for(target, ms.TakeOver(4)) == {"migration-4": None}
    found.discard(3)
    found.discard(3)
    assert actor.asked == [("discard", "migration-3")]
    for migration in range(1000):
        found.peers_for(source, ms.HandOver(migration, ()))
    assert len(found._sources) == 256


def test_a_version_that_is_deleted_is_retired_by_the_trainers_actor() -> None:
    from dora_rl.runtime.launchers.ray.introductions import Introductions

    actor = Recorded()
    found = Introductions(lambda: process(actor))
    event: Any = None
    found.observed(0.0, event, [cm.Delete(3), cm.Publish(5), cm.Delete(4)])
    assert actor.asked == [("retire", 3), ("retire", 4)]


def test_objects_are_the_default_on_a_cluster_that_runs(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dora_rl.runtime.launchers.ray.introductions import uses_objects, with_transports

    def chosen(**runtime: Any) -> tuple[Any, Any]:
        given = settings(model, tmp_path / "run", runtime={"kind": "ray", **runtime})
        config = with_transports(read_config(given))
        assert uses_objects(config) == (
            "object_store" in (config.runtime.weights.transport, config.runtime.kv.transport)
        )
        return config.runtime.weights.transport, config.runtime.kv.transport

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert chosen() == ("directory", "directory")
    assert chosen(weights={"transport": "object_store"}) == ("object_store", "directory")
    assert chosen(ray={"address": "10.0.0.1:6379"}) == ("object_store", "object_store")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert chosen(kv={"transport": "directory"}) == ("object_store", "directory")
    with pytest.raises(UserError, match=r"runtime.kv.transport needs a Ray cluster.*`local`"):
        chosen(kind="local", kv={"transport": "object_store"})
