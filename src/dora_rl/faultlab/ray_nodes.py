"""A Ray cluster of several nodes on this machine, whose nodes die and are added again.

Each node is `ray start --block`, with all that it starts; it listens at loopback, with a token. A
node of its own has the head, which has no CPUs, and to which drivers connect. Ray itself is not
imported here.

    with RayNodes(directory, count=3) as nodes:
        os.environ | nodes.environment      # of whoever connects to nodes.address
        nodes.kill_node(rng)                # all of its processes; or kill_raylet(rng)
        nodes.tend()                        # adds a node again, some time later
        nodes.orphans()                     # processes that have outlived their node

A process belongs to the cluster if it descends from a node, or its output is in `directory`.
"""

import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Self

from dora_rl.faultlab.processes import command_line, descendants, lives, signal_to
from dora_rl.runtime.errors import RunFailed
from dora_rl.runtime.launchers.ray.installation import ADDRESS

CPUS = 2  # of each node but the head's: numbers alone
_LOOPBACK = (
    "127.0.0.2"  # all nodes are at it: Ray would take 127.0.0.1 for the machine's own address
)
_START_S = 120.0  # for a node, on a machine that is busy
_GONE_S = 30.0  # for what a node has started to end by itself
_AWAY_S = 6.0  # mean time until a node is added again
_STORE_BYTES = 80 << 20  # of each node's object store: messages alone go through it
_STARTED = "Ray runtime started."


class _Node:
    """One `ray start --block`, with its log."""

    def __init__(self, name: str, arguments: Iterable[str], log: Path, env: dict[str, str]) -> None:
        self.name = name
        self.log = log
        with open(log, "wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=env,
                start_new_session=True,
            )

    @property
    def up(self) -> bool:
        return _STARTED in self.log.read_text(encoding="utf-8", errors="replace")

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def await_start(self) -> None:
        deadline = time.monotonic() + _START_S
        while not self.up:
            if self.ended or time.monotonic() > deadline:
                raise RunFailed(f"a node of the Ray cluster did not start: see {self.log}")
            time.sleep(0.05)

    def processes(self) -> set[int]:
        return {self.process.pid, *descendants(self.process.pid)}

    def kill(self) -> set[int]:
        """All of its processes at once, as if the machine had lost its power."""
        killed: set[int] = set()
        while new := {pid for pid in self.processes() if lives(pid)} - killed:
            for pid in new:  # a process that starts meanwhile is found by the next look
                signal_to(pid, signal.SIGKILL)
            killed |= new
        self.process.wait()
        return killed


