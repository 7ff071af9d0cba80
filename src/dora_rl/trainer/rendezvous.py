"""Where the processes that train together meet: the address and the token that the user names.

What they say to each other there is in `transports.handshake`. Free of torch.
"""

import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from dora_rl.trainer.errors import TrainerError
from dora_rl.transports import handshake
from dora_rl.transports.handshake import LOOPBACK, Address, connect, gone

__all__ = ["LOOPBACK", "TOKEN", "Address", "Listener", "address_of", "connect", "gone", "listen"]
__all__ += ["token_for"]

TOKEN = "DORA_RL_TRAINER_TOKEN"
_MIN_TOKEN = 16  # characters


def address_of(setting: str | None) -> Address:
    """The address that `train.rendezvous` names, or a free port of this machine's loopback."""
    return LOOPBACK if setting is None else Address.parse(setting)


def token_for(address: Address) -> str:
    """The token of a group that meets here: a new one on loopback, else the user's."""
    if address.loopback:
        return secrets.token_hex(32)
    token = os.environ.get(TOKEN, "")
    if len(token) < _MIN_TOKEN:
        raise TrainerError(
            f"train.rendezvous is open to other machines: `{address}`. Set {TOKEN} to a secret of "
            f"at least {_MIN_TOKEN} characters for every process, or use 127.0.0.1."
        )
    return token


def listen(address: Address) -> socket.socket:
    """A socket that listens there, and nowhere else."""
    with _naming(address):
        return handshake.listen(address)


class Listener(handshake.Listener):
    """The leader's end. Close it when all have come."""

    def __init__(self, address: Address, token: str) -> None:
        with _naming(address):
            super().__init__(address, token)


@contextmanager
def _naming(address: Address) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TrainerError(
            f"cannot listen for training processes: `{address}` ({error.strerror or error}). "
            "Set train.rendezvous to an address of this machine and a free port."
        ) from error
