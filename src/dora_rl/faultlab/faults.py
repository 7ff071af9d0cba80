"""The faults that a running run is given, each by its name.

A fault gets the run as it is and returns a few words on what it did, or None if there was nothing
to do it to. If the driver ends, the storm resumes the run.
"""

import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from dora_rl.faultlab.damage import DamagedFiles
from dora_rl.faultlab.driver_process import DriverProcess
from dora_rl.faultlab.processes import (
    actors_of_run,
    sandbox_processes,
    signal_to,
    workers_of_run,
)
from dora_rl.faultlab.ray_nodes import RayNodes
from dora_rl.sandbox.linux import call_watch


class Target(NamedTuple):
    """A run, its driver now, its damaged files and, on Ray, its cluster."""

    run: Path
    driver: DriverProcess
    damaged: DamagedFiles
    random: random.Random
    nodes: RayNodes | None = None


Fault = Callable[[Target], str | None]


def _kill_role(kind: str) -> Fault:
    def strike(target: Target) -> str | None:
        return _signal(target, _of(target, kind), signal.SIGKILL, "killed")

    return strike


def _stop_role(kind: str) -> Fault:
    """SIGSTOP for longer or shorter than its timeout, then SIGCONT if it is still there."""

    def strike(target: Target) -> str | None:
        return _pause(target, _of(target, kind))

    return strike


def _kill_driver(target: Target) -> str | None:
    return _signal(target, {"driver": target.driver.pid}, signal.SIGKILL, "killed")


def _stop_driver(target: Target) -> str | None:
    return _pause(target, {"driver": target.driver.pid})


def _end_driver(target: Target) -> str | None:
    return _signal(target, {"driver": target.driver.pid}, signal.SIGTERM, "asked to end")


def _kill_sandbox_process(target: Target) -> str | None:
    found = {f"worker {pid}": pid for pid in sandbox_processes(target.driver.pid)}
    return _signal(target, found, signal.SIGKILL, "killed")


def _repeat_messages(target: Target) -> str | None:
    seconds = _seconds(target)
    if not target.driver.repeat_messages(seconds):
        return None
    return f"every message to the driver is delivered twice for {seconds} s"


def _slow_disk(target: Target) -> str | None:
    if not target.driver.disk.watching:
        return None
    seconds, delay = _seconds(target), round(target.random.uniform(0.01, 0.1), 2)
    target.driver.disk.be_slow(delay, seconds)
    return f"each sync and write takes {delay} s longer for {seconds} s"


def _full_disk(target: Target) -> str | None:
    if not target.driver.disk.watching:
        return None
    seconds = round(target.random.uniform(0.5, 4.0), 1)
    target.driver.disk.be_full(seconds)
    return f"the disk is full for {seconds} s"


def _damage_file(target: Target) -> str | None:
    """The driver is killed first: a running one has its files open, and would write them again."""
    if target.driver.ended or not target.damaged.possible:
        return None
    target.driver.kill(target.run)
    done = target.damaged.damage_one(target.random)
    return f"driver killed, and {done}" if done else None


def _kill_actor(target: Target) -> str | None:
    found = {f"actor of {name}": pid for name, pid in actors_of_run(target.run).items()}
    return _signal(target, found, signal.SIGKILL, "killed")


def _kill_node(target: Target) -> str | None:
    assert target.nodes is not None
    return target.nodes.kill_node(target.random)


def _kill_raylet(target: Target) -> str | None:
    assert target.nodes is not None
    return target.nodes.kill_raylet(target.random)


FAULTS: dict[str, tuple[Fault, str]] = {
    "kill-rollout": (_kill_role("rollout"), "SIGKILL of a rollout process"),
    "stop-rollout": (_stop_role("rollout"), "SIGSTOP of a rollout process; SIGCONT later"),
    "kill-trainer": (_kill_role("trainer"), "SIGKILL of the trainer"),
    "stop-trainer": (_stop_role("trainer"), "SIGSTOP of the trainer; SIGCONT later"),
    "kill-worker": (_kill_sandbox_process, "SIGKILL of a reward worker or of its zygote"),
    "kill-driver": (_kill_driver, "SIGKILL of the driver; the run is resumed"),
    "stop-driver": (_stop_driver, "SIGSTOP of the driver; SIGCONT later"),
    "end-driver": (_end_driver, "SIGTERM of the driver; the run is resumed"),
    "repeat-messages": (_repeat_messages, "messages to the driver are duplicated for a while"),
    "slow-disk": (_slow_disk, "each sync and write of the run takes longer for a while"),
    "full-disk": (_full_disk, "syncs and writes of the run fail with ENOSPC for a while"),
    "damage-file": (_damage_file, "the run is killed, and one of its files truncated or altered"),
    "kill-actor": (_kill_actor, "on Ray: SIGKILL of a worker's actor"),
    "kill-node": (_kill_node, "on Ray: SIGKILL of all processes of a node; one is added later"),
    "kill-raylet": (_kill_raylet, "on Ray: SIGKILL of a node's raylet; a node is added later"),
}
_OF_THE_DISK = ("slow-disk", "full-disk")
# The process that answers for the disk, or repeats messages, is the parent of local workers.
_LOCAL = ("repeat-messages", *_OF_THE_DISK)
_ON_RAY = ("kill-actor", "kill-node", "kill-raylet")


def of_runtime(runtime: str) -> list[str]:
    """The faults that runs of this `runtime.kind` can have."""
    return [name for name in FAULTS if name not in (_LOCAL if runtime == "ray" else _ON_RAY)]


def available(runtime: str = "local") -> list[str]:
    """Of these, those that this machine supports."""
    disk = call_watch().in_force
    return [name for name in of_runtime(runtime) if disk or name not in _OF_THE_DISK]


def _of(target: Target, kind: str) -> dict[str, int]:
    return {name: pid for name, pid in workers_of_run(target.run).items() if name.startswith(kind)}


def _signal(target: Target, found: dict[str, int], number: int, done: str) -> str | None:
    if not found:
        return None
    name = target.random.choice(sorted(found))
    return f"{name} {done}" if signal_to(found[name], number) else None


def _pause(target: Target, found: dict[str, int]) -> str | None:
    if not found:
        return None
    name = target.random.choice(sorted(found))
    seconds = _seconds(target)
    if not signal_to(found[name], signal.SIGSTOP):
        return None
    waker = threading.Timer(seconds, signal_to, (found[name], signal.SIGCONT))
    waker.daemon = True
    waker.start()
    return f"{name} stopped for {seconds} s"


def _seconds(target: Target) -> float:
    """Shorter or longer than the timeouts of a storm."""
    return round(target.random.expovariate(1 / 5.0), 1)