class RayNodes:
    """The head and so many nodes. A context manager: they run inside."""

    def __init__(self, directory: Path, count: int = 3) -> None:
        """Logs of the nodes go to `directory`."""
        self._directory = directory
        self._count = count
        # Sockets are in it, whose paths must be short.
        self._temporary = Path(mkdtemp(prefix="dora-ray-"))
        self._port = _free_port()
        self._started = 0
        self._head: _Node | None = None
        self._nodes: list[_Node] = []
        self._gone: list[tuple[str, float, set[int]]] = []  # until all their processes have ended
        self._returns: list[float] = []  # when nodes are added again
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self.environment = {
            **{ADDRESS: self.address, "RAY_USAGE_STATS_ENABLED": "0"},
            **token,
        }
        """What a driver needs to connect."""

    @property
    def address(self) -> str:
        return f"{_LOOPBACK}:{self._port}"

    def __enter__(self) -> Self:
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            head = ["--head", f"--port={self._port}", "--num-cpus=0", "--include-dashboard=false"]
            self._head = self._start("head", [*head, f"--temp-dir={self._temporary}"])
            self._head.await_start()
            for _ in range(self._count):  # Ray gives a raylet 30 s: not all at once
                self._add().await_start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        for node in [*self._nodes, *([] if self._head is None else [self._head])]:
            node.kill()
        for pid in self._left():
            signal_to(pid, signal.SIGKILL)
        _remove(self._temporary)

    def _start(self, name: str, arguments: list[str]) -> _Node:
        shared = [
            f"--node-ip-address={_LOOPBACK}",
            f"--object-store-memory={_STORE_BYTES}",
            "--disable-usage-stats",
        ]
        env = {key: value for key, value in os.environ.items() if key != ADDRESS}
        mine = {key: value for key, value in self.environment.items() if key != ADDRESS}
        log = self._directory / f"ray-{name}.log"
        return _Node(name, [*arguments, *shared], log, {**env, **mine})

    def _add(self) -> _Node:
        self._started += 1
        arguments = [f"--address={self.address}", f"--num-cpus={CPUS}"]
        node = self._start(f"node-{self._started}", arguments)
        self._nodes.append(node)
        return node

    # Faults

    def kill_node(self, rng: random.Random) -> str | None:
        """A node loses its power; one of several that are up."""
        node = self._one(rng)
        if node is None:
            return None
        self._leave(node, node.kill(), rng)
        return f"{node.name} killed, with all of its processes"

    def kill_raylet(self, rng: random.Random) -> str | None:
        """The raylet of a node dies; what it has started has to end by itself."""
        node = self._one(rng)
        raylet = None if node is None else _raylet(node)
        if node is None or raylet is None:
            return None
        processes = node.processes()
        signal_to(raylet, signal.SIGKILL)
        self._leave(node, processes, rng)
        return f"raylet of {node.name} killed"

    def _one(self, rng: random.Random) -> _Node | None:
        """At least one is left, so that there is room for the trainer."""
        self._drop_ended(rng)
        up = [node for node in self._nodes if node.up]
        return rng.choice(up) if len(up) > 1 else None

    def _leave(self, node: _Node, processes: set[int], rng: random.Random) -> None:
        self._nodes.remove(node)
        self._gone.append((node.name, time.monotonic(), processes))
        self._returns.append(time.monotonic() + rng.expovariate(1 / _AWAY_S))

    def _drop_ended(self, rng: random.Random) -> None:
        """Nodes that have ended, though nobody killed them."""
        for node in [node for node in self._nodes if node.ended]:
            self._leave(node, node.processes(), rng)

    def tend(self) -> str | None:
        """Add a node that is due to return; what was done."""
        if self._head is not None and self._head.ended:
            raise RunFailed(f"the head of the Ray cluster has ended: see {self._head.log}")
        due = [moment for moment in self._returns if moment <= time.monotonic()]
        if not due:
            return None
        self._returns.remove(due[0])
        return f"{self._add().name} added"

    # What is left behind

    def orphans(self) -> list[str]:
        """Processes that have not ended half a minute after their node did, in words."""
        now = time.monotonic()
        found = []
        for name, died_at, processes in list(self._gone):
            processes &= {pid for pid in processes if lives(pid)}
            if not processes:
                self._gone.remove((name, died_at, processes))
            elif now > died_at + _GONE_S:
                found += [f"{name}: process {pid}, {_shown(pid)}" for pid in sorted(processes)]
        return found

    def await_gone(self) -> list[str]:
        """Wait for the processes of nodes that are gone; those that do not end, in words."""
        while self._gone and not (found := self.orphans()):
            time.sleep(0.1)
        return found if self._gone else []

    def _left(self) -> list[int]:
        """Processes whose output is in the cluster's directory."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                output = (process / "fd" / "1").readlink()
                if output.is_relative_to(self._temporary):
                    found.append(int(process.name))
        return found


def _raylet(node: _Node) -> int | None:
    for pid in node.processes():
        called = command_line(pid)
        if called and Path(called[0]).name == "raylet":
            return pid
    return None


def _shown(pid: int) -> str:
    return " ".join(command_line(pid))[:100].strip() or "which has ended"


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind((_LOOPBACK, 0))
        return int(taken.getsockname()[1])


def _remove(directory: Path) -> None:
    import shutil

    shutil.rmtree(directory, ignore_errors=True)
