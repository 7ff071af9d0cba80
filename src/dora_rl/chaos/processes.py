"""The processes of a run that goes on, found by what they write and who started them."""

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path


def parts(run: Path) -> dict[str, int]:
    """The parts by the names of their logs: `trainer`, `rollout-0`, …"""
    logs = (run / "logs").resolve()
    everyone = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
    return {log.stem: pid for pid, log in _with_logs(everyone) if log.parent == logs}


def parts_below(driver: int) -> dict[str, int]:
    """The parts that this driver has started, of whatever run."""
    return {log.stem: pid for pid, log in _with_logs(below(driver)) if log.parent.name == "logs"}


def _with_logs(pids: Iterable[int]) -> Iterator[tuple[int, Path]]:
    """Those whose output is a log, with it."""
    for pid in pids:
        with suppress(OSError):  # it is gone, or not ours to look at
            output = Path(f"/proc/{pid}/fd/1").readlink()
            if output.suffix == ".log":
                yield pid, output


def below(pid: int) -> list[int]:
    """All processes that this one has started, and those that they have."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, IndexError):
            # The name, in brackets, may hold anything; the parent is the second field after it.
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parts[2]))
    found: list[int] = []
    new = [pid]
    while new:
        new = [child for parent in new for child in children.get(parent, [])]
        found += new
    return found


def workers(driver: int) -> list[int]:
    """Who runs rewards and environments, and who starts them."""
    others = set(parts_below(driver).values())
    return sorted(pid for pid in below(driver) if pid not in others)


def signal_to(pid: int, number: int) -> bool:
    """Whether it was there to be told."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False
