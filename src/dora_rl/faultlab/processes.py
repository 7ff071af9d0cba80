"""The live processes of a run, found by their logs and by their parents."""

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from dora_rl.runtime.launchers.local import forkserver


def workers_of_run(run: Path) -> dict[str, int]:
    """Its workers' process ids, by the names of their logs: `trainer`, `rollout-0`, …"""
    logs = (run / "logs").resolve()
    everyone = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
    return {log.stem: pid for pid, log in _with_logs(everyone) if log.parent == logs}


def workers_of_driver(driver: int) -> dict[str, int]:
    """The workers that this driver has started, of whatever run."""
    return {
        log.stem: pid for pid, log in _with_logs(descendants(driver)) if log.parent.name == "logs"
    }


def _with_logs(pids: Iterable[int]) -> Iterator[tuple[int, Path]]:
    """Those of the processes whose standard output is a log, with its path."""
    for pid in pids:
        with suppress(OSError):  # it is gone, or belongs to another user
            output = Path(f"/proc/{pid}/fd/1").readlink()
            if output.suffix == ".log":
                yield pid, output


def descendants(pid: int) -> list[int]:
    """All processes that this one has started, directly or not."""
    children: dict[int, list[int]] = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):
            children.setdefault(_parent(int(process.name)), []).append(int(process.name))
    found: list[int] = []
    new = [pid]
    while new:
        new = [child for parent in new for child in children.get(parent, [])]
        found += new
    return found


def sandbox_processes(driver: int) -> list[int]:
    """Processes of the sandbox: reward workers, and the zygotes that start them."""
    below = descendants(driver)
    servers = [pid for pid in below if is_forkserver(pid, driver)]
    others = {*workers_of_driver(driver).values(), *servers}
    for server in servers:  # workers that are about to open their logs
        others.update(descendants(server))
    return sorted(pid for pid in below if pid not in others)


def is_forkserver(pid: int, driver: int) -> bool:
    """Whether this process forks the workers of that driver; its forks have its command line."""
    with suppress(OSError, IndexError):
        return forkserver.MODULE in command_line(pid) and _parent(pid) == driver
    return False


def command_line(pid: int) -> list[str]:
    """The words of its command, of any encoding; none if it has ended."""
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return [os.fsdecode(word) for word in words]
    return []


def lives(pid: int) -> bool:
    """Whether the process has not ended; one that nobody has waited for yet has."""
    with suppress(OSError, IndexError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state not in ("Z", "X")
    return False


def actors_of_run(run: Path) -> dict[str, int]:
    """On Ray: the processes that host its workers, by the names of those; each is its parent."""
    found = {}
    for name, pid in workers_of_run(run).items():
        with suppress(OSError, IndexError):
            found[name] = _parent(pid)
    return found


def _parent(pid: int) -> int:
    # The name, in brackets, may hold anything; the parent is the second field after it.
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def signal_to(pid: int, number: int) -> bool:
    """Send a signal; whether the process was there to get it."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False
