"""What is special about a transfer by broadcast: several at once, and deaths in the midst of it."""

import os
import signal
import stat
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from dora_rl.transports.weights import broadcast
from dora_rl.transports.weights.process_group import GroupPublisher, GroupReceiver
from dora_rl.transports.weights.requests import ENDPOINT, read_endpoint, write_endpoint
from dora_rl.transports.weights.settings import WeightTransportSettings
from dora_rl.transports.weights.shared_directory import WeightStore
from dora_rl.weights.errors import WeightsError
from tests.patience import PATIENCE_S
from tests.transports.weights import harness
from tests.transports.weights.harness import Harness, arrived
from tests.transports.weights.sender import SMALL_CHUNK, policy
from tests.weights.samples import identical

SETTINGS = WeightTransportSettings(transport="process_group", timeout_s=60.0)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a sender has that is killed within a broadcast: so that a version takes several."""
    monkeypatch.setattr(broadcast, "CHUNK", SMALL_CHUNK)


@pytest.fixture
def transport(tmp_path: Path) -> Iterator[Harness]:
    with Harness(tmp_path, SETTINGS) as found:
        yield found


def test_several_receivers_at_once(transport: Harness) -> None:
    receivers = [transport.receiver() for _ in range(4)]
    for version in range(3):
        transport.publish(version)
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda receiver, v=version: arrived(receiver, v), receivers))
        assert all(identical(tensors, policy(version)) for tensors in found)
    assert all((r.traffic.wholes, r.traffic.deltas) == (1, 2) for r in receivers)


@pytest.mark.usefixtures("small_chunks")
def test_a_sender_that_dies_within_a_broadcast_is_told_in_time(transport: Harness) -> None:
    transport.publish(0)
    transport.restart(kill="sending")
    receiver = transport.receiver(timeout_s=5.0)
    began = time.monotonic()
    with pytest.raises(WeightsError, match=r"version 0 did not arrive within 5 s: .*the trainer"):
        receiver.receive(0)
    assert time.monotonic() - began < 5.0 + PATIENCE_S
    transport.await_death()
    transport.restart(kill="never, in small chunks")
    assert identical(arrived(transport.receiver(), 0), policy(0))


@pytest.mark.usefixtures("small_chunks")
def test_the_successor_of_a_dead_sender_is_found_while_waiting(transport: Harness) -> None:
    transport.publish(0)
    transport.restart(kill="sending")
    receiver = transport.receiver()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(arrived, receiver, 0)
        transport.await_death()
        transport.restart(kill="never, in small chunks")
        assert identical(waiting.result(PATIENCE_S), policy(0))


def test_a_sender_that_hangs_is_told_in_time(transport: Harness) -> None:
    transport.publish(0)
    receiver = transport.receiver(timeout_s=1.0)
    transport.pause(3.0)
    with pytest.raises(
        WeightsError, match=r"did not arrive within 1 s: .*runtime.weights.timeout_s"
    ):
        receiver.receive(0)
    assert identical(arrived(transport.receiver(), 0), policy(0))


def receive_and_die(root: str, cache: str) -> None:
    """Another instance, which is killed within the transfer."""
    from tests.transports.weights.sender import dying_after

    group = vars(broadcast)["Group"]
    group._broadcast = dying_after(group._broadcast, 0)
    GroupReceiver(Path(root), Path(cache), backend="gloo", timeout_s=20.0).receive(0)


def test_a_receiver_that_dies_costs_the_others_a_repetition(
    transport: Harness, tmp_path: Path
) -> None:
    short = WeightTransportSettings(transport="process_group", timeout_s=3.0)
    transport.settings = short  # of the sender: how long it waits for the one that is dead
    transport.publish(0)
    arguments = (str(transport.store), str(tmp_path / "other"))
    other = harness._FORKS.Process(target=receive_and_die, args=arguments)
    other.start()
    assert identical(arrived(transport.receiver(timeout_s=60.0), 0), policy(0))
    other.join(PATIENCE_S)
    assert other.exitcode == -signal.SIGKILL
    assert identical(arrived(transport.receiver(timeout_s=60.0), 0), policy(0))


def test_another_token_gets_nothing(tmp_path: Path) -> None:
    publisher = GroupPublisher(WeightStore(tmp_path / "w"), backend="gloo", timeout_s=5.0)
    publisher.publish(0, policy(0))
    endpoint = read_endpoint(tmp_path / "w")
    assert endpoint.address.loopback
    assert stat.S_IMODE((tmp_path / "w" / ENDPOINT).stat().st_mode) == 0o400
    write_endpoint(tmp_path / "w", msgspec.structs.replace(endpoint, token="0" * 64))
    receiver = GroupReceiver(tmp_path / "w", tmp_path / "c", backend="gloo", timeout_s=1.0)
    with pytest.raises(WeightsError, match="did not arrive within 1 s"):
        receiver.receive(0)
    publisher.close()


def test_a_store_without_a_sender(tmp_path: Path) -> None:
    (tmp_path / "w").mkdir()
    receiver = GroupReceiver(tmp_path / "w", tmp_path / "c", backend="gloo", timeout_s=0.5)
    with pytest.raises(WeightsError, match=r"did not arrive within 0\.5 s: cannot open .*endpoint"):
        receiver.receive(0)
    (tmp_path / "w" / ENDPOINT).write_bytes(b"{}")
    with pytest.raises(WeightsError, match="is no endpoint"):
        receiver.receive(0)


def test_a_publisher_that_is_closed_leaves_no_thread(tmp_path: Path) -> None:
    before, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    publisher = GroupPublisher(WeightStore(tmp_path), backend="gloo", timeout_s=5.0)
    publisher.publish(0, policy(0))
    publisher.close()
    assert threading.active_count() == before
    assert not (tmp_path / ENDPOINT).exists()
    assert len(os.listdir("/proc/self/fd")) == files


def test_nccl_without_a_gpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"runtime.weights.backend needs a GPU.*`nccl`.*gloo"):
        GroupReceiver(tmp_path, tmp_path / "c", backend="nccl", timeout_s=1.0)
