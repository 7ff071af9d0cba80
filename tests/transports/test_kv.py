"""KV on its way: there once, whole or not at all, by each transport."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from dora_rl.transports.kv import KvControl, KvTransport
from dora_rl.transports.kv.object_store import KvObjects, key_of
from dora_rl.transports.kv.shared_directory import KvDirectory
from dora_rl.transports.objects.gateway import Gateway
from dora_rl.transports.objects.host import LocalPeer, ObjectHost
from dora_rl.transports.objects.link import ObjectLink
from dora_rl.transports.objects.store import MemoryStore


class Ends(NamedTuple):
    """Two instances and the driver; migrations 3 and 4 are from the one to the other."""

    source: KvTransport
    target: KvTransport
    driver: KvControl
    root: Path
    store: MemoryStore | None = None


class DriversEnd:
    """Reaches the source's host, as a launcher does."""

    def __init__(self, host: ObjectHost) -> None:
        self._host = host

    def discard(self, migration: int) -> None:
        self._host.discard(key_of(migration))


@pytest.fixture(params=["directory", "object store"])
def ends(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ends]:
    if request.param == "directory":
        directory = KvDirectory(tmp_path)
        yield Ends(directory, KvDirectory(tmp_path), directory, tmp_path)
        return
    store = MemoryStore()
    hosts, kvs, links = [], [], []
    for _ in range(2):
        ours, theirs = socket.socketpair()
        hosts.append(ObjectHost(store, tmp_path))
        gateway = Gateway(ours, hosts[-1])
        gateway.introduce({key_of(m): LocalPeer(hosts[0], store) for m in (3, 4)})
        links.append(ObjectLink(theirs))
        kvs.append(KvObjects(links[-1], tmp_path, timeout_s=10.0))
    yield Ends(kvs[0], kvs[1], DriversEnd(hosts[0]), tmp_path, store)
    for link in links:
        link.close()


def test_what_is_put_is_taken_once(ends: Ends) -> None:
    ends.source.put(3, b"kv")
    ends.source.put(4, b"other")
    assert ends.target.take(3) == b"kv"
    with pytest.raises(OSError):
        ends.target.take(3)
    ends.driver.discard(4)
    ends.driver.discard(4)
    with pytest.raises(OSError):
        ends.target.take(4)
    ends.source.put(4, b"")
    ends.target.discard(4)  # it has heard that the migration is over
    assert not list(ends.root.iterdir())
    assert ends.store is None or ends.store.used == 0


def test_what_was_never_put_is_not_there(ends: Ends) -> None:
    with pytest.raises(OSError):
        ends.target.take(9)
    ends.target.discard(9)


def test_what_cannot_be_put_whole_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(os, "replace", fail)
    kv = KvDirectory(tmp_path)
    with pytest.raises(OSError, match="no space"):
        kv.put(3, b"kv")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("ends", ["object store"], indirect=True)
def test_an_object_store_that_is_full_takes_nothing(ends: Ends) -> None:
    assert ends.store is not None
    ends.store.capacity = 1
    with pytest.raises(OSError, match="the object store is full"):
        ends.source.put(3, b"kv")
    assert not list(ends.root.iterdir())
    ends.store.capacity = None
    ends.source.put(3, b"kv")
    assert ends.target.take(3) == b"kv"
