"""The audit's own record of work: groups and trajectories from their first Start to their end.

A group counts as issued, with all its members, at the first Start of any of them, or at a
Fail that comes before every Start: admission itself leaves no trace in the stream. A member
has failed if a Fail said so, and in no other way. A group is over when it is trained or
filtered, or when every member has failed. Facts are kept while a group is outstanding;
afterwards one byte says what became of it.

It shares no code with the core's record of work and must not look into the orchestrator.
"""

from collections import Counter
from collections.abc import Sequence

from dora_rl.core.audit.causes import Causes
from dora_rl.core.audit.fleet import READY as SERVED
from dora_rl.core.audit.fleet import Fleet, Host
from dora_rl.core.audit.records import (
    FINISHED,
    JUDGING,
    OVER,
    PARKED,
    PLACED,
    READY,
    RUNNING,
    SCORED,
    SCORING,
    WAITING,
    End,
    Ends,
    Group,
    Member,
)
from dora_rl.core.audit.report import Breaches, Promise
from dora_rl.core.protocol import commands as c
from dora_rl.core.protocol import events as e
from dora_rl.core.protocol.paradigms import PARADIGMS
from dora_rl.core.protocol.reasons import count_reason
from dora_rl.core.protocol.settings import Settings
from dora_rl.core.protocol.types import Fence, GroupId, Segment, TrajectoryId, Version


