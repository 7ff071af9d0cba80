"""The cgroups of this process: what a container, a batch system or systemd leaves to it.

Facts alone, read from Linux's /proc and cgroup file systems below a root that a test can replace;
what cannot be read is not known: `None`. Both kinds of hierarchies are read, v1 and v2.
"""

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from dora_rl.machine.fast_paths import Unavailable, fast_path, on_linux

ROOT = Path("/")
V1, V2 = "cgroup", "cgroup2"  # as the kernel names their file systems
_NO_LIMIT = 1 << 60  # v1 has no word for it, but a number about as large as there is


@dataclass(frozen=True, slots=True)
class Group:
    file_system: str
    name: str
    directory: Path


def groups(controller: str, root: Path = ROOT) -> Iterator[Group]:
    """The groups that a controller limits: of each kind its own first, then its ancestors."""
    paths = _own_paths(controller, root)
    mounts = list(_mounts(controller, root))
    for kind in (V2, V1):
        path = paths.get(kind)
        found = [(top, point) for fs, top, point in mounts if fs == kind]
        if path is None or not found:
            continue
        # Where no mount shows the group, as in some containers, the mount's top is what limits it.
        top, point = next((m for m in found if path.is_relative_to(m[0])), (path, found[0][1]))
        below = path.relative_to(top)
        for part in (below, *below.parents):
            yield Group(kind, str(top / part), root / point.relative_to("/") / part)


@fast_path("cgroup-limits")
def cgroup_limits() -> tuple[str, int]:
    """How many cores' time the cgroups leave to this process; 0 if they do not limit it."""
    if not any(True for _ in groups("cpu")):
        raise Unavailable("the system has no cgroups")
    quota, memory = cpu_quota(), memory_limit()
    told = [] if quota is None else [f"the time of {quota:g} cores"]
    told += [] if memory is None else [f"{memory >> 20} MB of memory"]
    return " and ".join(told) or "no limits", 0 if quota is None else max(1, math.ceil(quota))


def cpu_quota(root: Path = ROOT) -> float | None:
    """Seconds of processor time a second that the tightest group allows."""
    found = (_quota(group) for group in groups("cpu", root))
    return min((quota for quota in found if quota is not None), default=None)


def memory_limit(root: Path = ROOT) -> int | None:
    """Bytes that the tightest group allows."""
    if not on_linux():
        return None
    names = {V2: "memory.max", V1: "memory.limit_in_bytes"}
    found = (number(group.directory / names[group.file_system]) for group in groups("memory", root))
    limits = (limit for limit in found if limit is not None and limit < _NO_LIMIT)
    return min(limits, default=None)


def usable_memory() -> int:
    """Bytes of the machine, or of the container that this process is in."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(machine, memory_limit() or machine)


def _quota(group: Group) -> float | None:
    if group.file_system == V2:
        words = " ".join(lines(group.directory / "cpu.max")).split()
        if len(words) != 2 or not all(map(is_number, words)):  # `max` is no limit
            return None
        quota, period = map(int, words)
    else:  # -1, which is no number here, is no limit
        quota = number(group.directory / "cpu.cfs_quota_us") or 0
        period = number(group.directory / "cpu.cfs_period_us") or 0
    return quota / period if quota and period else None


def _own_paths(controller: str, root: Path) -> dict[str, PurePosixPath]:
    """The group of this process within each hierarchy that may have the controller."""
    paths = {}
    for line in lines(root / "proc/self/cgroup"):
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if ".." in path.split("/"):  # outside of what this process may see
            path = "/"
        if hierarchy == "0" and not controllers:
            paths[V2] = PurePosixPath(path)
        elif controller in controllers.split(","):
            paths[V1] = PurePosixPath(path)
    return paths


def _mounts(controller: str, root: Path) -> Iterator[tuple[str, PurePosixPath, PurePosixPath]]:
    """(file system, the group at its top, where it is mounted) of what may have the controller."""
    for line in lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        fields, (file_system, _, options) = before.split(" "), (after.split(" ") + [""] * 3)[:3]
        controlled = file_system == V1 and controller in options.split(",")
        if (file_system == V2 or controlled) and len(fields) > 4:
            top, point = (PurePosixPath(_unescaped(field)) for field in fields[3:5])
            if top.is_absolute() and point.is_absolute():
                yield file_system, top, point


def _unescaped(field: str) -> str:
    """The kernel writes spaces and the like as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), field)


# Files of the kernel's


def lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except (OSError, ValueError):  # not Linux, no such group, or not ours to read
        return []


def table(path: Path) -> dict[str, int]:
    """Lines of a name and a number; a unit may follow."""
    rows = (line.split() for line in lines(path))
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and is_number(row[1])}


def number(path: Path) -> int | None:
    found = lines(path)
    return int(found[0]) if found and is_number(found[0]) else None


def is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()
