"""Processes as the whole machine sees them: a worker does not know its own number there."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


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


def eventually(what: Callable[[], bool], within_s: float = 5.0) -> bool:
    deadline = time.monotonic() + within_s
    while not what():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def nursery_of(pool: Any) -> int:
    """The process that makes a pool's workers."""
    number: int = pool._crew._nursery._pid
    return number
