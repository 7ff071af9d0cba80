"""What was issued and what became of it: the only counter of work in the system.

Every issued trajectory is in exactly one state, and ends in exactly one of trained, filtered
or failed. Records are kept while their group is outstanding, then folded into counts. The
indexes are functions of the records, so that a restored state decides as the saved one.
"""

from collections import Counter
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

from dora_rl.core.protocol.errors import IllegalTransition
from dora_rl.core.protocol.reasons import count_reason
from dora_rl.core.protocol.types import (
    GROUP_MOVES,
    TRAJECTORY_MOVES,
    Fence,
    GroupId,
    GroupState,
    InstanceId,
    MigrationId,
    TrajectoryId,
    TrajectoryState,
    Version,
    check_move,
)

_T = TrajectoryState
_G = GroupState
WORK = frozenset({_T.WAITING, _T.RUNNING, _T.PARKED})
PLACELESS = frozenset({_T.WAITING, _T.PARKED})
TERMINAL = frozenset({_T.TRAINED, _T.FILTERED, _T.FAILED})
DERIVED = {"derived": True}

# Bound once: in Python 3.11 an enum's member takes ten times as long to find as a global.
_WAITING, _RUNNING, _FAILED, _SCORED = _T.WAITING, _T.RUNNING, _T.FAILED, _T.SCORED
_GENERATED, _TRAINED = _T.GENERATED, _T.TRAINED


class _Effect(NamedTuple):
    """What one legal move of a trajectory does to the counts."""

    waiting: int
    parked: int
    placeless: int
    ends_work: bool


_EFFECTS: dict[TrajectoryState, dict[TrajectoryState, _Effect]] = {
    old: {
        new: _Effect(
            (new is _T.WAITING) - (old is _T.WAITING),
            (new is _T.PARKED) - (old is _T.PARKED),
            (new in PLACELESS) - (old in PLACELESS),
            old in WORK and new not in WORK,
        )
        for new in TRAJECTORY_MOVES[old]
    }
    for old in TRAJECTORY_MOVES
}


@dataclass(slots=True)
class Trajectory:
    id: TrajectoryId
    group: GroupId
    version: Version  # that generates it now; differs from its group's where switching is allowed
    state: TrajectoryState = _T.WAITING
    fence: Fence = 0
    instance: InstanceId | None = None
    migration: MigrationId | None = None
    tokens: int = 0
    saved: int = 0
    failures: int = 0
    losses: int = 0
    turn: int = 0
    paused: bool = False
    progress_at: float = 0.0


@dataclass(slots=True)
class Group:
    id: GroupId
    version: Version  # that it was admitted on: its deadline is this + K
    state: GroupState = _G.OPEN
    unscored: int = 0
    order: int = 0  # of completion
    attempts: int = 0  # of its judgement