class Work:
    SAVED = (
        *("groups", "by_version", "ends", "issued", "trained", "lost", "filtered", "failed"),
        *("finished", "mixed", "mixed_trained", "never_whole", "finished_lengths"),
    )
    WIRED = ("_causes", "_size", "pins_version", "_fleet", "_breaches")

    def __init__(self, settings: Settings, fleet: Fleet, breaches: Breaches) -> None:
        self._causes = Causes(settings, breaches)
        self._size = settings.group_size
        self.pins_version = PARADIGMS[settings.paradigm].pins_version
        self._fleet = fleet
        self._breaches = breaches
        self.groups: dict[GroupId, Group] = {}
        self.by_version: dict[Version, set[GroupId]] = {}
        self.ends = Ends()
        self.issued = self.trained = self.lost = 0
        self.filtered: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.finished = self.mixed = self.mixed_trained = 0
        self.never_whole = 0
        self.finished_lengths: Counter[int] = Counter()

    def find(self, trajectory: TrajectoryId) -> Member | None:
        group = self.groups.get(trajectory // self._size)
        return None if group is None else group.members[trajectory % self._size]

    def version_of(self, trajectory: TrajectoryId) -> Version:
        return self.groups[trajectory // self._size].version

    def _group_of(self, trajectory: TrajectoryId, version: Version) -> Group | None:
        """Its group, opened on the version if it is new; None if it is over."""
        number = trajectory // self._size
        group = self.groups.get(number)
        if group is None and self.ends[number] is End.NONE:
            group = self.groups[number] = Group(number, version, self._size)
            self.by_version.setdefault(version, set()).add(number)
            self.issued += self._size
        return group

    # Generation

    def start(self, command: c.Start) -> None:
        trajectory, version = command.trajectory, command.version
        group = self._group_of(trajectory, version)
        member = None if group is None else group.member(trajectory)
        if group is None or member is None or member.stage == OVER:
            self._add(Promise.FENCING, f"Start of trajectory {trajectory}, which is over")
            return
        fleet = self._fleet
        host = fleet.hosts.get(command.instance)
        if member.fence == command.fence and member.host is host:
            return  # a repeat
        if version not in fleet.digests or version in fleet.deleted:
            fleet.check_exists(version, f"Start of trajectory {trajectory}")
        if member.stage in PLACED:
            self._add(Promise.PLACEMENT, f"Start of trajectory {trajectory}, which runs elsewhere")
            self._displace(trajectory, member)
        elif member.stage > FINISHED:
            self._add(Promise.FENCING, f"Start of trajectory {trajectory}, which is whole")
        if command.fence <= member.fence:
            self._add(Promise.FENCING, f"Start of trajectory {trajectory} with an old fence")
        if self.pins_version and version != group.version:
            self._add(
                Promise.ONE_VERSION,
                f"Start of trajectory {trajectory} on version {version}: "
                f"its group belongs to {group.version}",
            )
        if host is None or not host.alive:
            self._add(
                Promise.PLACEMENT,
                f"Start of trajectory {trajectory} on instance {command.instance}: not alive",
            )
        elif host.holds.get(version) != SERVED:
            self._add(
                Promise.VERIFIED,
                f"Start of trajectory {trajectory} on instance {command.instance}: "
                f"no verified install of version {version}",
            )
        member.stage = RUNNING
        member.fence = command.fence
        member.since = self._breaches.now
        member.host = host
        if host is not None:
            host.work.add(trajectory)

    def _displace(self, trajectory: TrajectoryId, member: Member) -> None:
        """It runs nowhere now; its fence stays, so that an older one is told apart."""
        if member.host is not None:
            member.host.work.discard(trajectory)
        member.host = None
        member.moving = None
        member.stage = WAITING

    def arrive(self, trajectory: TrajectoryId, member: Member) -> None:
        """It runs at the target of its migration now, under its new fence."""
        moving = member.moving
        assert moving is not None
        self._displace(trajectory, member)
        member.host = moving.target
        member.fence = moving.new_fences[trajectory]
        member.stage = RUNNING
        member.since = self._breaches.now
        if moving.target is not None:
            moving.target.work.add(trajectory)

    def lose(self, host: Host, *, blame: bool = True) -> None:
        """An instance is gone, with all that it held."""
        for trajectory in list(host.work):
            member = self.find(trajectory)
            if member is not None:
                member.losses += blame
                self._displace(trajectory, member)
        host.work.clear()

    def cancel(self, command: c.Cancel) -> None:
        member = self.find(command.trajectory)
        if member is not None and member.fence == command.fence and member.stage in PLACED:
            member.failures += self._causes.stuck(command.trajectory, member)
            self._displace(command.trajectory, member)

    def failed_event(self, event: e.TrajectoryFailed) -> None:
        member = self.find(event.trajectory)
        if member is None or member.fence != event.fence:
            return
        if member.stage in PLACED:
            member.failures += 1
            self._displace(event.trajectory, member)
        elif member.stage == SCORING:
            member.failures += 1
            member.since = self._breaches.now  # answered: it does not time out as well

    def refused(self, event: e.TrajectoryRefused) -> None:
        member = self.find(event.trajectory)
        if member is not None and member.fence == event.fence and member.stage in PLACED:
            member.refused = True
            self._displace(event.trajectory, member)

    def parked(self, event: e.TrajectoriesParked) -> None:
        host = self._fleet.known(event.instance, event.incarnation)
        for trajectory, fence in event.parked:
            member = self.find(trajectory)
            if member is None or member.fence != fence or member.stage != RUNNING:
                continue
            if member.host is host:
                member.stage = PARKED
                member.moving = None

    def unpark(self, command: c.Unpark) -> None:
        for trajectory, fence in command.placements:
            member = self.find(trajectory)
            if member is None or member.fence != fence or member.stage != PARKED:
                continue
            member.stage = RUNNING
            member.since = self._breaches.now
            version = self.version_of(trajectory)
            if self.pins_version and (
                member.host is None or not self._fleet.serves(member.host, version)
            ):
                self._add(
                    Promise.VERIFIED,
                    f"Unpark of trajectory {trajectory} on instance {command.instance}: "
                    f"no verified install of version {version}",
                )

    def running_on(self, host: Host, version: Version) -> TrajectoryId | None:
        """A trajectory that needs the version in this host's memory."""
        for trajectory in host.work:
            member = self.find(trajectory)
            if (
                member is not None
                and member.stage == RUNNING
                and self.version_of(trajectory) == version
            ):
                return trajectory
        return None

    # Completion

    def finish(self, event: e.TrajectoryFinished, commands: Sequence[c.Command]) -> None:
        trajectory = event.trajectory
        group = self.groups.get(trajectory // self._size)
        if group is None:
            return
        member = group.members[trajectory % self._size]
        if member is None or member.stage not in PLACED:
            return
        if member.fence != event.fence and not _on_its_way(trajectory, member, event.fence):
            return
        segments = event.segments
        if (
            len(segments) == 1
            and segments[0][0] == group.version
            and segments[0][2] == event.tokens
            and segments[0][1] == self._fleet.digests.get(group.version)
        ):
            member.oldest = group.version
            member.mixed = False
        else:
            wrong = self._examine(group, member, event)
            if wrong is not None:
                if not any(type(x) is c.Score and x.trajectory == trajectory for x in commands):
                    return  # the core does not take it either
                self._add(*wrong)
        if member.host is not None:
            member.host.work.discard(trajectory)
            member.host = None
        member.moving = None
        member.fence = event.fence
        member.stage = FINISHED
        member.tokens = event.tokens

    def _examine(
        self, group: Group, member: Member, event: e.TrajectoryFinished
    ) -> tuple[Promise, str] | None:
        """What is wrong with the stamps of a trajectory."""
        segments: tuple[Segment, ...] = event.segments
        versions = {segment.version for segment in segments}
        member.oldest = min(versions, default=group.version)
        member.mixed = len(versions) > 1
        what = f"trajectory {event.trajectory}"
        if not segments or sum(segment.tokens for segment in segments) != event.tokens:
            return Promise.STAMPS, f"{what} has {event.tokens} tokens, its segments say otherwise"
        for version, digest, _ in segments:
            if self._fleet.digests.get(version) != digest:
                what = f"{what} was sampled by `{digest}`, not by published version {version}"
                return Promise.STAMPS, what
        if versions != {group.version} and (self.pins_version or member.mixed):
            names = ", ".join(map(str, sorted(versions)))
            what = f"{what} was sampled by versions {names}; its group belongs to {group.version}"
            return Promise.ONE_VERSION, what
        return None

    def score(self, command: c.Score) -> None:
        member = self.find(command.trajectory)
        if member is not None and member.stage == SCORING and command.fence >= member.fence:
            member.failures += self._causes.unanswered(member.since)
            member.fence = command.fence
            member.since = self._breaches.now
            return
        if member is None or member.stage != FINISHED or member.fence != command.fence:
            self._add(
                Promise.FENCING,
                f"Score of trajectory {command.trajectory}: not whole under fence {command.fence}",
            )
            return
        member.stage = SCORING
        member.since = self._breaches.now
        self.finished += 1
        self.finished_lengths[member.tokens] += 1
        self.mixed += member.mixed

    def scored(self, event: e.TrajectoryScored) -> None:
        member = self.find(event.trajectory)
        if member is not None and member.fence == event.fence and member.stage == SCORING:
            member.stage = SCORED

    def judge(self, command: c.Judge) -> None:
        group = self.groups.get(command.group)
        if group is None or group.stage > JUDGING:
            self._add(Promise.FENCING, f"Judge of group {command.group}: not open")
            return
        group.stage = JUDGING
        group.judgements += 1
        group.asked_at = self._breaches.now
        self.check_members(group, command.trajectories)

    def check_members(self, group: Group, listed: tuple[TrajectoryId, ...]) -> None:
        """Who is listed to continue has been scored; who is not has failed, or is lost by this."""
        first = group.id * self._size
        scored = [t for t, m in enumerate(group.members, first) if m and m.stage == SCORED]
        if len(scored) == group.left and listed == tuple(scored):
            return
        strangers = [t for t in listed if not first <= t < first + self._size]
        if strangers or len(set(listed)) != len(listed):
            self._add(Promise.TRAINED_ONCE, f"group {group.id} lists {list(listed)}")
        for trajectory in range(first, first + self._size):
            member = group.member(trajectory)
            if trajectory not in listed:
                if member.stage != OVER:
                    self._lost(f"trajectory {trajectory} is missing and had not failed")
                    self.lost += 1
                    self._end(trajectory, group, member)
            elif member.stage == OVER:
                self._lost(f"trajectory {trajectory} continues, though it is over")
            elif member.stage != SCORED:
                self._add(Promise.FENCING, f"trajectory {trajectory} continues without a score")

    def judged(self, event: e.GroupJudged) -> None:
        group = self.groups.get(event.group)
        if group is None or group.stage != JUDGING:
            return
        if event.filtered is None:
            group.stage = READY
        else:
            count_reason(self.filtered, event.filtered, group.left)
            self.close(group, End.FILTERED)

    # Ends

    def fail(self, command: c.Fail) -> None:
        trajectory = command.trajectory
        group = self._group_of(trajectory, self._fleet.newest or 0)
        member = None if group is None else group.member(trajectory)
        if group is None or member is None or member.stage == OVER:
            self._lost(f"Fail of trajectory {trajectory}, which is over")
            return
        if not self._causes.of_failure(group, member):
            self._lost(f"trajectory {trajectory} failed without a cause: `{command.reason}`")
        count_reason(self.failed, command.reason)
        self.never_whole += member.stage < FINISHED
        self._end(trajectory, group, member)

    def _end(self, trajectory: TrajectoryId, group: Group, member: Member) -> None:
        """A member is over before its group; with the last of them the group is."""
        self._displace(trajectory, member)
        member.stage = OVER
        group.left -= 1
        if not group.left:
            self.close(group, End.FAILED)

    def close(self, group: Group, end: End) -> None:
        self.ends[group.id] = end
        del self.groups[group.id]
        left = self.by_version[group.version]
        left.discard(group.id)
        if not left:
            del self.by_version[group.version]

    def _lost(self, what: str) -> None:
        self._add(Promise.NOTHING_LOST, what)

    def _add(self, promise: Promise, what: str) -> None:
        self._breaches.add(promise, what)


def _on_its_way(trajectory: TrajectoryId, member: Member, fence: Fence) -> bool:
    """Whole at the target before the end of the transfer was heard of: that counts too."""
    moving = member.moving
    return moving is not None and moving.transferring and moving.new_fences.get(trajectory) == fence
