"""Where training processes meet: addresses, and who is let in."""

import secrets
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from dora_rl.config import validate
from dora_rl.core.protocol.errors import UserError
from dora_rl.runtime.prepare.devices import check_device
from dora_rl.trainer.errors import TrainerError
from dora_rl.trainer.rendezvous import LOOPBACK, TOKEN, Address, Listener, connect, gone, token_for
from dora_rl.trainer.settings import TrainSettings
from dora_rl.transports import handshake


@pytest.mark.parametrize(
    ("text", "address", "loopback"),
    [
        ("127.0.0.1:0", ("127.0.0.1", 0), True),
        ("localhost:29500", ("localhost", 29500), True),
        ("[::1]:80", ("::1", 80), True),
        ("10.0.0.7:29500", ("10.0.0.7", 29500), False),
        ("0.0.0.0:1", ("0.0.0.0", 1), False),
        ("node-1.cluster:65535", ("node-1.cluster", 65535), False),
        ("127.example.org:80", ("127.example.org", 80), False),
        ("[::ffff:127.0.0.1]:80", ("::ffff:127.0.0.1", 80), True),
    ],
)
def test_addresses(text: str, address: tuple[str, int], loopback: bool) -> None:
    found = Address.parse(text)
    assert found == address
    assert str(found) == text
    assert found.loopback == loopback


@pytest.mark.parametrize("text", ["", "host", ":80", "host:", "host:65536", "host:-1", "host:8a"])
def test_what_is_no_address_is_refused_by_name(text: str) -> None:
    with pytest.raises(UserError, match=r"rendezvous must be HOST:PORT: `.*`. Use 127.0.0.1:0"):
        validate(TrainSettings, {"rendezvous": text}, "x.toml")


def test_other_machines_need_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN, raising=False)
    open_to_all = TrainSettings(device="cpu", processes=2, rendezvous="10.0.0.7:29500")
    with pytest.raises(TrainerError, match=r"other machines: `10.0.0.7:29500`. Set DORA_RL_TRAI"):
        check_device(open_to_all)
    monkeypatch.setenv(TOKEN, "short")
    with pytest.raises(TrainerError, match="at least 16 characters"):
        token_for(Address("10.0.0.7", 29500))
    monkeypatch.setenv(TOKEN, "long enough for everyone")
    check_device(open_to_all)
    assert token_for(Address("10.0.0.7", 29500)) == "long enough for everyone"
    # On loopback each group has its own, and nobody is asked.
    assert token_for(LOOPBACK) != token_for(LOOPBACK) != "long enough for everyone"


def test_only_who_knows_the_token_is_let_in() -> None:
    listener = Listener(LOOPBACK, "secret")
    assert listener.address.port != 0
    with ThreadPoolExecutor(1) as pool:
        for token in ("other", ""):
            came = pool.submit(listener.accept, 10.0)
            with pytest.raises(ConnectionError):
                connect(listener.address, token, 10.0)
            assert came.result() is None
        came = pool.submit(listener.accept, 10.0)
        ours = connect(listener.address, "secret", 10.0)
        found = came.result()
        assert found is not None
        found.sendall(b"hello")
        assert ours.recv(5) == b"hello"
        assert not gone(found)
        for end in (ours, found):
            assert end.gettimeout() is None
            assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) == 10
        ours.close()
        assert gone(found)
        found.close()
    assert listener.accept(0.01) is None
    listener.close()


@pytest.mark.parametrize("pause_s", [None, 0.05], ids=["silent", "dripping"])
def test_a_stranger_does_not_keep_the_others_out(
    pause_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it says nothing, or a byte now and then: the handshake has one deadline."""
    monkeypatch.setattr(handshake, "_HANDSHAKE_S", 0.3)
    listener = Listener(LOOPBACK, "secret")
    with ThreadPoolExecutor(1) as pool, socket.create_connection(listener.address) as stranger:
        begun = time.monotonic()
        came = pool.submit(listener.accept, 10.0)
        while pause_s is not None and not came.done() and time.monotonic() < begun + 3.0:
            time.sleep(pause_s)
            try:
                stranger.send(b"x")
            except OSError:
                break
        assert came.result() is None
        assert time.monotonic() < begun + 2.5  # 64 bytes at this pace take 3.2 s
    listener.close()


def test_a_leader_must_know_the_token_too() -> None:
    """Whoever took the leader's port learns nothing, and leads nobody."""
    with socket.create_server(LOOPBACK) as impostor, ThreadPoolExecutor(1) as pool:
        address = Address(*impostor.getsockname())
        came = pool.submit(connect, address, "secret", 10.0)
        follower, _ = impostor.accept()
        with follower:
            follower.sendall(secrets.token_bytes(32))
            said = b""
            while len(said) < 64:
                said += follower.recv(64)
            follower.sendall(said[32:])  # its own proof
            with pytest.raises(ConnectionError, match="does not know the token"):
                came.result()


def test_a_leader_that_comes_later_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "_RETRY_S", 0.05)
    with socket.create_server(LOOPBACK) as free:
        address = Address(*free.getsockname())
    with pytest.raises(ConnectionRefusedError):
        connect(address, "secret", 0.2)
    begun = time.monotonic()
    with pytest.raises(ConnectionRefusedError):
        connect(address, "secret", 60.0, wait=False)
    assert time.monotonic() < begun + 30.0
    with ThreadPoolExecutor(1) as pool:
        came = pool.submit(connect, address, "secret", 10.0)
        time.sleep(0.2)
        assert not came.done()
        listener = Listener(address, "secret")
        found = listener.accept(10.0)
        assert found is not None
        with found, came.result():
            listener.close()


def test_it_listens_at_its_address_alone() -> None:
    listener = Listener(LOOPBACK, "secret")
    assert listener._socket.getsockname()[0] == "127.0.0.1"
    with pytest.raises(TrainerError, match=r"cannot listen for training processes: `127.0.0.1:"):
        Listener(listener.address, "secret")
    listener.close()


def test_the_store_listens_at_its_address_alone() -> None:
    from dora_rl.trainer.world import connect_store, open_store

    store = open_store(LOOPBACK, 2)
    other = connect_store(Address("127.0.0.1", store.port), 2)
    other.set("word", "said")
    assert store.get("word") == b"said"
    if sys.platform != "linux":
        pytest.skip("127.0.0.2 is an address of this machine on Linux alone")
    with socket.socket() as elsewhere, pytest.raises(ConnectionRefusedError):
        elsewhere.connect(("127.0.0.2", store.port))
