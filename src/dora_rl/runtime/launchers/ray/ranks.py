"""The ranks of a trainer over several nodes: rank 0 is the worker, the others have actors, too.

    driver    a placement group with a bundle for each rank; rank 0 is started as any worker is
    rank 0    its actor takes a free port of its node, and answers with the address
    others    start with that address, and prove to rank 0 that they know the token of the group

Once they have met, all that they say to each other goes through `trainer.parallel` and the
process group, as on one machine. Rank 0 ends with any of them, and the supervisor starts all anew.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError

from dora_rl.runtime.launchers.local.processes import Exit, last_words, worker_environment
from dora_rl.transports.handshake import Address, listen

FOLLOWER = "dora_rl.trainer.follower"
TOKEN = "DORA_RL_TRAINER_TOKEN"
# One that breaks often does so since rank 0 has: whose own words come first then.
_LEADER_FIRST_S = 5.0


class FollowOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What the actor of a rank is to start."""

    address: str
    rank: int
    token: str
    threads: int
    log: str
    variables: dict[str, str]


def free_address() -> Address:
    """A port of this node that nobody listens at, at its address in the cluster."""
    host = ray.util.get_node_ip_address()
    with listen(Address(host, 0)) as found:
        return Address(host, found.getsockname()[1])


class RankActor:
    """Hosts one rank, from `start` until it ends; the rank ends with it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._log = Path()
        self._log_start = 0

    @ray.method(concurrency_group="control")
    def start(self, encoded: bytes) -> str:
        """Start the process of a `FollowOrder`; the answer is its node."""
        order = msgspec.msgpack.decode(encoded, type=FollowOrder)
        os.environ.update(order.variables)
        options = ["--rank", order.rank, "--token-stdin", "--parent", os.getpid()]
        self._log = Path(order.log)
        with open(self._log, "ab") as output:
            self._log_start = output.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-m", FOLLOWER, order.address, *map(str, options)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=worker_environment(order.threads, None),
                start_new_session=True,
            )
        assert self._process.stdin is not None
        with suppress(OSError), self._process.stdin as pipe:  # one that is gone is noticed below
            pipe.write(f"{order.token}\n".encode())
        return str(ray.get_runtime_context().get_node_id())

    @ray.method(concurrency_group="outbox")
    def ended(self) -> tuple[int, str]:
        """Waits for the end of the process: its exit code, and its last words."""
        assert self._process is not None
        code = self._process.wait()
        if code:
            time.sleep(_LEADER_FIRST_S)
        return code, last_words(self._log, self._log_start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """What the ranks of one trainer share."""

    size: int
    token: str
    threads: int
    log: str  # of rank 0; the others' are beside it
    variables: Mapping[str, str]


class Followers:
    """The driver's side of all ranks but the first, for one incarnation of the trainer."""

    def __init__(
        self,
        group: Group,
        make_actor: Callable[[type, int], Any],
        ask: Callable[[Any, Callable[[Any], None]], None],
        lost: Callable[[str], None],
    ) -> None:
        """`make_actor` makes one of a bundle, `ask` waits for a call, `lost` hears of an end."""
        self.nodes: set[str] = set()
        self._group = group
        self._make_actor = make_actor
        self._ask = ask
        self._lost = lost
        self._actors: list[Any] = []

    def start(self, address: str) -> None:
        """Rank 0 listens there, or will."""
        group = self._group
        log = Path(group.log)
        for rank in range(1, group.size):
            order = FollowOrder(
                address=address,
                rank=rank,
                token=group.token,
                threads=group.threads,
                log=str(log.with_name(f"{log.stem}-rank-{rank}.log")),
                variables=dict(group.variables),
            )
            actor = self._make_actor(RankActor, rank)
            self._actors.append(actor)
            started = partial(self._started, rank, actor)
            self._ask(actor.start.remote(msgspec.msgpack.encode(order)), started)

    def _started(self, rank: int, actor: Any, node: str) -> None:
        self.nodes.add(node)
        self._ask(actor.ended.remote(), partial(self._ended, rank))

    def _ended(self, rank: int, how: tuple[int, str]) -> None:
        code, words = how
        if code:  # else rank 0 has told it to
            name = f"rank {rank} of the trainer"
            self._lost(Exit(code, False, words).described(name))

    def close(self) -> None:
        for actor in self._actors:
            with suppress(RayError, ValueError, RuntimeError):
                ray.kill(actor)
        self._actors.clear()
