"""Deltas between a store and its receivers: when they are used, and when the whole is."""

from pathlib import Path

import pytest
import torch

from dora_rl.transports.weights.delta_directory import DeltaPublisher, DeltaReceiver
from dora_rl.transports.weights.shared_directory import WeightStore
from dora_rl.weights import disk
from dora_rl.weights.adapter import Adapter, tensor_names
from dora_rl.weights.errors import WeightsError
from dora_rl.weights.loading import open_version
from dora_rl.weights.versions import delete_version, deltas
from tests.transports.weights.harness import arrived
from tests.transports.weights.sender import policy
from tests.weights.samples import identical, replace


@pytest.fixture
def publisher(tmp_path: Path) -> DeltaPublisher:
    return DeltaPublisher(WeightStore(tmp_path / "weights"))


@pytest.fixture
def receiver(tmp_path: Path) -> DeltaReceiver:
    return DeltaReceiver(tmp_path / "weights", tmp_path / "cache")


def test_missed_versions_come_as_a_chain(
    publisher: DeltaPublisher, receiver: DeltaReceiver
) -> None:
    for version in range(4):
        publisher.publish(version, policy(version))
        if version == 0:
            arrived(receiver, 0)
    assert identical(arrived(receiver, 3), policy(3))
    assert (receiver.traffic.wholes, receiver.traffic.deltas) == (1, 1)
    assert deltas(publisher.root) == {1: [0], 2: [1], 3: [2]}


def test_a_chain_with_a_hole_is_the_whole(
    publisher: DeltaPublisher, receiver: DeltaReceiver
) -> None:
    publisher.publish(0, policy(0))
    arrived(receiver, 0)
    for version in (1, 2):
        publisher.publish(version, policy(version))
    delete_version(publisher.root, 1)
    assert deltas(publisher.root) == {2: [1]}
    assert identical(arrived(receiver, 2), policy(2))
    assert (receiver.traffic.wholes, receiver.traffic.deltas) == (2, 0)


def test_a_base_that_is_not_what_it_should_be_is_not_built_upon(
    publisher: DeltaPublisher,
    receiver: DeltaReceiver,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    publisher.publish(0, policy(0))
    arrived(receiver, 0)
    (copy,) = (tmp_path / "cache").rglob("model.safetensors")
    data = copy.read_bytes()
    replace(copy, data[:-1] + bytes([data[-1] ^ 1]))
    publisher.publish(1, policy(1))
    assert identical(arrived(receiver, 1), policy(1))
    assert (receiver.traffic.wholes, receiver.traffic.deltas) == (2, 0)
    assert "version 1 is received whole: tensor" in caplog.text


def test_a_copy_that_was_damaged_is_received_again(
    publisher: DeltaPublisher, receiver: DeltaReceiver
) -> None:
    publisher.publish(0, policy(0))
    copy = receiver.receive(0) / "model.safetensors"
    replace(copy, copy.read_bytes()[:-1])
    assert identical(arrived(receiver, 0), policy(0))
    assert receiver.traffic.wholes == 2


def test_a_delta_of_other_weights_is_not_applied(
    publisher: DeltaPublisher, receiver: DeltaReceiver, caplog: pytest.LogCaptureFixture
) -> None:
    """The run went back, and took the step again with another result."""
    publisher.publish(0, policy(0))
    publisher.publish(1, policy(1))
    arrived(receiver, 1)
    delete_version(publisher.root, 1)
    publisher.publish(1, policy(6))
    publisher.publish(2, policy(7))
    assert identical(arrived(receiver, 2), policy(7))
    assert "is a delta to the digest" in caplog.text


def test_there_is_none_where_all_has_changed(
    publisher: DeltaPublisher, receiver: DeltaReceiver
) -> None:
    for version in range(2):
        source = torch.Generator().manual_seed(version)
        publisher.publish(version, {"a": torch.randn(5000, generator=source)})
        arrived(receiver, version)
    assert deltas(publisher.root) == {}
    assert receiver.traffic.share == 1.0


def test_other_tensors_are_the_whole(publisher: DeltaPublisher, receiver: DeltaReceiver) -> None:
    publisher.publish(0, policy(0))
    arrived(receiver, 0)
    other = {**policy(0), "more": torch.ones(3)}
    publisher.publish(1, other)
    assert identical(arrived(receiver, 1), other)


def test_they_go_with_their_version_and_orphans_with_the_next_publication(
    publisher: DeltaPublisher,
) -> None:
    for version in range(3):
        publisher.publish(version, policy(version))
    delete_version(publisher.root, 2)
    assert deltas(publisher.root) == {1: [0]}
    (publisher.root / "delta-5-6").write_bytes(b"its deleter died")
    publisher.publish(2, policy(2))
    assert deltas(publisher.root) == {1: [0], 2: [1]}
    assert not [path for path in publisher.root.iterdir() if path.name.startswith(".pub")]


def test_a_delta_that_cannot_be_written_costs_no_publication(
    publisher: DeltaPublisher,
    receiver: DeltaReceiver,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    publisher.publish(0, policy(0))
    arrived(receiver, 0)
    real = disk.rename

    def full(source: Path, target: Path) -> None:
        if target.name.startswith("delta"):
            raise WeightsError(f"cannot rename to `{target}`: No space left on device.")
        real(source, target)

    monkeypatch.setattr(disk, "rename", full)
    publisher.publish(1, policy(1))
    assert "no delta to version 1: cannot rename" in caplog.text
    assert identical(arrived(receiver, 1), policy(1))


def test_the_same_version_again_changes_nothing(publisher: DeltaPublisher) -> None:
    for version in (0, 1, 1, 0):
        publisher.publish(version, policy(version))
    assert deltas(publisher.root) == {1: [0]}


def test_adapters_come_with_their_configuration(
    publisher: DeltaPublisher, receiver: DeltaReceiver
) -> None:
    adapter = Adapter("a" * 64, 2, 4.0, ("q_proj",))
    down, up = tensor_names("model.layers.0.self_attn.q_proj")
    tensors = {down: torch.randn(2, 800).bfloat16(), up: torch.zeros(800, 2).bfloat16()}
    for version in range(2):
        tensors[up][version] = 1.0
        publisher.publish(version, tensors, adapter=adapter)
        path = receiver.receive(version)
        assert open_version(path).manifest.adapter == adapter
        assert (path / "adapter_config.json").read_bytes() == adapter.config()
        assert identical(open_version(path).tensors, tensors)
    assert (receiver.traffic.wholes, receiver.traffic.deltas) == (1, 1)


def test_a_successor_deletes_what_a_dead_receiver_left(
    publisher: DeltaPublisher, receiver: DeltaReceiver, tmp_path: Path
) -> None:
    publisher.publish(0, policy(0))
    receiver.receive(0)
    successor = DeltaReceiver(tmp_path / "weights", tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("version-*"))
    assert identical(arrived(successor, 0), policy(0))
    publisher.publish(1, policy(1))
    with pytest.raises(WeightsError, match="cannot make the directory"):
        receiver.receive(1)
