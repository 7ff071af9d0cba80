"""What every transport of weights keeps, also when a part of it fails.

What arrives is what was published, to the bit; or nothing does, with a `WeightsError`, in bounded
time. After the fault it works again.
"""

import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from dora_rl.transports.weights.settings import WeightTransportSettings
from dora_rl.weights import disk
from dora_rl.weights.errors import WeightsError
from tests.patience import PATIENCE_S
from tests.transports.weights.harness import Harness, arrived
from tests.transports.weights.sender import policy
from tests.weights.samples import identical, replaced

TIMEOUT_S = 60.0  # of a receiver, where it is not what is tested
TRANSPORTS = {
    "directory": WeightTransportSettings(),
    "directory with deltas": WeightTransportSettings(delta=True),
    "process group": WeightTransportSettings(
        transport="process_group", delta=False, timeout_s=TIMEOUT_S
    ),
    "process group with deltas": WeightTransportSettings(
        transport="process_group", timeout_s=TIMEOUT_S
    ),
    "object store": WeightTransportSettings(transport="object_store"),
    "object store with deltas": WeightTransportSettings(transport="object_store", delta=True),
}


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Harness]:
    with Harness(tmp_path, TRANSPORTS[request.param]) as harness:
        yield harness


def test_every_version_arrives_to_the_bit(transport: Harness) -> None:
    receivers = [transport.receiver() for _ in range(2)]
    for version in range(4):
        transport.publish(version)
        for receiver in receivers:
            assert identical(arrived(receiver, version), policy(version))
            assert identical(arrived(receiver, version), policy(version))  # asked again
    for receiver in receivers:
        traffic = receiver.traffic
        assert traffic.wholes + traffic.deltas >= 4
        assert 0 < traffic.sent_bytes <= traffic.whole_bytes
        assert (traffic.share or 0) < 1 or not transport.settings.deltas


def test_a_receiver_that_joins_late_gets_the_last_and_what_follows(transport: Harness) -> None:
    for version in range(3):
        transport.publish(version)
    late = transport.receiver()
    assert identical(arrived(late, 2), policy(2))
    transport.publish(3)
    assert identical(arrived(late, 3), policy(3))


def test_a_receiver_may_miss_versions_and_go_back(transport: Harness) -> None:
    receiver = transport.receiver()
    for version in range(5):
        transport.publish(version)
    for version in (0, 3, 1, 4):
        assert identical(arrived(receiver, version), policy(version))
        receiver.release(version)


def test_it_is_the_weights_that_count_not_the_number(transport: Harness) -> None:
    """After a resume a version may be published anew, with other weights."""
    receiver = transport.receiver()
    for version in (0, 1):
        transport.publish(version)
        arrived(receiver, version)
    receiver.release(1)
    transport.delete(1)
    transport.publish(1, step=7)
    assert identical(arrived(receiver, 1), policy(7))
    transport.publish(2, step=8)
    assert identical(arrived(receiver, 2), policy(8))


def test_what_is_not_published_is_refused(transport: Harness) -> None:
    transport.publish(0)
    receiver = transport.receiver()
    with pytest.raises(WeightsError, match="version 9 is not in"):
        receiver.receive(9)
    assert identical(arrived(receiver, 0), policy(0))


@pytest.mark.parametrize("fault", ["flipped", "truncated", "extended"])
def test_damaged_bytes_never_arrive(transport: Harness, fault: str) -> None:
    transport.publish(0)
    transport.publish(1)
    for file in transport.travels(1):
        data = file.read_bytes()
        for at in (0, 20, len(data) // 2, len(data) - 1):
            flipped = bytes([*data[:at], data[at] ^ 16, *data[at + 1 :]])
            bad = {"flipped": flipped, "truncated": data[:at], "extended": data + data[at:]}[fault]
            receiver = transport.receiver()
            assert identical(arrived(receiver, 0), policy(0))
            with replaced(file, bad):
                try:
                    found = arrived(receiver, 1)
                except WeightsError:
                    assert "delta" not in file.name, "the whole was there"
                else:
                    assert identical(found, policy(1))
                    assert "delta" in file.name and receiver.traffic.deltas == 0
            assert identical(arrived(receiver, 1), policy(1))


def test_a_sender_that_dies_within_a_publication_leaves_the_last_version(
    transport: Harness,
) -> None:
    transport.publish(0)
    receiver = transport.receiver()
    transport.restart(kill="writing")
    transport.ask(1)
    transport.await_death()
    with pytest.raises(WeightsError):
        arrived(transport.receiver(timeout_s=1.0), 1)
    transport.restart()
    transport.publish(1)
    assert identical(arrived(receiver, 1), policy(1))


def test_a_version_that_is_deleted_while_it_is_received(
    transport: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once any part of it has been read: all of it arrives, or an error."""
    transport.publish(0)
    real = disk.read_small
    for version in (1, 2, 3, 4):
        receiver = transport.receiver()
        arrived(receiver, 0)
        transport.publish(version)
        after = iter(range(version))

        def read(*args: Any, version: int = version, after: Any = after, **options: Any) -> bytes:
            found = real(*args, **options)
            if next(after, None) == version - 1:
                transport.delete(version)
            return found

        monkeypatch.setattr(disk, "read_small", read)
        with suppress(WeightsError):
            assert identical(arrived(receiver, version), policy(version))
        monkeypatch.setattr(disk, "read_small", real)
        transport.publish(version)
        assert identical(arrived(receiver, version), policy(version))


def test_deletions_race_with_receivers(transport: Harness) -> None:
    transport.publish(0)
    receiver = transport.receiver()
    for version in range(1, 9):
        transport.publish(version)
        deletion = threading.Thread(target=transport.delete, args=(version,))
        deletion.start()
        try:
            assert identical(arrived(receiver, version), policy(version))
        except WeightsError as error:
            assert str(version) in str(error)
        deletion.join(PATIENCE_S)
    assert identical(arrived(receiver, 0), policy(0))


def test_copies_go_when_they_are_released_and_all_with_the_receiver(
    transport: Harness, tmp_path: Path
) -> None:
    receiver = transport.receiver()
    for version in range(4):
        transport.publish(version)
        arrived(receiver, version)
        if version:
            receiver.release(version - 1)
    copies = [path.name for path in (tmp_path / "caches").rglob("version-*")]
    assert copies in ([], ["version-00000003"])
    receiver.close()
    assert not list((tmp_path / "caches").rglob("version-*"))
    assert identical(arrived(transport.receiver(), 3), policy(3))