@dataclass(slots=True)
class Work:
    group_size: int
    issued: int = 0  # groups; also the id of the next one
    prompts: int = 0  # prompts known; the backlog is prompts - issued
    exhausted: bool = False
    groups: dict[GroupId, Group] = field(default_factory=dict)
    trajectories: dict[TrajectoryId, Trajectory] = field(default_factory=dict)
    completions: int = 0
    trained: int = 0  # trajectories, as are the next two
    filtered: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)

    pending: dict[Version, int] = field(default_factory=dict, metadata=DERIVED)
    """Outstanding groups that are not in the batch that trains now: later steps consume them."""
    ready: dict[Version, list[tuple[int, GroupId]]] = field(
        default_factory=dict, metadata=DERIVED
    )  # heaps in order of completion
    num_ready: int = field(default=0, metadata=DERIVED)
    waiting: dict[Version, list[TrajectoryId]] = field(default_factory=dict, metadata=DERIVED)
    unfinished: dict[Version, int] = field(default_factory=dict, metadata=DERIVED)
    placeless: dict[Version, int] = field(default_factory=dict, metadata=DERIVED)
    """Of them, those that wait or are parked: they hold no slot."""
    demand: int = field(default=0, metadata=DERIVED)  # trajectories that need a slot
    num_waiting: int = field(default=0, metadata=DERIVED)
    num_parked: int = field(default=0, metadata=DERIVED)

    def rebuild(self) -> None:
        """Derive the indexes from the records."""
        for group in self.groups.values():
            if group.state is not _G.TRAINING:
                self._count_pending(group.version, 1)
            if group.state is _G.READY:
                self._push_ready(group)
        for trajectory in self.trajectories.values():
            if trajectory.state in WORK:
                self._count_work(trajectory, 1)
            if trajectory.state in PLACELESS:
                self._count_placeless(trajectory.version, 1)
            if trajectory.state is _T.WAITING:
                self._push_waiting(trajectory)
            self.num_waiting += trajectory.state is _T.WAITING
            self.num_parked += trajectory.state is _T.PARKED

    # Reading

    @property
    def num_outstanding(self) -> int:
        """Outstanding groups: admitted and not terminal."""
        return len(self.groups)

    @property
    def backlog(self) -> int:
        return self.prompts - self.issued

    def members(self, group: GroupId) -> range:
        return range(group * self.group_size, (group + 1) * self.group_size)

    def surviving(self, group: GroupId) -> tuple[TrajectoryId, ...]:
        """The members that have not failed: the group's true membership."""
        records = self.trajectories
        return tuple([t for t in self.members(group) if records[t].state is not _FAILED])

    # A group's way

    def admit(self, version: Version) -> Group:
        """Issue the next prompt's group, pinned to a version."""
        size = self.group_size
        group = Group(self.issued, version, unscored=size)
        self.issued += 1
        self.groups[group.id] = group
        self._count_pending(version, 1)
        waiting = self.waiting.setdefault(version, [])
        for member in self.members(group.id):
            self.trajectories[member] = Trajectory(member, group.id, version)
            heappush(waiting, member)
        self.unfinished[version] = self.unfinished.get(version, 0) + size
        self._count_placeless(version, size)
        self.demand += size
        self.num_waiting += size
        return group

    def complete(self, group: Group) -> None:
        self._move_group(group, _G.JUDGING)
        group.order = self.completions
        self.completions += 1

    def keep(self, group: Group) -> None:
        self._move_group(group, _G.READY)
        self._push_ready(group)

    def filter(self, group: Group, reason: str) -> None:
        self._move_group(group, _G.FILTERED)
        for member in self.surviving(group.id):
            self._move(self.trajectories[member], _T.FILTERED)
            count_reason(self.filtered, reason)
        self._close(group)

    def batch_next(self, version: Version) -> Group:
        """Put the version's first completed group into the batch that trains now."""
        _, first = heappop(self.ready[version])
        self.num_ready -= 1
        if not self.ready[version]:
            del self.ready[version]
        group = self.groups[first]
        self._move_group(group, _G.TRAINING)
        self._count_pending(version, -1)
        return group

    def train(self, group: Group) -> None:
        self._move_group(group, _G.TRAINED)
        for member in self.surviving(group.id):
            self._move(self.trajectories[member], _TRAINED)
            self.trained += 1
        self._close(group, batched=True)

    def fail_group(self, group: Group, reason: str) -> None:
        """End a group; members that have not failed yet fail for `reason`."""
        batched = group.state is _G.TRAINING
        self._move_group(group, _G.FAILED)
        for member in self.surviving(group.id):
            self._fail(self.trajectories[member], reason)
        self._close(group, batched=batched)

    # A trajectory's way

    def start(self, trajectory: Trajectory, instance: InstanceId, fence: Fence, now: float) -> None:
        self._move(trajectory, _RUNNING)
        trajectory.instance = instance
        trajectory.fence = fence
        trajectory.progress_at = now

    def requeue(self, trajectory: Trajectory) -> None:
        """Back to waiting, for the same version, to continue from what was saved."""
        self.set_paused(trajectory, False)
        self._move(trajectory, _T.WAITING)
        self._displace(trajectory)
        trajectory.tokens = trajectory.saved
        self._push_waiting(trajectory)

    def park(self, trajectory: Trajectory) -> None:
        self.set_paused(trajectory, False)
        self._move(trajectory, _T.PARKED)

    def unpark(self, trajectory: Trajectory, now: float) -> None:
        self._move(trajectory, _T.RUNNING)
        trajectory.progress_at = now

    def relocate(self, trajectory: Trajectory, instance: InstanceId, fence: Fence) -> None:
        """A migration has been committed."""
        trajectory.instance = instance
        trajectory.fence = fence
        trajectory.migration = None

    def generated(self, trajectory: Trajectory, tokens: int) -> None:
        if trajectory.paused:
            self.set_paused(trajectory, False)
        self._move(trajectory, _GENERATED)
        trajectory.instance = None
        trajectory.migration = None
        trajectory.tokens = tokens

    def scored(self, trajectory: Trajectory) -> None:
        self._move(trajectory, _SCORED)
        self.groups[trajectory.group].unscored -= 1

    def fail(self, trajectory: Trajectory, reason: str) -> None:
        """End one trajectory; its group continues with the others."""
        if trajectory.state is not _T.SCORED:
            self.groups[trajectory.group].unscored -= 1
        self._fail(trajectory, reason)

    def set_paused(self, trajectory: Trajectory, paused: bool) -> None:
        """A paused trajectory waits for its environment and needs no slot."""
        self.demand += trajectory.paused - paused
        trajectory.paused = paused

    def rebind(self, trajectory: Trajectory, version: Version) -> None:
        """Continue under another version (only paradigms that do not pin versions)."""
        placeless = trajectory.state in PLACELESS
        self._count_placeless(trajectory.version, -placeless)
        self._count_work(trajectory, -1)
        trajectory.version = version
        self._count_work(trajectory, 1)
        self._count_placeless(version, placeless)
        if trajectory.state is _T.WAITING:
            self._push_waiting(trajectory)

    # Inside

    def _fail(self, trajectory: Trajectory, reason: str) -> None:
        self.set_paused(trajectory, False)
        self._move(trajectory, _T.FAILED)
        self._displace(trajectory)
        count_reason(self.failed, reason)

    def _displace(self, trajectory: Trajectory) -> None:
        trajectory.instance = None
        trajectory.migration = None
        trajectory.fence = 0

    def _close(self, group: Group, *, batched: bool = False) -> None:
        for member in self.members(group.id):
            del self.trajectories[member]
        del self.groups[group.id]
        if not batched:  # else it is not counted since it went into its batch
            self._count_pending(group.version, -1)

    def _count_pending(self, version: Version, change: int) -> None:
        left = self.pending.get(version, 0) + change
        if left:
            self.pending[version] = left
        else:
            del self.pending[version]

    def _move(self, trajectory: Trajectory, new: TrajectoryState) -> None:
        old = trajectory.state
        effect = _EFFECTS[old].get(new)
        if effect is None:
            raise IllegalTransition(f"trajectory {trajectory.id} cannot go from `{old}` to `{new}`")
        trajectory.state = new
        waiting, parked, placeless, ends_work = effect
        self.num_waiting += waiting
        self.num_parked += parked
        if placeless:
            self._count_placeless(trajectory.version, placeless)
        if ends_work:
            self._count_work(trajectory, -1)

    def _move_group(self, group: Group, new: GroupState) -> None:
        group.state = check_move(GROUP_MOVES, group.state, new, f"group {group.id}")

    def _count_work(self, trajectory: Trajectory, change: int) -> None:
        version = trajectory.version
        left = self.unfinished.get(version, 0) + change
        if left:
            self.unfinished[version] = left
        else:
            del self.unfinished[version]
            self.waiting.pop(version, None)
        if not trajectory.paused:
            self.demand += change

    def _count_placeless(self, version: Version, change: int) -> None:
        left = self.placeless.get(version, 0) + change
        if left:
            self.placeless[version] = left
        else:
            self.placeless.pop(version, None)

    def _push_waiting(self, trajectory: Trajectory) -> None:
        heappush(self.waiting.setdefault(trajectory.version, []), trajectory.id)

    def _push_ready(self, group: Group) -> None:
        heappush(self.ready.setdefault(group.version, []), (group.order, group.id))
        self.num_ready += 1
