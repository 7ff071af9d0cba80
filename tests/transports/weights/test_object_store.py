"""What is special about versions that are pulled from an object store, which may fail at any time.

The store is one in memory; `tests/runtime/ray/test_objects.py` has Ray's.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dora_rl.framing import frame
from dora_rl.transports.errors import ObjectStoreError
from dora_rl.transports.objects import link as links
from dora_rl.transports.objects.host import LocalPeer
from dora_rl.transports.objects.store import Pending
from dora_rl.transports.weights import registry
from dora_rl.transports.weights.settings import WeightTransportSettings
from dora_rl.weights.errors import WeightsError
from tests.transports.weights.harness import Harness, arrived
from tests.transports.weights.sender import policy
from tests.weights.samples import identical

SETTINGS = WeightTransportSettings(transport="object_store", timeout_s=30.0)


@pytest.fixture
def transport(tmp_path: Path) -> Iterator[Harness]:
    with Harness(tmp_path, SETTINGS) as harness:
        yield harness


class Faulty(LocalPeer):
    """A peer whose objects are changed on their way, for as long as `fault` is set."""

    fault: Callable[[Pending, float], memoryview] | None = None

    def version_object(self, name: str) -> Pending:
        pending = super().version_object(name)
        fault = self.fault
        return pending if fault is None else lambda timeout_s: fault(pending, timeout_s)


def truncated(pending: Pending, timeout_s: float) -> memoryview:
    data = pending(timeout_s)
    return data[: len(data) // 2]


def gone(pending: Pending, timeout_s: float) -> memoryview:
    raise ObjectStoreError("whoever has the object is gone.")


def late(pending: Pending, timeout_s: float) -> memoryview:
    time.sleep(timeout_s)
    raise ObjectStoreError("an object has not come in time.")


@pytest.mark.parametrize("fault", [truncated, gone, late])
@pytest.mark.parametrize("delta", [False, True])
def test_what_does_not_come_is_mapped_from_the_run_directory_and_said(
    transport: Harness, fault: Any, delta: bool, caplog: pytest.LogCaptureFixture
) -> None:
    transport.settings = SETTINGS.model_copy(update={"delta": delta, "timeout_s": 0.5})
    transport.peer = peer = Faulty(transport.host, transport.objects)
    transport.publish(0)
    receiver = transport.receiver()
    assert identical(arrived(receiver, 0), policy(0))
    transport.publish(1)
    peer.fault = fault
    with caplog.at_level(logging.WARNING):
        assert identical(arrived(receiver, 1), policy(1))
    assert "version 1 is mapped from the run directory" in caplog.text
    assert receiver.traffic.fallbacks == 1
    peer.fault = None
    transport.publish(2)
    assert identical(arrived(receiver, 2), policy(2))
    assert receiver.traffic.fallbacks == 1
    assert receiver.traffic.deltas == delta  # from version 0, whose copy is here


def test_a_store_that_is_full_costs_a_fallback_until_it_has_room(transport: Harness) -> None:
    transport.publish(0)
    receiver = transport.receiver()
    transport.objects.capacity = 100
    assert identical(arrived(receiver, 0), policy(0))
    assert receiver.traffic.fallbacks == 1 and transport.objects.puts == 0
    transport.objects.capacity = None
    assert identical(arrived(receiver, 0), policy(0))
    assert receiver.traffic.fallbacks == 1 and transport.objects.puts == 1


def test_without_a_sender_the_run_directory_has_it(transport: Harness) -> None:
    transport.publish(0)
    transport.peer = None  # type: ignore[assignment]
    receiver = transport.receiver()
    assert identical(arrived(receiver, 0), policy(0))
    assert receiver.traffic.fallbacks == 1
    with pytest.raises(WeightsError, match=r"version 3 is not in .*Nor .*nobody is there"):
        receiver.receive(3)


def test_layer_groups_are_put_once_and_freed_when_the_version_retires(
    transport: Harness, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(registry, "LAYER_GROUP_BYTES", 10_000)
    publisher = registry.make_publisher(SETTINGS, transport.store)
    for version in (0, 1):
        groups = len(publisher.publish(version, policy(version)).files)
        assert groups > 2
    receivers = [transport.receiver() for _ in range(3)]
    for version in (0, 1):
        for receiver in receivers:
            assert identical(arrived(receiver, version), policy(version))
    assert transport.objects.puts == 2 * groups
    used = transport.objects.used
    transport.host.retire(0)
    assert 0 < transport.objects.used < used
    transport.host.retire(1)
    assert transport.objects.used == 0
    assert sum(receiver.traffic.fallbacks for receiver in receivers) == 0


def test_other_weights_under_the_same_number_are_put_anew(transport: Harness) -> None:
    transport.publish(0)
    receiver = transport.receiver()
    assert identical(arrived(receiver, 0), policy(0))
    transport.delete(0)
    transport.publish(0, step=7)
    assert identical(arrived(receiver, 0), policy(7))
    assert receiver.traffic.fallbacks == 0 and transport.objects.puts == 2


def test_deltas_alone_are_put_for_who_has_a_copy(transport: Harness) -> None:
    transport.settings = SETTINGS.model_copy(update={"delta": True})
    transport.publish(0)
    receiver = transport.receiver()
    arrived(receiver, 0)
    whole = transport.objects.used
    transport.publish(1)
    assert identical(arrived(receiver, 1), policy(1))
    assert receiver.traffic.deltas == 1
    assert transport.objects.used - whole < whole / 10


def test_several_receivers_at_once(transport: Harness) -> None:
    transport.publish(0)
    receivers = [transport.receiver() for _ in range(4)]
    threads = [threading.Thread(target=arrived, args=(receiver, 0)) for receiver in receivers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert transport.objects.puts == 1
    assert [receiver.traffic.fallbacks for receiver in receivers] == [0] * 4


def test_a_gateway_that_hangs_is_given_up_and_its_late_answer_is_nobodys(
    transport: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "_GRACE_S", 0.1)
    transport.publish(0)
    goes_on = threading.Event()
    describe = transport.host.describe

    def hang(*args: Any) -> bytes:
        goes_on.wait()
        return describe(*args)

    monkeypatch.setattr(transport.host, "describe", hang)
    receiver = transport.receiver(timeout_s=0.1)
    assert identical(arrived(receiver, 0), policy(0))
    assert receiver.traffic.fallbacks == 1
    goes_on.set()
    monkeypatch.setattr(links, "_GRACE_S", 30.0)
    transport.publish(1)
    assert identical(arrived(receiver, 1), policy(1))
    assert receiver.traffic.fallbacks == 1


def test_what_was_not_offered_is_refused(transport: Harness, tmp_path: Path) -> None:
    transport.publish(0)
    link = transport.link()
    link.find(0, None, 5.0)
    for name in ("version-00000001/model.safetensors", "../secret", "version-00000000"):
        with pytest.raises(ObjectStoreError, match="is of no version that was asked for"):
            link.fetch({name: tmp_path / "file"}, 5.0)
        (tmp_path / "file").unlink()


def test_a_worker_whose_gateway_has_ended_is_told(transport: Harness) -> None:
    transport.publish(0)
    receiver = transport.receiver()
    transport._links[-1]._socket.shutdown(2)
    assert identical(arrived(receiver, 0), policy(0))
    assert receiver.traffic.fallbacks == 1


def test_a_gateway_ends_when_it_is_told_nonsense(transport: Harness) -> None:
    transport.publish(0)
    receiver = transport.receiver()
    transport._links[-1]._socket.sendall(frame(b"nonsense"))
    assert identical(arrived(receiver, 0), policy(0))
    assert receiver.traffic.fallbacks == 1
