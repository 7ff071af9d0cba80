"""The audit's own picture of the trainer: which batch is out, and what has been trained.

It must not look into the orchestrator; what a group is comes from the audit's record of work.
"""

from collections import Counter

from dora_rl.core.audit.records import OVER, READY, REJECTED, TRAINING, End, Group, Member
from dora_rl.core.audit.report import Breaches, Promise
from dora_rl.core.audit.work import Work
from dora_rl.core.protocol import commands as c
from dora_rl.core.protocol import events as e
from dora_rl.core.protocol.paradigms import PARADIGMS
from dora_rl.core.protocol.settings import Settings
from dora_rl.core.protocol.types import BatchGroup, GroupId


def _ids(batch: c.Train) -> tuple[GroupId, ...]:
    return tuple(entry.group for entry in batch.groups)


def _in_batch(group: Group) -> list[Member]:
    """The members that go into the batch."""
    return [member for member in group.members if member is not None and member.stage != OVER]


class Batches:
    SAVED = ("_batch", "steps", "staleness", "trained_lengths")
    WIRED = ("max_staleness", "_pins_version", "_bounded", "_work", "_breaches")

    def __init__(self, settings: Settings, work: Work, breaches: Breaches) -> None:
        paradigm = PARADIGMS[settings.paradigm]
        self.max_staleness = paradigm.max_staleness(settings)
        self._pins_version = paradigm.pins_version
        self._bounded = paradigm.bounded
        self._work = work
        self._breaches = breaches
        self._batch: c.Train | None = None  # sent and not answered
        self.steps = 0  # taken; also the number of the next one
        self.staleness: Counter[int] = Counter()  # of trained trajectories
        self.trained_lengths: Counter[int] = Counter()

    def train(self, command: c.Train) -> None:
        sent = self._batch
        if sent is not None and sent.step == command.step:
            if sent.groups != command.groups:
                self._once(f"Train of step {command.step} was sent again with other groups")
            return
        if command.step != self.steps:
            self._once(f"Train of step {command.step} after {self.steps} steps")
        self._batch = command
        for entry in command.groups:
            group = self._accept(command.step, entry)
            if group is not None:
                group.stage = TRAINING
                self._check_staleness(command.step, group)
        if self._bounded:
            self._check_overtaken(command.step)

    def _accept(self, step: int, entry: BatchGroup) -> Group | None:
        """The group, if it is there to be trained."""
        group = self._work.groups.get(entry.group)
        what = f"Train of step {step}: group {entry.group}"
        if group is None:
            end = self._work.ends[entry.group]
            if end is End.TRAINED:
                self._once(f"{what} has been trained already")
            elif end is End.NONE:
                self._breaches.add(Promise.FENCING, f"{what} was never started")
            else:
                self._breaches.add(Promise.NOTHING_LOST, f"{what} is {end.name.lower()} already")
            return None
        if group.stage == TRAINING:
            self._once(f"{what} is in the batch twice")
            return None
        if group.stage != READY:
            self._breaches.add(Promise.FENCING, f"{what} was not judged")
        if self._pins_version and entry.version != group.version:
            self._breaches.add(
                Promise.ONE_VERSION,
                f"{what} is stamped {entry.version}, but was started on {group.version}",
            )
        self._work.check_members(group, entry.trajectories)
        return group if group.left else None

    def _check_staleness(self, step: int, group: Group) -> None:
        oldest = min((member.oldest for member in _in_batch(group)), default=group.version)
        oldest = min(oldest, group.version)
        if not 0 <= step - oldest <= self.max_staleness:
            self._breaches.add(
                Promise.STALENESS,
                f"Train of step {step}: group {group.id} is of version {oldest}, "
                f"K = {self.max_staleness}",
            )

    def _check_overtaken(self, step: int) -> None:
        """No group whose deadline has come may be left behind: it would age, or is lost."""
        work = self._work
        for version, groups in work.by_version.items():
            if version + self.max_staleness > step:
                continue
            for number in groups:
                if work.groups[number].stage != TRAINING:
                    self._breaches.add(
                        Promise.STALENESS,
                        f"Train of step {step} overtakes group {number} of version {version}",
                    )

    def trained(self, event: e.BatchTrained) -> None:
        batch = self._batch
        if batch is None or batch.step != event.step:
            return
        self._batch = None
        step = batch.step
        self.steps = step + 1
        work, staleness, lengths = self._work, self.staleness, self.trained_lengths
        for entry in batch.groups:
            group = work.groups.get(entry.group)
            if group is None or group.stage != TRAINING:
                continue
            for member in _in_batch(group):
                staleness[step - member.oldest] += 1
                lengths[member.tokens] += 1
                work.mixed_trained += member.mixed
            work.trained += group.left
            work.close(group, End.TRAINED)

    def failed(self, event: e.BatchFailed) -> None:
        batch = self._batch
        if batch is None or batch.step != event.step:
            return
        self._batch = None
        for entry in batch.groups:
            group = self._work.groups.get(entry.group)
            if group is not None and group.stage == TRAINING:
                group.stage = READY

    def rejected(self, event: e.BatchRejected) -> None:
        batch = self._batch
        if batch is None or (batch.step, _ids(batch)) != (event.step, event.groups):
            return
        self._batch = None
        for entry in batch.groups:
            group = self._work.groups.get(entry.group)
            if group is not None and group.stage == TRAINING:
                group.stage = REJECTED

    def _once(self, what: str) -> None:
        self._breaches.add(Promise.TRAINED_ONCE, what)
