"""What was issued and what became of it: the only counter of work in the system.

Every issued trajectory is in exactly one state, and ends in exactly one of trained, filtered
or failed. Records are kept while their group is outstanding, then folded into counts. The
indexes are functions of the records, so that a restored state decides as the saved one.
"""

import heapq
from collections import Counter
from dataclasses import dataclass, field

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
TERMINAL = frozenset({_T.TRAINED, _T.FILTERED, _T.FAILED})
DERIVED = {"derived": True}


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
        return tuple(t for t in self.members(group) if records[t].state is not _T.FAILED)

    # A group's way

    def admit(self, version: Version) -> Group:
        """Issue the next prompt's group, pinned to a version."""
        group = Group(self.issued, version, unscored=self.group_size)
        self.issued += 1
        self.groups[group.id] = group
        self._count_pending(version, 1)
        for member in self.members(group.id):
            trajectory = Trajectory(member, group.id, version)
            self.trajectories[member] = trajectory
            self._count_work(trajectory, 1)
            self._push_waiting(trajectory)
        self.num_waiting += self.group_size
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
        _, first = heapq.heappop(self.ready[version])
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
            self._move(self.trajectories[member], _T.TRAINED)
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
        self._move(trajectory, _T.RUNNING)
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
        self.set_paused(trajectory, False)
        self._move(trajectory, _T.GENERATED)
        trajectory.instance = None
        trajectory.migration = None
        trajectory.tokens = tokens

    def scored(self, trajectory: Trajectory) -> None:
        self._move(trajectory, _T.SCORED)
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
        self._count_work(trajectory, -1)
        trajectory.version = version
        self._count_work(trajectory, 1)
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
        if new not in TRAJECTORY_MOVES[old]:
            raise IllegalTransition(f"trajectory {trajectory.id} cannot go from `{old}` to `{new}`")
        trajectory.state = new
        self.num_waiting += (new is _T.WAITING) - (old is _T.WAITING)
        self.num_parked += (new is _T.PARKED) - (old is _T.PARKED)
        if old in WORK and new not in WORK:
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

    def _push_waiting(self, trajectory: Trajectory) -> None:
        heapq.heappush(self.waiting.setdefault(trajectory.version, []), trajectory.id)

    def _push_ready(self, group: Group) -> None:
        heapq.heappush(self.ready.setdefault(group.version, []), (group.order, group.id))
        self.num_ready += 1
