"""The audit's own ledger: groups and trajectories from their first Start to their end.

A group counts as issued, with all its members, when the first of them is started: pinning
itself leaves no trace in the stream. Facts are kept while a group is outstanding; afterwards
one byte says what became of it. A trajectory's final failure leaves no trace either, so the
audit counts every failure that *may* have been charged to it: a member that is missing from
its group is lost, unless those exceed the limits that the settings allow.

It shares no code with the core's ledger and must not look into the orchestrator.
"""

from collections import Counter

from dora_rl.core import commands as c
from dora_rl.core import events as e
from dora_rl.core.audit.fleet import Fleet, Host
from dora_rl.core.audit.records import (
    FINISHED,
    PARKED,
    PLACED,
    RUNNING,
    SCORED,
    SCORING,
    WAITING,
    End,
    Ends,
    Group,
    GroupStage,
    Member,
)
from dora_rl.core.audit.report import Breaches, Promise
from dora_rl.core.paradigms import PARADIGMS
from dora_rl.core.settings import OnFailedMember, Settings
from dora_rl.core.types import Fence, GroupId, Segment, TrajectoryId, Version


class Work:
    def __init__(self, settings: Settings, fleet: Fleet, breaches: Breaches) -> None:
        self._settings = settings
        self._size = settings.group_size
        self.pins_version = PARADIGMS[settings.paradigm].pins_version
        self._fleet = fleet
        self._breaches = breaches
        self.groups: dict[GroupId, Group] = {}
        self.by_version: dict[Version, set[GroupId]] = {}
        self.ends = Ends()
        self.issued = self.trained = self.filtered = self.failed = self.lost = 0
        self.finished = self.mixed = self.mixed_trained = 0
        self.finished_lengths: Counter[int] = Counter()

    def find(self, trajectory: TrajectoryId) -> Member | None:
        group = self.groups.get(trajectory // self._size)
        return None if group is None else group.members[trajectory % self._size]

    def version_of(self, trajectory: TrajectoryId) -> Version:
        return self.groups[trajectory // self._size].version

    # Generation

    def start(self, command: c.Start) -> None:
        trajectory, version = command.trajectory, command.version
        member = self._issue(trajectory, version)
        if member is None:
            self._add(Promise.FENCING, f"Start of trajectory {trajectory}: its group is over")
            return
        host = self._fleet.hosts.get(command.instance)
        if member.fence == command.fence and member.host is host:
            return  # a repeat
        if version not in self._fleet.digests or version in self._fleet.deleted:
            self._fleet.check_exists(version, f"Start of trajectory {trajectory}")
        if member.stage in PLACED:
            self._add(Promise.PLACEMENT, f"Start of trajectory {trajectory}, which runs elsewhere")
            self.displace(trajectory, member)
        elif member.stage > FINISHED:
            self._add(Promise.FENCING, f"Start of trajectory {trajectory}, which is whole")
        if command.fence <= member.fence:
            self._add(Promise.FENCING, f"Start of trajectory {trajectory} with an old fence")
        if self.pins_version and version != self.version_of(trajectory):
            self._add(
                Promise.ONE_VERSION,
                f"Start of trajectory {trajectory} on version {version}: "
                f"its group belongs to {self.version_of(trajectory)}",
            )
        if host is None or not host.alive:
            self._add(
                Promise.PLACEMENT,
                f"Start of trajectory {trajectory} on instance {command.instance}: not alive",
            )
        elif not self._fleet.serves(host, version):
            self._add(
                Promise.VERIFIED,
                f"Start of trajectory {trajectory} on instance {command.instance}: "
                f"no verified install of version {version}",
            )
        member.stage = RUNNING
        member.fence = command.fence
        member.host = host
        if host is not None:
            host.work.add(trajectory)

    def _issue(self, trajectory: TrajectoryId, version: Version) -> Member | None:
        number, position = divmod(trajectory, self._size)
        group = self.groups.get(number)
        if group is None:
            if self.ends[number] is not End.NONE:
                return None
            group = self.groups[number] = Group(number, version, self._size)
            self.by_version.setdefault(version, set()).add(number)
            self.issued += self._size
        member = group.members[position]
        if member is None:
            member = group.members[position] = Member()
        return member

    def displace(self, trajectory: TrajectoryId, member: Member) -> None:
        """It runs nowhere now; its fence stays, so that an older one is told apart."""
        if member.host is not None:
            member.host.work.discard(trajectory)
        member.host = None
        member.moving = None
        member.stage = WAITING

    def _finished_on_arrival(self, trajectory: TrajectoryId, member: Member, fence: Fence) -> bool:
        """Whole at the target before the end of the transfer was heard of: that counts too."""
        moving = member.moving
        if moving is None or not moving.transferring:
            return False
        if moving.new_fences.get(trajectory) != fence:
            return False
        self.arrive(trajectory, member)
        return True

    def arrive(self, trajectory: TrajectoryId, member: Member) -> None:
        """It runs at the target of its migration now, under its new fence."""
        moving = member.moving
        assert moving is not None
        if member.host is not None:
            member.host.work.discard(trajectory)
        member.host = moving.target
        member.fence = moving.new_fences[trajectory]
        member.stage = RUNNING
        member.moving = None
        if moving.target is not None:
            moving.target.work.add(trajectory)

    def lose(self, host: Host) -> None:
        """An instance is gone, with all that it held."""
        for trajectory in list(host.work):
            member = self.find(trajectory)
            if member is not None:
                member.losses += 1
                self.displace(trajectory, member)
        host.work.clear()

    def cancel(self, command: c.Cancel) -> None:
        member = self.find(command.trajectory)
        if member is not None and member.fence == command.fence and member.stage in PLACED:
            member.failures += 1
            self.displace(command.trajectory, member)

    def failed_event(self, event: e.TrajectoryFailed) -> None:
        member = self.find(event.trajectory)
        if member is None or member.fence != event.fence:
            return
        if member.stage in PLACED:
            member.failures += 1
            self.displace(event.trajectory, member)
        elif member.stage == SCORING:
            member.failures += 1

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

    def finish(self, event: e.TrajectoryFinished) -> None:
        trajectory = event.trajectory
        group = self.groups.get(trajectory // self._size)
        if group is None:
            return
        member = group.members[trajectory % self._size]
        if member is None or (
            member.fence != event.fence
            and not self._finished_on_arrival(trajectory, member, event.fence)
        ):
            return
        if member.stage not in PLACED:
            return
        if member.host is not None:
            member.host.work.discard(trajectory)
            member.host = None
        member.moving = None
        member.stage = FINISHED
        member.tokens = event.tokens
        segments = event.segments
        if (
            len(segments) == 1
            and segments[0][0] == group.version
            and segments[0][2] == event.tokens
            and segments[0][1] == self._fleet.digests.get(group.version)
        ):
            member.oldest = group.version
            member.mixed = False
            member.bad = None
        else:
            self._examine(trajectory, group.version, event.tokens, member, segments)

    def _examine(
        self,
        trajectory: TrajectoryId,
        version: Version,
        tokens: int,
        member: Member,
        segments: tuple[Segment, ...],
    ) -> None:
        versions = {segment.version for segment in segments}
        member.oldest = min(versions, default=version)
        member.mixed = len(versions) > 1
        member.bad = None
        for segment in segments:
            if self._fleet.digests.get(segment.version) != segment.digest:
                what = f"sampled by `{segment.digest}`, not by published version {segment.version}"
                member.bad = (Promise.STAMPS, f"trajectory {trajectory} was {what}")
        if not segments or sum(segment.tokens for segment in segments) != tokens:
            what = f"has {tokens} tokens, its segments say otherwise"
            member.bad = (Promise.STAMPS, f"trajectory {trajectory} {what}")
        if member.bad is None and versions != {version} and (self.pins_version or member.mixed):
            names = ", ".join(map(str, sorted(versions)))
            what = f"was sampled by versions {names}; its group belongs to {version}"
            member.bad = (Promise.ONE_VERSION, f"trajectory {trajectory} {what}")
        if member.bad is not None:  # where it is not accepted, that may be charged to it
            member.failures += 1
            member.losses += 1

    def score(self, command: c.Score) -> None:
        member = self.find(command.trajectory)
        if member is not None and member.stage == SCORING and command.fence >= member.fence:
            member.failures += 1  # asked again: the first try failed, or was not answered
            member.fence = command.fence
            member.asked_at = self._breaches.now
            return
        if member is None or member.stage != FINISHED or member.fence != command.fence:
            self._add(
                Promise.FENCING,
                f"Score of trajectory {command.trajectory}: not whole under fence {command.fence}",
            )
            return
        member.stage = SCORING
        member.asked_at = self._breaches.now
        self.finished += 1
        self.finished_lengths[member.tokens] += 1
        self.mixed += member.mixed
        if member.bad is not None:
            self._add(*member.bad)

    def scored(self, event: e.TrajectoryScored) -> None:
        member = self.find(event.trajectory)
        if member is None or member.fence != event.fence or member.stage != SCORING:
            return
        member.stage = SCORED
        member.failures += self._too_late(member.asked_at)

    def _too_late(self, asked_at: float) -> bool:
        """May the core have given up before this answer came? That leaves no trace."""
        return self._breaches.now - asked_at >= self._settings.score_timeout_s

    def judge(self, command: c.Judge) -> None:
        group = self.groups.get(command.group)
        if group is None or group.stage > GroupStage.JUDGING:
            self._add(Promise.FENCING, f"Judge of group {command.group}: not open")
            return
        group.judgements += 1
        group.asked_at = self._breaches.now
        if group.stage is GroupStage.JUDGING and command.trajectories == group.true_members:
            return
        group.stage = GroupStage.JUDGING
        group.true_members = command.trajectories
        self._check_members(group, command.trajectories)

    def _check_members(self, group: Group, listed: tuple[TrajectoryId, ...]) -> None:
        """Who is listed has been scored; who is not has failed as often as it takes."""
        first = group.id * self._size
        strangers = [t for t in listed if not first <= t < first + self._size]
        if strangers or len(set(listed)) != len(listed):
            self._add(Promise.TRAINED_ONCE, f"group {group.id} lists {list(listed)}")
        for position, member in enumerate(group.members):
            trajectory = first + position
            if trajectory in listed:
                if member is None or member.stage != SCORED:
                    self._add(
                        Promise.FENCING, f"trajectory {trajectory} goes on without being scored"
                    )
            elif not self.may_have_failed(member):
                self._add(
                    Promise.NOTHING_LOST,
                    f"trajectory {trajectory} is missing from its group and had not failed",
                )

    def judged(self, event: e.GroupJudged) -> None:
        group = self.groups.get(event.group)
        if group is None or group.stage is not GroupStage.JUDGING:
            return
        if event.filtered is None:
            group.stage = GroupStage.READY
            spent = group.judgements > self._settings.max_retries
            group.doubtful = spent and self._too_late(group.asked_at)
        else:
            self.close(group, End.FILTERED)

    # Ends

    def may_have_failed(self, member: Member | None) -> bool:
        if member is None:
            return False
        unanswered = member.stage == SCORING
        return (
            member.failures + unanswered > self._settings.max_retries
            or member.losses > self._settings.max_losses
        )

    def may_be_over(self, group: Group) -> bool:
        """Could the group have failed without a command that says so?"""
        if group.stage is GroupStage.JUDGING:
            return group.judgements > self._settings.max_retries
        if group.stage is not GroupStage.OPEN:
            return group.doubtful and group.stage is GroupStage.READY
        failed = [self.may_have_failed(member) for member in group.members]
        if self._settings.on_failed_member is OnFailedMember.FAIL_GROUP:
            return any(failed)
        return all(failed)

    def close(self, group: Group, end: End) -> None:
        listed = len(group.true_members)
        missing = self._size - listed
        if end is End.TRAINED:
            self.trained += listed
        elif end is End.FILTERED:
            self.filtered += listed
        else:
            listed, missing = 0, self._size
        if missing and end is not End.FAILED:
            first = group.id * self._size
            gone = [m for i, m in enumerate(group.members) if first + i not in group.true_members]
            missing = sum(map(self.may_have_failed, gone))
            self.lost += len(gone) - missing
        self.failed += missing
        self.ends[group.id] = end
        del self.groups[group.id]
        left = self.by_version[group.version]
        left.discard(group.id)
        if not left:
            del self.by_version[group.version]

    def settle(self, version: Version) -> list[Group]:
        """Close the groups of a version that may have failed without a word; return the others.

        Only for a moment at which the core itself must have closed them, or is in breach.
        """
        left = []
        for number in list(self.by_version.get(version, ())):
            group = self.groups[number]
            if self.may_be_over(group):
                self.close(group, End.FAILED)
            else:
                left.append(group)
        return left

    def _add(self, promise: Promise, what: str) -> None:
        self._breaches.add(promise, what)
