"""A process of a data-parallel group: joins the leader, reads commands, until they end.

`python -m dora_rl.trainer.follower HOST:PORT`, with the leader's token in DORA_RL_TRAINER_TOKEN.
The leader starts those on loopback itself; on another machine somebody has to, once for each
process, with `--local-rank` and `--local-processes` where one machine has several. The model, the
weight store and the checkpoints must be there under the leader's paths.

A thread reads the commands, so that a leader that is gone is noticed in the middle of one, too:
NCCL would wait for it until its timeout.
"""

import argparse
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import IO

from dora_rl.core.protocol.errors import UserError
from dora_rl.machine.heap import heap_reuse
from dora_rl.machine.parent import die_with_parent
from dora_rl.models import cpu
from dora_rl.trainer import rendezvous
from dora_rl.trainer.devices import resolve
from dora_rl.trainer.errors import StepRejected, TrainerError
from dora_rl.trainer.parallel import (
    Command,
    Hello,
    Join,
    Publish,
    Ready,
    Restore,
    Save,
    Train,
    receive,
    send,
)
from dora_rl.trainer.rendezvous import Address
from dora_rl.trainer.replica import Replica
from dora_rl.trainer.world import connect_store, join, leave

_CONNECT_S = 240.0  # as long as the leader waits
_END_S = 10.0  # to end by itself when the leader is gone


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m dora_rl.trainer.follower")
    parser.add_argument("address", type=Address.parse, help="HOST:PORT of the leader")
    parser.add_argument("--rank", type=int, help="else the first that is free")
    parser.add_argument("--local-rank", type=int, default=0, help="among those of this machine")
    parser.add_argument("--local-processes", type=int, default=1, help="of this machine")
    parser.add_argument(
        "--parent", type=int, help="the process that has started it, if not the leader: its end"
    )
    parser.add_argument(
        "--token-stdin",
        action="store_true",
        help=f"read the token from a line of stdin; else it is in {rendezvous.TOKEN}",
    )
    return parser.parse_args()


def main() -> int:
    # Interrupting a run is the leader's business; it ends this process by closing the connection.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    options = _options()
    if options.parent is not None:
        die_with_parent(options.parent)
    cpu.guard()
    heap_reuse()
    token = os.environ.pop(rendezvous.TOKEN, "")
    if options.token_stdin:
        token = sys.stdin.readline().rstrip("\n")
    try:
        _serve(options, token)
    except UserError as error:
        sys.exit(f"error: {error}")
    return 0


def _serve(options: argparse.Namespace, token: str) -> None:
    """Join, then perform what the leader asks until it closes the connection."""
    address: Address = options.address
    try:
        # One that the leader has started finds it listening, or gone.
        wait = not options.token_stdin or options.parent is not None
        connection = rendezvous.connect(address, token, _CONNECT_S, wait=wait)
    except OSError as error:
        raise TrainerError(
            f"cannot join the leader at `{address}` ({error}). Check that it runs there, and that "
            f"{rendezvous.TOKEN} is the same."
        ) from error
    with connection, connection.makefile("wb") as out, _ended(connection):
        pipe = connection.makefile("rb")  # left to the thread, which may be reading it at the end
        send(out, Hello(options.rank))
        first = receive(pipe)
        if not isinstance(first, Join):
            raise TrainerError(
                f"the leader at `{address}` has no place for rank `{options.rank}`. Start as many "
                "followers as train.processes says, less one, each with a rank of its own or none."
            )
        commands: SimpleQueue[Command | None] = SimpleQueue()
        Thread(target=_read_commands, args=(pipe, commands), daemon=True).start()
        device = resolve(
            first.device, local_rank=options.local_rank, local_processes=options.local_processes
        )
        send(out, Ready())
        store = connect_store(Address(address.host, first.store_port), first.size)
        world = join(store, first.rank, first.size, device, loopback=address.loopback)
        replica = Replica(first.settings, world)
        while (command := commands.get()) is not None:
            perform(replica, command)
        leave(world)


@contextmanager
def _ended(connection: socket.socket) -> Iterator[None]:
    """Both ends see that it is over, the thread that reads here among them."""
    try:
        yield
    finally:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def _read_commands(pipe: IO[bytes], commands: "SimpleQueue[Command | None]") -> None:
    """Queue every command, and None at the end; then this process ends, by itself or not."""
    try:
        with suppress(OSError):
            while (command := receive(pipe)) is not None:
                commands.put(command)
    except ValueError as error:
        print(f"error: not a command of this version: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    commands.put(None)
    time.sleep(_END_S)
    os._exit(1)  # it still waits in a collective for processes that are gone


def perform(replica: Replica, command: Command) -> None:
    """One command. Whatever this process alone cannot do is raised, and ends it.

    What every process refuses alike changes none of them; the leader reports it.
    """
    match command:
        case Train(step, share):
            if step != replica.step:
                raise TrainerError(
                    f"the leader takes step `{step}`, and this process is at step {replica.step}. "
                    "Open the trainer anew and restore a checkpoint."
                )
            with suppress(StepRejected):
                replica.follow(share)
        case Publish():
            replica.fingerprint()
            replica.published()
        case Save():
            replica.snapshot()
        case Restore(directory):
            try:
                replica.restore(Path(directory))
            except UserError as error:
                print(f"error: {error}", file=sys.stderr, flush=True)
        case _:
            raise TypeError(f"not for a follower: {type(command).__name__}")


if __name__ == "__main__":
    sys.exit(main())
