"""What can be done to a run that goes on: each fault by its name, and what it does.

A fault gets the run as it is and says in a few words what it did, or None if there was nothing to
do it to. What ends the driver is resumed by the storm.
"""

import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from dora_rl.chaos.processes import parts, signal_to, workers


class Target(NamedTuple):
    """A run and its driver's process."""

    run: Path
    driver: int
    random: random.Random


Fault = Callable[[Target], str | None]


def _kill_part(kind: str) -> Fault:
    def strike(target: Target) -> str | None:
        return _signal(target, _of(target, kind), signal.SIGKILL, "killed")

    return strike


def _stop_part(kind: str) -> Fault:
    """For longer or shorter than its silence is borne, then it wakes, if it still lives."""

    def strike(target: Target) -> str | None:
        return _pause(target, _of(target, kind))

    return strike


def _kill_driver(target: Target) -> str | None:
    return _signal(target, {"driver": target.driver}, signal.SIGKILL, "killed")


def _stop_driver(target: Target) -> str | None:
    return _pause(target, {"driver": target.driver})


def _end_driver(target: Target) -> str | None:
    return _signal(target, {"driver": target.driver}, signal.SIGTERM, "asked to end")


def _kill_worker(target: Target) -> str | None:
    found = {f"worker {pid}": pid for pid in workers(target.driver, target.run)}
    return _signal(target, found, signal.SIGKILL, "killed")


FAULTS: dict[str, tuple[Fault, str]] = {
    "kill-rollout": (_kill_part("rollout"), "SIGKILL of a rollout process"),
    "stop-rollout": (_stop_part("rollout"), "SIGSTOP of a rollout process; SIGCONT later"),
    "kill-trainer": (_kill_part("trainer"), "SIGKILL of the trainer"),
    "stop-trainer": (_stop_part("trainer"), "SIGSTOP of the trainer; SIGCONT later"),
    "kill-worker": (_kill_worker, "SIGKILL of a reward's process, or of who starts them"),
    "kill-driver": (_kill_driver, "SIGKILL of the driver; the run is resumed"),
    "stop-driver": (_stop_driver, "SIGSTOP of the driver; SIGCONT later"),
    "end-driver": (_end_driver, "SIGTERM of the driver; the run is resumed"),
}


def _of(target: Target, kind: str) -> dict[str, int]:
    return {name: pid for name, pid in parts(target.run).items() if name.startswith(kind)}


def _signal(target: Target, found: dict[str, int], number: int, done: str) -> str | None:
    if not found:
        return None
    name = target.random.choice(sorted(found))
    return f"{name} {done}" if signal_to(found[name], number) else None


def _pause(target: Target, found: dict[str, int]) -> str | None:
    if not found:
        return None
    name = target.random.choice(sorted(found))
    seconds = round(target.random.expovariate(1 / 5.0), 1)
    if not signal_to(found[name], signal.SIGSTOP):
        return None
    waker = threading.Timer(seconds, signal_to, (found[name], signal.SIGCONT))
    waker.daemon = True
    waker.start()
    return f"{name} stopped for {seconds} s"
