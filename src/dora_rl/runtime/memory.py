"""How much memory is left to a run, and whether the kernel has killed for want of it.

The facts are read from Linux's /proc and cgroups, below a root that a test can replace; what
cannot be read is not known: `None`. The one verdict, that memory is short, is the watch's.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from dora_rl.core.errors import UserError
from dora_rl.machine.fast_paths import Unavailable, fast_path

MB = 1 << 20
_ROOT = Path("/")
_LOOK_S = 1.0  # between two looks; each takes about a millisecond


@dataclass(frozen=True, slots=True)
class Left:
    """Memory that can still be had, and who sets the limit."""

    size: int  # bytes
    place: str

    def __str__(self) -> str:
        return f"{self.size // MB} MB of memory are left {self.place}"


@dataclass(frozen=True, slots=True)
class _Kind:
    """What one version of cgroups calls things."""

    file_system: str
    limit: str
    usage: str
    inactive: str
    active: str
    mapped: str
    kills: str


_KINDS = (
    _Kind(
        file_system="cgroup2",
        limit="memory.max",
        usage="memory.current",
        inactive="inactive_file",
        active="active_file",
        mapped="file_mapped",
        kills="memory.events",
    ),
    _Kind(
        file_system="cgroup",
        limit="memory.limit_in_bytes",
        usage="memory.usage_in_bytes",
        inactive="total_inactive_file",
        active="total_active_file",
        mapped="total_mapped_file",
        kills="memory.oom_control",
    ),
)


@dataclass(frozen=True, slots=True)
class _Group:
    kind: _Kind
    name: str
    directory: Path


# Facts


def left(root: Path = _ROOT) -> Left | None:
    """The least that the machine and the cgroups of this process leave."""
    found = []
    machine = _table(root / "proc/meminfo").get("MemAvailable:")
    if machine is not None:
        found.append(Left(machine * 1024, "on this machine"))
    for group in _groups(root):
        room = _room(group)
        if room is not None:
            found.append(Left(room, f"in the cgroup `{group.name}`"))
    return min(found, key=lambda one: one.size, default=None)


def oom_kills(root: Path = _ROOT) -> int | None:
    """Processes that the kernel has killed for want of memory, as near to this one as is counted.

    A group counts those of its own processes, whoever's limit it was; the machine counts all.
    """
    for group in _groups(root):
        count = _table(group.directory / group.kind.kills).get("oom_kill")
        if count is not None:
            return count
    return _table(root / "proc/vmstat").get("oom_kill")


def _room(group: _Group) -> int | None:
    """What a group may still take: what it does not use, and the file cache that it can drop.

    The cache counts as in the kernel's MemAvailable, whether used lately or not, since a group's
    cache grows up to its limit; but not what is mapped: programs and weights at work.
    """
    limit = _number(group.directory / group.kind.limit)  # `max` is no number
    used = _number(group.directory / group.kind.usage)
    stat = _table(group.directory / "memory.stat")
    names = (group.kind.inactive, group.kind.active, group.kind.mapped)
    if limit is None or used is None or any(name not in stat for name in names):
        return None
    inactive, active, mapped = (stat[name] for name in names)
    cache = inactive + max(0, active - mapped)
    return max(0, limit - used + min(cache, used))


def _groups(root: Path) -> Iterator[_Group]:
    """The memory cgroups of this process: of each kind its own first, then its ancestors."""
    paths = _own_paths(root)
    mounts = list(_mounts(root))
    for kind in _KINDS:
        path = paths.get(kind.file_system)
        found = [(top, point) for fs, top, point in mounts if fs == kind.file_system]
        if path is None or not found:
            continue
        # Where no mount shows the group, as in some containers, the mount's top is what limits it.
        top, point = next((m for m in found if path.is_relative_to(m[0])), (path, found[0][1]))
        below = path.relative_to(top)
        for part in (below, *below.parents):
            yield _Group(kind, str(top / part), root / point.relative_to("/") / part)


def _own_paths(root: Path) -> dict[str, PurePosixPath]:
    """The group of this process within each hierarchy that may limit memory."""
    paths = {}
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if ".." in path.split("/"):  # outside of what this process may see
            path = "/"
        if number == "0" and not controllers:
            paths["cgroup2"] = PurePosixPath(path)
        elif "memory" in controllers.split(","):
            paths["cgroup"] = PurePosixPath(path)
    return paths


def _mounts(root: Path) -> Iterator[tuple[str, PurePosixPath, PurePosixPath]]:
    """(file system, the group at its top, where it is mounted) of cgroups that have memory."""
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        fields, (file_system, _, options) = before.split(" "), (after.split(" ") + [""] * 3)[:3]
        of_memory = file_system == "cgroup" and "memory" in options.split(",")
        if (file_system == "cgroup2" or of_memory) and len(fields) > 4:
            top, point = (PurePosixPath(_unescaped(field)) for field in fields[3:5])
            if top.is_absolute() and point.is_absolute():
                yield file_system, top, point


def _unescaped(field: str) -> str:
    """The kernel writes spaces and the like as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), field)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except (OSError, ValueError):  # not Linux, no such group, or not ours to read
        return []


