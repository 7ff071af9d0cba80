"""What a run writes down as it goes: one record for each step, and the sums behind it.

A listener of the driver. Idle time is counted from intervals that the instances report
themselves, never from a queue's length.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from dora_rl.core.orchestrator import Orchestrator
from dora_rl.core.protocol.commands import (
    AbortMigration,
    Command,
    Delete,
    Fail,
    Release,
    Reserve,
    Suspend,
    Train,
)
from dora_rl.core.protocol.events import (
    BatchFailed,
    BatchRejected,
    BatchTrained,
    Event,
    GroupJudged,
    InstanceJoined,
    WeightsPublished,
)
from dora_rl.core.protocol.reasons import count_reason
from dora_rl.core.protocol.types import InstanceId, MigrationId
from dora_rl.core.state.run import State
from dora_rl.observe.metrics import Reading, idle_share
from dora_rl.observe.placements import Placements
from dora_rl.runtime.control import messages as ms
from dora_rl.runtime.control.evaluator import EvalRecord
from dora_rl.runtime.control.listeners import Listener
from dora_rl.samples import SampleRef

_log = logging.getLogger(__name__)


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, tag="step", tag_field="kind"):
    """One train step, as `metrics.jsonl` has it. Times are seconds since the run began."""

    step: int
    """Counted from 1: step N publishes version N, and `checkpoints/step-N` is what it left."""
    time_s: float
    step_s: float
    """Since the step before was trained, on the run's clock: it stands still while no process
    carries the run."""
    train_s: float
    reward_mean: float
    reward_std: float
    reward_parts: dict[str, float]
    trajectories: int
    tokens: int
    """Sampled tokens of the trajectories trained on."""
    tokens_per_s: float
    length_mean: float
    length_max: int
    truncated: int
    staleness_mean: float
    staleness_max: int
    versions_live: int
    outstanding: int
    """Groups that are admitted and not terminal."""
    running: int
    """Trajectories that generate."""
    bubble_share: float
    """Idle slot time over all slot time, since the step before."""
    deadline_stall_s: float
    filtered: int
    failed: int
    metrics: dict[str, float]
    """The trainer's own."""
    weights_sent_bytes: int = 0
    """Of the versions that instances installed since the step before."""
    weights_sent_share: float | None = None
    """The same over the bytes of these versions, each sent whole; None if none was installed."""
    proposed_tokens: int = 0
    """By the speculation of engines, since the step before."""
    accepted_tokens: int = 0
    """Of those: each saved its trajectory a step of the engine."""


class Counts(NamedTuple):
    """What instances counted besides their slots: weights they were sent, and speculation."""

    sent_bytes: int = 0
    whole_bytes: int = 0  # that the same versions take whole
    proposed_tokens: int = 0
    accepted_tokens: int = 0

    def plus(self, used: ms.Used) -> "Counts":
        return Counts(
            self.sent_bytes + used.weights_sent_bytes,
            self.whole_bytes + used.weights_whole_bytes,
            self.proposed_tokens + used.proposed_tokens,
            self.accepted_tokens + used.accepted_tokens,
        )

    def since(self, before: "Counts") -> "Counts":
        return Counts(*(now - then for now, then in zip(self, before, strict=True)))


Watcher = Callable[[StepRecord], object]


