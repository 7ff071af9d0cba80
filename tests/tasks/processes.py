"""Processes as the whole machine sees them, and pools that wait as long as a test wants.

A worker does not know its own number there. On a busy machine anything may take long: limits of
time are generous, but for what is to run into them.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.patience import PATIENCE_S


def processes() -> dict[int, tuple[int, str]]:
    """All on this machine that are not dead: parent and name."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                text = Path("/proc", entry, "stat").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            state, parent = text.rpartition(")")[2].split()[:2]
            if state not in "ZX":
                found[int(entry)] = (int(parent), text.partition("(")[2].rpartition(")")[0])
    return found


def descendants(root: int) -> set[int]:
    known = processes()
    found: set[int] = set()
    grown = {root}
    while grown:
        grown = {pid for pid, (parent, _) in known.items() if parent in grown} - found
        found |= grown
    return found


def named(name: str) -> list[int]:
    return [pid for pid, (_, found) in processes().items() if found == name]


def eventually(what: Callable[[], bool], within_s: float = PATIENCE_S) -> bool:
    """Whether it comes about; how long that takes proves nothing on a busy machine."""
    deadline = time.monotonic() + within_s
    while not what():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def zygote_of(pool: Any) -> int:
    """The process that makes a pool's workers."""
    number: int = pool._workers._zygote._pid
    return number


@contextmanager
def time_limit(pool: Any, seconds: float) -> Iterator[None]:
    """Of what a pool's workers are asked meanwhile, or have been asked."""
    before, pool._workers._timeout_s = pool._workers._timeout_s, seconds
    try:
        yield
    finally:
        pool._workers._timeout_s = before
