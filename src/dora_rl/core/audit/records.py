"""What the audit remembers of outstanding work, and the one byte that it keeps afterwards.

Plain slots: half a million of these are alive at once. No rules live here.
"""

from enum import IntEnum

from dora_rl.core.audit.fleet import Host
from dora_rl.core.protocol.types import Fence, GroupId, MigrationId, Move, TrajectoryId, Version

# How far a trajectory is. Plain integers: they are compared for every event.
WAITING = 0
RUNNING = 1
PARKED = 2
FINISHED = 3  # whole, by its current fence; nobody has asked to score it yet
SCORING = 4  # accepted
SCORED = 5
OVER = 6  # failed, or lost; whoever is not over when its group ends, ends with it
PLACED = (RUNNING, PARKED)

# How far a group is.
OPEN = 0
JUDGING = 1
READY = 2
TRAINING = 3
REJECTED = 4  # its batch could not be trained on: its members are to fail


class End(IntEnum):
    """What became of a group; the byte that is kept for ever."""

    NONE = 0
    TRAINED = 1
    FILTERED = 2
    FAILED = 3


class Migration:
    """A migration under way; it ends with either of its ends, or when it is undone."""

    __slots__ = ("id", "moves", "new_fences", "source", "target", "transferring")

    def __init__(
        self, id: MigrationId, source: Host | None, target: Host | None, moves: tuple[Move, ...]
    ) -> None:
        self.id = id
        self.source = source
        self.target = target
        self.moves = moves
        self.new_fences = {move.trajectory: move.new_fence for move in moves}
        self.transferring = False


class Member:
    """One trajectory of an outstanding group, once it has been started or has failed."""

    __slots__ = (
        "failures",
        "fence",
        "host",
        "losses",
        "mixed",
        "moving",
        "oldest",
        "refused",
        "since",
        "stage",
        "tokens",
    )

    def __init__(self) -> None:
        self.stage = WAITING
        self.fence: Fence = 0
        self.host: Host | None = None
        self.moving: Migration | None = None
        self.since = 0.0  # when it was last placed, or its score asked for
        self.failures = 0  # attempts that failed or took too long
        self.refused = False  # it can never be generated
        self.losses = 0  # instances that died under it
        self.tokens = 0
        self.oldest: Version = 0  # version of its oldest segment
        self.mixed = False


class Group:
    __slots__ = ("asked_at", "id", "judgements", "left", "members", "stage", "version")

    def __init__(self, group: GroupId, version: Version, size: int) -> None:
        self.id = group
        self.version = version
        self.members: list[Member | None] = [None] * size
        self.left = size  # members that are not over
        self.stage = OPEN
        self.judgements = 0  # asked for
        self.asked_at = 0.0  # when, the last time

    def member(self, trajectory: TrajectoryId) -> Member:
        """The member of this id, known from now on."""
        position = trajectory % len(self.members)
        member = self.members[position]
        if member is None:
            member = self.members[position] = Member()
        return member


class Ends:
    """One byte per group id, in pages, so that neither dense nor sparse ids cost much."""

    SAVED = ("_pages",)
    _PAGE = 4096

    def __init__(self) -> None:
        self._pages: dict[int, bytearray] = {}

    def __getitem__(self, group: GroupId) -> End:
        page = self._pages.get(group // self._PAGE)
        return End(page[group % self._PAGE]) if page else End.NONE

    def __setitem__(self, group: GroupId, end: End) -> None:
        number, at = divmod(group, self._PAGE)
        self._pages.setdefault(number, bytearray(self._PAGE))[at] = end
