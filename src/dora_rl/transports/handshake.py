"""How two processes prove to each other that they belong together: an address and a token.

    one end      `Listener(address, token)` -> `accept()` a connection of each process that joins
    the other    `connect(address, token)` -> the same connection from the other end

Each end proves that it knows the token, which itself never travels:

    leader -> follower    a nonce
    follower -> leader    a nonce, HMAC(token, "follower" + both nonces)
    leader -> follower    HMAC(token, "leader" + both nonces)

A connection with another token is refused, and waiting continues. Free of torch.
"""

import hmac
import ipaddress
import secrets
import socket
import time
from contextlib import suppress
from typing import NamedTuple

_NONCE_BYTES = 32
_PROOF_BYTES = 32  # of SHA-256
_HANDSHAKE_S = 10.0  # all of it: then the next one may try
_RETRY_S = 0.5  # between two attempts to connect
_LEADER, _FOLLOWER = b"leader", b"follower"
# A machine that is gone without a word is noticed after a minute and a half.
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPALIVE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}


class Address(NamedTuple):
    """`HOST:PORT`; port 0 stands for one that is free."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Raises `ValueError` if it is none."""
        host, colon, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not (colon and host and port.isascii() and port.isdigit() and int(port) < 1 << 16):
            raise ValueError(f"`{text}` is not HOST:PORT")
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach it."""
        if self.host == "localhost":
            return True
        try:
            address = ipaddress.ip_address(self.host)
        except ValueError:
            return False  # a name, whatever it begins with
        return bool((getattr(address, "ipv4_mapped", None) or address).is_loopback)


LOOPBACK = Address("127.0.0.1", 0)


def listen(address: Address) -> socket.socket:
    """A socket that listens there, and nowhere else."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    return socket.create_server(address, family=family)


class Listener:
    """The leader's end. Close it when all have come."""

    def __init__(self, address: Address, token: str) -> None:
        """An `OSError` if nothing can listen there."""
        self._token = token
        self._socket = listen(address)
        self.address = Address(address.host, self._socket.getsockname()[1])

    def accept(self, timeout_s: float) -> socket.socket | None:
        """The next connection that knows the token; None if there is none in time."""
        self._socket.settimeout(timeout_s)
        try:
            connection, _ = self._socket.accept()
        except TimeoutError:
            return None
        if self._proven(connection):
            return connection
        connection.close()
        return None

    def _proven(self, connection: socket.socket) -> bool:
        deadline = time.monotonic() + _HANDSHAKE_S
        nonce = secrets.token_bytes(_NONCE_BYTES)
        try:
            connection.settimeout(_HANDSHAKE_S)
            connection.sendall(nonce)
            nonces = nonce + _read(connection, _NONCE_BYTES, deadline)
            proof = _read(connection, _PROOF_BYTES, deadline)
            if not hmac.compare_digest(proof, _proof(self._token, _FOLLOWER, nonces)):
                return False
            connection.sendall(_proof(self._token, _LEADER, nonces))
            _settle(connection)
        except OSError:
            return False
        return True

    def close(self) -> None:
        self._socket.close()


def connect(address: Address, token: str, timeout_s: float, *, wait: bool = True) -> socket.socket:
    """A follower's end: connected, and each end proven to the other, or an `OSError`.

    With `wait`, a leader that does not listen yet is waited for. `timeout_s` is for all of it.
    """
    deadline = time.monotonic() + timeout_s
    connection = _reach(address, deadline, wait)
    try:
        theirs, ours = _read(connection, _NONCE_BYTES, deadline), secrets.token_bytes(_NONCE_BYTES)
        nonces = theirs + ours
        connection.sendall(ours + _proof(token, _FOLLOWER, nonces))
        proof = _read(connection, _PROOF_BYTES, deadline)
        if not hmac.compare_digest(proof, _proof(token, _LEADER, nonces)):
            raise ConnectionError("the process that listens there does not know the token")
        _settle(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _reach(address: Address, deadline: float, wait: bool) -> socket.socket:
    while True:
        try:
            return socket.create_connection(address, max(_RETRY_S, deadline - time.monotonic()))
        except OSError:
            if not wait or time.monotonic() + _RETRY_S >= deadline:
                raise
            time.sleep(_RETRY_S)


def gone(connection: socket.socket) -> bool:
    """Whether the other end has closed it, or died."""
    with suppress(BlockingIOError):
        try:
            return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            raise
        except OSError:
            return True
    return False


def _settle(connection: socket.socket) -> None:
    """Commands come hours apart, and each is waited for."""
    connection.settimeout(None)
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for name, value in _KEEPALIVE.items():  # Linux has no TCP_KEEPALIVE, macOS no TCP_KEEPIDLE
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _proof(token: str, role: bytes, nonces: bytes) -> bytes:
    """The role keeps an end from sending the other's proof back to it."""
    return hmac.digest(token.encode(), role + nonces, "sha256")


def _read(connection: socket.socket, length: int, deadline: float) -> bytes:
    """Exactly this many bytes; the deadline is that of all of them, however slowly they come."""
    data = b""
    while len(data) < length:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the other end did not prove itself in time")
        connection.settimeout(left)
        more = connection.recv(length - len(data))
        if not more:
            raise ConnectionError("the other end closed the connection")
        data += more
    return data
