"""The words of the core, each with one meaning, and the legal moves between states.

Plain integers name things, so that half a million trajectories stay small. Tokens and
tensors never enter: the core knows ids, lengths, versions and states.
"""

from enum import StrEnum
from typing import NamedTuple, TypeAlias, TypeVar

from dora_rl.core.protocol.errors import IllegalTransition

Version: TypeAlias = int  # one set of weights; train step s publishes version s + 1
InstanceId: TypeAlias = int  # one rollout replica
GroupId: TypeAlias = int  # position of its prompt in the prompt stream
TrajectoryId: TypeAlias = int  # group * group_size + member
MigrationId: TypeAlias = int
Fence: TypeAlias = int  # unique number of one placement of one trajectory; 0 is "nowhere"

ADDED = {"added": True}
"""Metadata of a field that journals and snapshots of earlier releases do not have.

It is read as its default where it is missing, and left out where it has that: what does not use
it is written as before, to the byte.
"""


class Segment(NamedTuple):
    """A run of tokens that one set of weights sampled, as the engine itself reports it."""

    version: Version
    digest: str
    tokens: int


class Length(NamedTuple):
    """How far a running trajectory is: tokens generated so far."""

    trajectory: TrajectoryId
    fence: Fence
    tokens: int


class Placement(NamedTuple):
    """A trajectory where it runs now (or ran, if the fence has been superseded)."""

    trajectory: TrajectoryId
    fence: Fence


class Move(NamedTuple):
    """One trajectory of a migration: the fence it has, and the one it gets on arrival."""

    trajectory: TrajectoryId
    fence: Fence
    new_fence: Fence


class BatchGroup(NamedTuple):
    """A group as the trainer receives it; `trajectories` is its true membership."""

    group: GroupId
    version: Version
    trajectories: tuple[TrajectoryId, ...]


class TrajectoryState(StrEnum):
    WAITING = "waiting"  # pinned to a version, on no instance
    RUNNING = "running"  # on an instance (generating, or between turns)
    PARKED = "parked"  # its KV on an instance's host, no slot
    GENERATED = "generated"  # whole, not scored
    SCORED = "scored"  # scored, not terminal
    TRAINED = "trained"
    FILTERED = "filtered"
    FAILED = "failed"


class GroupState(StrEnum):
    OPEN = "open"  # a member is not scored yet
    JUDGING = "judging"  # complete; whoever filters has not answered
    READY = "ready"
    TRAINING = "training"
    TRAINED = "trained"
    FILTERED = "filtered"
    FAILED = "failed"


class VersionState(StrEnum):
    PUBLISHED = "published"  # complete in the store, served by nobody yet
    ACTIVE = "active"  # the newest, and served
    DRAINING = "draining"  # no longer the newest; a lease holds it
    RETIRED = "retired"


class HostState(StrEnum):
    """What an instance is to a version that it holds."""

    INSTALLING = "installing"
    READY = "ready"
    EVICTING = "evicting"


class SleepState(StrEnum):
    """Which role has the devices of an instance; only while it is awake, rollout."""

    AWAKE = "awake"
    DRAINING = "draining"  # takes no work any more; what it has moves away or is parked
    FALLING_ASLEEP = "falling_asleep"  # empty, and told to give its devices to training
    ASLEEP = "asleep"  # holds no weights; training has its devices
    WAKING = "waking"  # told to take its devices back


_S = SleepState
_T = TrajectoryState
_G = GroupState
_V = VersionState

TRAJECTORY_MOVES: dict[TrajectoryState, frozenset[TrajectoryState]] = {
    _T.WAITING: frozenset({_T.RUNNING, _T.FAILED}),
    _T.RUNNING: frozenset({_T.WAITING, _T.PARKED, _T.GENERATED, _T.FAILED}),
    _T.PARKED: frozenset({_T.WAITING, _T.RUNNING, _T.GENERATED, _T.FAILED}),
    _T.GENERATED: frozenset({_T.SCORED, _T.FAILED}),
    _T.SCORED: frozenset({_T.TRAINED, _T.FILTERED, _T.FAILED}),
    _T.TRAINED: frozenset(),
    _T.FILTERED: frozenset(),
    _T.FAILED: frozenset(),
}

SLEEP_MOVES: dict[SleepState, frozenset[SleepState]] = {
    _S.AWAKE: frozenset({_S.DRAINING}),
    _S.DRAINING: frozenset({_S.FALLING_ASLEEP}),
    _S.FALLING_ASLEEP: frozenset({_S.ASLEEP}),
    _S.ASLEEP: frozenset({_S.WAKING}),
    _S.WAKING: frozenset({_S.AWAKE}),
}

GROUP_MOVES: dict[GroupState, frozenset[GroupState]] = {
    _G.OPEN: frozenset({_G.JUDGING, _G.FAILED}),
    _G.JUDGING: frozenset({_G.READY, _G.FILTERED, _G.FAILED}),
    _G.READY: frozenset({_G.TRAINING}),
    _G.TRAINING: frozenset({_G.TRAINED, _G.FAILED}),
    _G.TRAINED: frozenset(),
    _G.FILTERED: frozenset(),
    _G.FAILED: frozenset(),
}

VERSION_MOVES: dict[VersionState, frozenset[VersionState]] = {
    _V.PUBLISHED: frozenset({_V.ACTIVE, _V.DRAINING}),
    _V.ACTIVE: frozenset({_V.DRAINING}),
    _V.DRAINING: frozenset({_V.RETIRED}),
    _V.RETIRED: frozenset(),
}

S = TypeVar("S", bound=StrEnum)


def check_move(moves: dict[S, frozenset[S]], old: S, new: S, subject: str) -> S:
    """Return `new` if the table leads there from `old`, else raise."""
    if new not in moves[old]:
        raise IllegalTransition(f"{subject} cannot go from `{old}` to `{new}`")
    return new
