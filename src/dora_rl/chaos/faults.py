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

from dora_rl.chaos.life import Life
from dora_rl.chaos.processes import parts, signal_to, workers
from dora_rl.chaos.wounds import Wounds
from dora_rl.linux import call_watch


class Target(NamedTuple):
    """A run, its life now, and what is damaged of it."""

    run: Path
    life: Life
    wounds: Wounds
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
    return _signal(target, {"driver": target.life.pid}, signal.SIGKILL, "killed")


def _stop_driver(target: Target) -> str | None:
    return _pause(target, {"driver": target.life.pid})


def _end_driver(target: Target) -> str | None:
    return _signal(target, {"driver": target.life.pid}, signal.SIGTERM, "asked to end")


def _kill_worker(target: Target) -> str | None:
    found = {f"worker {pid}": pid for pid in workers(target.life.pid)}
    return _signal(target, found, signal.SIGKILL, "killed")


def _repeat_messages(target: Target) -> str | None:
    seconds = _seconds(target)
    if not target.life.repeat_messages(seconds):
        return None
    return f"every message to the driver is heard again for {seconds} s"


def _slow_disk(target: Target) -> str | None:
    if not target.life.disk.watching:
        return None
    seconds, delay = _seconds(target), round(target.random.uniform(0.01, 0.1), 2)
    target.life.disk.be_slow(delay, seconds)
    return f"each sync and write takes {delay} s longer for {seconds} s"


def _full_disk(target: Target) -> str | None:
    if not target.life.disk.watching:
        return None
    seconds = round(target.random.uniform(0.5, 4.0), 1)
    target.life.disk.be_full(seconds)
    return f"the disk is full for {seconds} s"


def _damage_file(target: Target) -> str | None:
    """Of a run that is dead: one that lives has its files open, and would write them again."""
    if target.life.ended or not target.wounds.possible:
        return None
    target.life.kill(target.run)
    done = target.wounds.inflict(target.random)
    return f"driver killed, and {done}" if done else None


FAULTS: dict[str, tuple[Fault, str]] = {
    "kill-rollout": (_kill_part("rollout"), "SIGKILL of a rollout process"),
    "stop-rollout": (_stop_part("rollout"), "SIGSTOP of a rollout process; SIGCONT later"),
    "kill-trainer": (_kill_part("trainer"), "SIGKILL of the trainer"),
    "stop-trainer": (_stop_part("trainer"), "SIGSTOP of the trainer; SIGCONT later"),
    "kill-worker": (_kill_worker, "SIGKILL of a reward's process, or of who starts them"),
    "kill-driver": (_kill_driver, "SIGKILL of the driver; the run is resumed"),
    "stop-driver": (_stop_driver, "SIGSTOP of the driver; SIGCONT later"),
    "end-driver": (_end_driver, "SIGTERM of the driver; the run is resumed"),
    "repeat-messages": (_repeat_messages, "the driver hears again what it has heard"),
    "slow-disk": (_slow_disk, "each sync and write of the run takes longer for a while"),
    "full-disk": (_full_disk, "syncs and writes of the run find no room for a while"),
    "damage-file": (_damage_file, "the run is killed, and a file of it cut or altered"),
}
_OF_THE_DISK = ("slow-disk", "full-disk")


def available() -> list[str]:
    """Those that this machine can have."""
    disk = call_watch().in_force
    return [name for name in FAULTS if disk or name not in _OF_THE_DISK]


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
    seconds = _seconds(target)
    if not signal_to(found[name], signal.SIGSTOP):
        return None
    waker = threading.Timer(seconds, signal_to, (found[name], signal.SIGCONT))
    waker.daemon = True
    waker.start()
    return f"{name} stopped for {seconds} s"


def _seconds(target: Target) -> float:
    """Shorter or longer than a silence is borne."""
    return round(target.random.expovariate(1 / 5.0), 1)