def _table(path: Path) -> dict[str, int]:
    """Lines of a name and a number; a unit may follow."""
    rows = (line.split() for line in _lines(path))
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and _is_number(row[1])}


def _number(path: Path) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and _is_number(lines[0]) else None


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


@fast_path("memory-watch")
def memory_watch() -> tuple[str, int]:
    """Whether the system tells how much memory is left."""
    found = left()
    if found is None:
        raise Unavailable("the system does not tell how much memory is left")
    return str(found), 0


def _untold() -> None:
    """Where the system does not tell."""


# The verdict


class Watch:
    """Whether memory is short: below the bound at two looks in a row.

    It also knows whether a part's death was the kernel's doing: each kill that the kernel counts
    explains one, if it is recent. Others are killed as well, such as the workers of rewards.
    """

    def __init__(
        self,
        bound_mb: int,
        *,
        read: Callable[[], Left | None] | None = None,
        kills: Callable[[], int | None] | None = None,
        every_s: float = _LOOK_S,
    ) -> None:
        """A bound of 0 watches nothing."""
        self.bound_mb = bound_mb
        told = memory_watch().in_force
        self._read = read or (left if told else _untold)
        self._kills = kills or (oom_kills if told else _untold)
        self._every_s = every_s
        self._looked_at: float | None = None
        self._low: Left | None = None  # what the last look found, if it was below the bound
        self._counted = self._kills() or 0  # at the last look
        self._explained = self._counted  # these explain no death any more
        self.deaths = 0
        """Parts that the kernel has killed."""

    def check(self, config: Path | None = None) -> None:
        """Refuse to start where memory is short already; `config` is that of a run that goes on."""
        low = self._look()
        if low is not None:
            where = "" if config is None else f" in `{config}`"
            raise UserError(
                f"{self._shortage(low)}. Free some, or lower it{where} (0: not watched)."
            )

    def short(self, now: float) -> str | None:
        """How short memory is, if it is; looks at most once in a while."""
        if self._looked_at is not None and now < self._looked_at + self._every_s:
            return None
        before, self._low = self._low, self._look()
        self._looked_at = now
        # A part that was killed before the last look is known to be dead by now.
        self._explained = max(self._explained, self._counted)
        self._counted = self._kills() or 0
        if before is None or self._low is None:
            return None
        return self._shortage(self._low)

    def blame(self) -> str | None:
        """Who may have sent a SIGKILL that nobody here has sent."""
        if (self._kills() or 0) > self._explained:
            self._explained += 1
            self.deaths += 1
            return "killed by the kernel: out of memory"
        if self._low is not None:  # there are killers besides the kernel, which it does not count
            return f"perhaps for want of memory: {self._low}"
        return None

    def _look(self) -> Left | None:
        found = self._read() if self.bound_mb else None
        return found if found is not None and found.size < self.bound_mb * MB else None

    def _shortage(self, low: Left) -> str:
        return f"{low}, less than runtime.min_free_memory_mb: `{self.bound_mb}`"


def remedy(config: Path) -> str:
    """What helps a run that got short: of its configuration, it may change `[runtime]` alone."""
    return (
        "Free some, or lower runtime.instances or runtime.min_free_memory_mb (0: not watched) in "
        f"`{config}`; a new run may have smaller rollout.slots, rollout.kv_budget_tokens or "
        "train.token_budget"
    )