class Recorder(Listener):
    """Adds up what the driver tells, and hands out a record for each step."""

    SAVED = (
        *("_incarnations", "_before", "_steps", "_trained_at", "_moves", "_migrated", "_live"),
        *("_slots", "_filtered", "failures"),
    )
    # Counted by processes, and ends with them.
    WIRED = (
        *("_orchestrator", "_watch", "_used", "_ended", "_taken", "_taken_s", "last"),
        *("_counts", "_counts_before"),
    )

    def __init__(self, orchestrator: Orchestrator, watch: Sequence[Watcher] = ()) -> None:
        self._orchestrator = orchestrator
        self._watch = list(watch)
        self._used: dict[InstanceId, ms.Used] = {}
        self._incarnations: dict[InstanceId, int] = {}
        self._ended = Reading()  # of instances that are gone
        self._before = Reading()
        self._steps = 0  # trained
        self._trained_at = 0.0
        self._moves: dict[MigrationId, int] = {}
        self._migrated = 0
        self._live = 0
        self._slots: dict[InstanceId, int] = {}
        self._taken: tuple[int, float] | None = None  # for which step, since when
        self._taken_s = 0.0  # slot time
        self._counts = Counts()  # of instances that are gone
        self._counts_before = Counts()
        self._filtered: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.last: StepRecord | None = None

    @property
    def _state(self) -> State:
        return self._orchestrator.state

    # What the driver tells

    def observed(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        self._watch_devices(now, event, commands)
        if isinstance(event, InstanceJoined):
            self._joined(event)
        elif isinstance(event, WeightsPublished):
            self._live += 1
        elif isinstance(event, GroupJudged) and event.filtered is not None:
            count_reason(self._filtered, event.filtered)
        elif isinstance(event, BatchTrained):
            self._mark(event.step, now)
        for command in commands:
            match command:
                case Delete():
                    self._live -= 1
                case Fail():
                    count_reason(self.failures, command.reason)
                case Reserve():
                    self._moves[command.migration] = len(command.moves)
                case Release():
                    self._migrated += self._moves.pop(command.migration, 0)
                case AbortMigration():
                    self._moves.pop(command.migration, None)

    def _watch_devices(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """Colocated training has the devices: that time is not rollout's, nor its idle time.

        Where work is suspended for it, the instances know; where none is there, they do not.
        """
        if isinstance(event, InstanceJoined):
            self._slots[event.instance] = event.slots
        elif isinstance(event, BatchTrained | BatchFailed | BatchRejected):
            step, since = self._taken or (None, now)
            if step == event.step:  # else a duplicate
                self._taken_s += (now - since) * sum(self._slots.values())
                self._taken = None
        train = next((command for command in commands if isinstance(command, Train)), None)
        if self._state.paradigm.colocated and train is not None:
            suspended = any(isinstance(c, Suspend) for c in commands)
            self._taken = None if suspended else (train.step, now)

    def _mark(self, step: int, now: float) -> None:
        """The next step is counted from this event: a resume hears of nothing else."""
        if step == self._steps:  # else a duplicate
            self._steps += 1
            self._trained_at = now
            self._before = self.reading()

    def resumed(
        self, records: Sequence[StepRecord | EvalRecord], state: State, placements: Placements
    ) -> None:
        """Slot time of earlier processes is not reported any more, nor what training took of it."""
        self._taken, self._taken_s = None, 0.0

    def restored(self) -> None:
        """It was loaded from a snapshot: what processes had counted by then ended with them."""
        self._before = self._before.of_history

    def _joined(self, event: InstanceJoined) -> None:
        """The counters of a new incarnation begin at 0."""
        if event.incarnation > self._incarnations.get(event.instance, -1):
            self._incarnations[event.instance] = event.incarnation
            before = self._used.pop(event.instance, None)
            if before is not None:
                self._ended = _add(self._ended, before)
                self._counts = self._counts.plus(before)

    def used(self, now: float, instance: InstanceId, used: ms.Used) -> None:
        before = self._used.get(instance)
        if before is None or _counters(used) > _counters(before):  # else a duplicate
            self._used[instance] = used

    def trained(self, now: float, report: ms.Trained, samples: Sequence[SampleRef]) -> None:
        record = self._record(now, report, samples)
        self.last = record
        for watch in self._watch:
            watch(record)

    # Sums

    def reading(self) -> Reading:
        """Counters of the whole run so far, for `observe.metrics.Collector`."""
        total = self._ended
        for used in self._used.values():
            total = _add(total, used)
        trainer = self._state.trainer
        return total._replace(
            slots_s=max(total.busy_s, total.slots_s - self._taken_s),
            stalls=trainer.stalls - (trainer.stalled_since is not None),
            stalled_s=trainer.stalled_s,
            migrated=self._migrated,
        )

    def _counts_since(self) -> Counts:
        """What was counted since the last call."""
        total = self._counts
        for used in self._used.values():
            total = total.plus(used)
        before, self._counts_before = self._counts_before, total
        return total.since(before)

    def _record(self, now: float, report: ms.Trained, samples: Sequence[SampleRef]) -> StepRecord:
        reading = self.reading()
        spent = reading.since(self._before)
        step_s = now - self._trained_at
        lengths = [sample.trajectory.num_sampled for sample in samples]
        rewards = [sample.reward for sample in samples]
        ages = [
            report.step - min((s.version for s in sample.trajectory.segments), default=report.step)
            for sample in samples
        ]
        mean = _mean(rewards)
        counts = self._counts_since()
        return StepRecord(
            step=report.step + 1,
            time_s=now,
            step_s=step_s,
            train_s=report.seconds,
            reward_mean=mean,
            reward_std=_mean([(reward - mean) ** 2 for reward in rewards]) ** 0.5,
            reward_parts=_parts(samples),
            trajectories=len(samples),
            tokens=sum(lengths),
            tokens_per_s=sum(lengths) / step_s if step_s > 0 else 0.0,
            length_mean=_mean(lengths),
            length_max=max(lengths, default=0),
            truncated=sum(sample.trajectory.truncated for sample in samples),
            staleness_mean=_mean(ages),
            staleness_max=max(ages, default=0),
            versions_live=self._live,
            outstanding=self._state.work.num_outstanding,
            running=sum(used.running for used in self._used.values()),
            bubble_share=idle_share(spent.busy_s, spent.slots_s),
            deadline_stall_s=spent.stalled_s,
            filtered=self._filtered.total(),
            failed=self.failures.total(),
            metrics=report.metrics,
            weights_sent_bytes=counts.sent_bytes,
            weights_sent_share=counts.sent_bytes / counts.whole_bytes
            if counts.whole_bytes
            else None,
            proposed_tokens=counts.proposed_tokens,
            accepted_tokens=counts.accepted_tokens,
        )


def _add(reading: Reading, used: ms.Used) -> Reading:
    return reading._replace(
        slots_s=reading.slots_s + used.slots_s,
        busy_s=reading.busy_s + used.busy_s,
        reprefilled_tokens=reading.reprefilled_tokens + used.reread_tokens,
    )


def _counters(used: ms.Used) -> tuple[float, ...]:
    """Each only grows, so that the later of two reports is the greater one."""
    work = used.slots_s, used.busy_s, used.tokens, used.steps, used.reread_tokens
    return *work, *Counts().plus(used)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _parts(samples: Sequence[SampleRef]) -> dict[str, float]:
    names = {name for sample in samples for name in sample.parts}
    return {
        name: _mean([s.parts[name] for s in samples if name in s.parts]) for name in sorted(names)
    }


def read_records(file: Path) -> list[StepRecord | EvalRecord]:
    """The records of a run, as far as they are whole: a kill may cut the last line.

    Any other line that is no record is left out with a warning.
    """
    records: list[StepRecord | EvalRecord] = []
    lines = file.read_bytes().split(b"\n") if file.is_file() else []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(_decode(line))
        except msgspec.MsgspecError as error:
            if number < len(lines):
                _log.warning("`%s` line %d is left out, no record: %s", file, number, error)
    if any(isinstance(record, StepRecord) and record.step == 0 for record in records):
        return [_counted_from_1(record) for record in records]
    return records


def _counted_from_1(record: StepRecord | EvalRecord) -> StepRecord | EvalRecord:
    """An older dora-rl counted steps from 0 in this file, and there alone."""
    if isinstance(record, EvalRecord):
        return record
    return msgspec.structs.replace(record, step=record.step + 1)


def records_up_to(file: Path, step: int) -> list[StepRecord | EvalRecord]:
    """What was written of the steps up to this one: the others will be taken again."""
    return [
        record
        for record in read_records(file)
        if (record.version if isinstance(record, EvalRecord) else record.step) <= step
    ]


_decode = msgspec.json.Decoder(StepRecord | EvalRecord).decode
