"""Weights and KV through Ray's object store: the contract of transports, and runs that use it.

Actors without workers stand beside the receivers of the contract, which are in this process.
"""

import os
import re
import socket
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from dora_rl.core.protocol.commands import Command
from dora_rl.core.protocol.events import BatchTrained, Event
from dora_rl.runtime.control.listeners import Listener
from dora_rl.transports.kv.object_store import KvObjects, key_of
from dora_rl.transports.objects.link import ObjectLink
from dora_rl.transports.weights.settings import WeightTransportSettings
from tests.runtime.harness import assert_sound, run
from tests.runtime.test_local import LOCAL, by
from tests.runtime.test_local import nobody_is_left_behind as nobody_is_left_behind
from tests.transports.weights import test_contract as contract
from tests.transports.weights.harness import Harness, arrived
from tests.transports.weights.sender import policy
from tests.weights.samples import identical

pytestmark = pytest.mark.ray
SETTINGS = WeightTransportSettings(transport="object_store", delta=True, timeout_s=60.0)


class Actors:
    """A sender's and those of receivers, which are used again."""

    def __init__(self) -> None:
        from dora_rl.runtime.launchers.ray.lone_actors import LoneActor

        self.make: Any = LoneActor
        self.sender, *self.receivers = (LoneActor() for _ in range(3))


@pytest.fixture(scope="module")
def actors(ray_address: str) -> Iterator[Actors]:
    import ray

    ray.init(ray_address, log_to_driver=False)
    yield Actors()
    ray.shutdown()


class RayHarness(Harness):
    """Receivers are in turn beside two actors."""

    def __init__(self, root: Path, actors: Actors) -> None:
        super().__init__(root, SETTINGS)
        self.actors = actors
        self.linked: list[Any] = []
        self._sockets = tempfile.TemporaryDirectory()  # the path of a socket must be short
        actors.sender.serve(self.store)

    def link(self) -> ObjectLink:
        number = len(self._links)
        actor = self.actors.receivers[number % 2]
        path = Path(self._sockets.name, str(number))
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen()
            actor.connect(self.store, path)
            connection, _ = listener.accept()
        actor.introduce(self.actors.sender)
        self.linked.append(actor)
        self._links.append(ObjectLink(connection))
        return self._links[-1]

    def __exit__(self, *about: Any) -> None:
        super().__exit__(*about)
        self._sockets.cleanup()


@pytest.fixture
def transport(actors: Actors, tmp_path: Path) -> Iterator[RayHarness]:
    with RayHarness(tmp_path, actors) as harness:
        yield harness


test_every_version_arrives = contract.test_every_version_arrives_to_the_bit
test_joining_late = contract.test_a_receiver_that_joins_late_gets_the_last_and_what_follows
test_missing_versions_and_going_back = contract.test_a_receiver_may_miss_versions_and_go_back
test_it_is_the_weights_that_count = contract.test_it_is_the_weights_that_count_not_the_number
test_damaged_bytes_never_arrive = contract.test_damaged_bytes_never_arrive
test_a_dead_sender = contract.test_a_sender_that_dies_within_a_publication_leaves_the_last_version


def test_a_sender_that_dies_midway_costs_a_fallback_and_its_successor_is_found(
    transport: RayHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport.publish(0)
    receiver: Any = transport.receiver()
    fetch = receiver._link.fetch

    def after_death(*args: Any) -> None:
        transport.actors.sender.kill()
        fetch(*args)

    monkeypatch.setattr(receiver._link, "fetch", after_death)
    assert identical(arrived(receiver, 0), policy(0))
    assert receiver.traffic.fallbacks == 1
    monkeypatch.undo()
    transport.actors.sender = transport.actors.make()
    transport.actors.sender.serve(transport.store)
    transport.linked[0].introduce(transport.actors.sender)
    transport.publish(1)
    assert identical(arrived(receiver, 1), policy(1))
    assert receiver.traffic.fallbacks == 1


def test_kv_goes_from_one_node_to_the_other_once(transport: RayHarness, tmp_path: Path) -> None:
    ends = [KvObjects(transport.link(), tmp_path, timeout_s=60.0) for _ in range(2)]
    source, target = transport.linked
    data = bytes(range(256)) * 4096
    ends[0].put(3, data)
    target.introduce(source, key_of(3))
    assert ends[1].take(3) == data
    with pytest.raises(OSError, match="is not there"):
        ends[1].take(3)
    ends[0].put(4, data)
    transport.actors.receivers[0] = transport.actors.make()
    source.kill()
    target.introduce(source, key_of(4))
    with pytest.raises(OSError, match="whoever has the object is gone"):
        ends[1].take(4)


def fill() -> list[Any]:
    """All of the object store, until the references are dropped."""
    import ray

    references, size = [], 16 << 20
    while size >= 1 << 10:
        try:
            references.append(ray.put(bytes(size)))
        except ray.exceptions.RayError:
            size //= 4
    return references


def test_a_store_that_is_full_costs_a_fallback(transport: RayHarness) -> None:
    transport.publish(0)
    receiver = transport.receiver()
    references = fill()
    assert identical(arrived(receiver, 0), policy(0))
    assert receiver.traffic.fallbacks == 1
    references.clear()
    transport.publish(1)
    assert identical(arrived(receiver, 1), policy(1))
    assert receiver.traffic.fallbacks == 1


# Runs. Those of `test_local` and `test_faults` with an address go through the object store, too.


class FullAfterSteps(Listener):
    """Fills the object store when the second batch is trained."""

    def __init__(self) -> None:
        self.batches = 0
        self.references: list[Any] = []

    def observed(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        self.batches += isinstance(event, BatchTrained)
        if self.batches == 2 and not self.references:
            self.references = fill()


def test_a_run_has_its_weights_by_objects_and_goes_on_when_their_store_is_full(
    ray_address: str, model: Path, tmp_path: Path
) -> None:
    full = FullAfterSteps()
    ended = run(
        model,
        tmp_path / "run",
        full,
        **by(LOCAL, {"kind": "ray", "ray": {"address": ray_address}, "weights": {"delta": True}}),
        train={"learning_rate": 1e-6, "threads": 1, "publish_dtype": "bfloat16"},
        # With K = 2 the last batch is of version 2 or later, published after the store was full.
        run={"steps": 5},
    )
    assert full.references
    assert_sound(ended)
    shares = [r.weights_sent_share for r in ended.steps if r.weights_sent_share is not None]
    assert min(shares) < 0.9
    said = "".join(path.read_text() for path in (ended.directory / "logs").glob("rollout-*.log"))
    mapped = re.findall(r"version (\d+) is mapped from the run directory: (.*)", said)
    assert mapped and {version for version, _ in mapped}.isdisjoint("01")
    assert {"object store of the node is full" in why for _, why in mapped} == {True}
    assert not list(Path(tempfile.gettempdir(), f"dora-rl-{os.getuid()}").glob("*/copies"))
