"""How much memory is left to a run, and whether the kernel has killed for want of it.

The facts are read from Linux's /proc and cgroups, below a root that a test can replace; what
cannot be read is not known: `None`. The one verdict, that memory is short, is the watch's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dora_rl.core.protocol.errors import UserError
from dora_rl.machine import cgroups
from dora_rl.machine.fast_paths import Unavailable, fast_path

MB = 1 << 20
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

    limit: str
    usage: str
    inactive: str
    active: str
    mapped: str
    kills: str


_KINDS = {
    cgroups.V2: _Kind(
        limit="memory.max",
        usage="memory.current",
        inactive="inactive_file",
        active="active_file",
        mapped="file_mapped",
        kills="memory.events",
    ),
    cgroups.V1: _Kind(
        limit="memory.limit_in_bytes",
        usage="memory.usage_in_bytes",
        inactive="total_inactive_file",
        active="total_active_file",
        mapped="total_mapped_file",
        kills="memory.oom_control",
    ),
}


# Facts


def left(root: Path = cgroups.ROOT) -> Left | None:
    """The least that the machine and the cgroups of this process leave."""
    found = []
    machine = cgroups.table(root / "proc/meminfo").get("MemAvailable:")
    if machine is not None:
        found.append(Left(machine * 1024, "on this machine"))
    for group in cgroups.groups("memory", root):
        room = _room(group)
        if room is not None:
            found.append(Left(room, f"in the cgroup `{group.name}`"))
    return min(found, key=lambda one: one.size, default=None)


def oom_kills(root: Path = cgroups.ROOT) -> int | None:
    """Processes that the kernel has killed for want of memory, as near to this one as is counted.

    A group counts those of its own processes, whoever's limit it was; the machine counts all.
    """
    for group in cgroups.groups("memory", root):
        count = cgroups.table(group.directory / _KINDS[group.file_system].kills).get("oom_kill")
        if count is not None:
            return count
    return cgroups.table(root / "proc/vmstat").get("oom_kill")


def _room(group: cgroups.Group) -> int | None:
    """What a group may still take: what it does not use, and the file cache that it can drop.

    The cache counts as in the kernel's MemAvailable, whether used lately or not, since a group's
    cache grows up to its limit; but not what is mapped: programs and weights at work.
    """
    kind = _KINDS[group.file_system]
    limit = cgroups.number(group.directory / kind.limit)  # `max` is no number
    used = cgroups.number(group.directory / kind.usage)
    stat = cgroups.table(group.directory / "memory.stat")
    names = (kind.inactive, kind.active, kind.mapped)
    if limit is None or used is None or any(name not in stat for name in names):
        return None
    inactive, active, mapped = (stat[name] for name in names)
    cache = inactive + max(0, active - mapped)
    return max(0, limit - used + min(cache, used))


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

    It also knows whether a worker's death was the kernel's doing: each kill that the kernel counts
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
        """Workers that the kernel has killed."""

    def check(self, config: Path | None = None) -> None:
        """Refuse to start where memory is short already; `config` is that of a resumed run."""
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
        # A worker that was killed before the last look is known to be dead by now.
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
