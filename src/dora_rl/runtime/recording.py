"""What a run writes down as it goes: one record for each step, and the sums behind it.

A listener of the driver. Idle time is counted from intervals that the instances report
themselves, never from a queue's length.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from dora_rl.core.commands import Command, Delete, Fail, Release, Reserve, Suspend, Train
from dora_rl.core.events import (
    BatchFailed,
    BatchRejected,
    BatchTrained,
    Event,
    GroupJudged,
    InstanceJoined,
    WeightsPublished,
)
from dora_rl.core.orchestrator import Orchestrator
from dora_rl.core.types import InstanceId, MigrationId
from dora_rl.observe.metrics import Reading
from dora_rl.runtime import messages as ms
from dora_rl.runtime.evaluation import EvalRecord
from dora_rl.runtime.listening import Listener
from dora_rl.samples import Sample


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, tag="step", tag_field="kind"):
    """One train step, as `metrics.jsonl` has it. Times are seconds since the run began."""

    step: int
    time_s: float
    step_s: float
    """Since the step before was trained."""
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


Watcher = Callable[[StepRecord], object]


class Recorder(Listener):
    """Adds up what the driver tells, and hands out a record for each step."""

    def __init__(self, orchestrator: Orchestrator, watch: Sequence[Watcher] = ()) -> None:
        self._state = orchestrator.state
        self._watch = list(watch)
        self._used: dict[InstanceId, ms.Used] = {}
        self._incarnations: dict[InstanceId, int] = {}
        self._ended = Reading()  # of instances that are gone
        self._before = Reading()
        self._trained_at = 0.0
        self._moves: dict[MigrationId, int] = {}
        self._migrated = 0
        self._live = 0
        self._slots: dict[InstanceId, int] = {}
        self._taken: tuple[int, float] | None = None  # for which step, since when
        self._taken_s = 0.0  # slot time
        self._filtered: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.last: StepRecord | None = None
        self.rejections: list[ms.Rejected] = []
        self.refusals: list[str] = []

    # What the driver tells

    def observed(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        self._watch_devices(now, event, commands)
        if isinstance(event, InstanceJoined):
            self._joined(event)
        elif isinstance(event, WeightsPublished):
            self._live += 1
        elif isinstance(event, GroupJudged) and event.filtered is not None:
            self._filtered[event.filtered] += 1
        for command in commands:
            match command:
                case Delete():
                    self._live -= 1
                case Fail():
                    self.failures[command.reason] += 1
                case Reserve():
                    self._moves[command.migration] = len(command.moves)
                case Release():
                    self._migrated += self._moves.pop(command.migration, 0)

    def _watch_devices(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """Colocated training has the devices: that time is not rollout's, nor its idle time.

        Where work is suspended for it, the instances know; where none is there, they do not.
        """
        if isinstance(event, InstanceJoined):
            self._slots[event.instance] = event.slots
        elif isinstance(event, BatchTrained | BatchFailed | BatchRejected):
            step, since = self._taken or (None, now)
            if step == event.step:  # else it is said again
                self._taken_s += (now - since) * sum(self._slots.values())
                self._taken = None
        train = next((command for command in commands if isinstance(command, Train)), None)
        if self._state.paradigm.colocated and train is not None:
            suspended = any(isinstance(c, Suspend) for c in commands)
            self._taken = None if suspended else (train.step, now)

    def refused(self, now: float, event: Event, reason: str) -> None:
        self.refusals.append(reason)

    def _joined(self, event: InstanceJoined) -> None:
        """The counters of a new incarnation begin at 0."""
        if event.incarnation > self._incarnations.get(event.instance, -1):
            self._incarnations[event.instance] = event.incarnation
            before = self._used.pop(event.instance, None)
            if before is not None:
                self._ended = _add(self._ended, before)

    def used(self, now: float, instance: InstanceId, used: ms.Used) -> None:
        before = self._used.get(instance)
        if before is None or _counters(used) > _counters(before):  # else it is said again
            self._used[instance] = used

    def rejected(self, now: float, report: ms.Rejected) -> None:
        self.rejections.append(report)

    def trained(self, now: float, report: ms.Trained, samples: Sequence[Sample]) -> None:
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

    def _record(self, now: float, report: ms.Trained, samples: Sequence[Sample]) -> StepRecord:
        reading = self.reading()
        spent = reading.since(self._before)
        self._before = reading
        step_s, self._trained_at = now - self._trained_at, now
        lengths = [sample.trajectory.num_sampled for sample in samples]
        rewards = [sample.reward for sample in samples]
        ages = [
            report.step - min((s.version for s in sample.trajectory.segments), default=report.step)
            for sample in samples
        ]
        mean = _mean(rewards)
        return StepRecord(
            step=report.step,
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
            outstanding=self._state.ledger.num_outstanding,
            running=sum(used.running for used in self._used.values()),
            bubble_share=_rest(spent.busy_s, spent.slots_s),
            deadline_stall_s=spent.stalled_s,
            filtered=self._filtered.total(),
            failed=self.failures.total(),
            metrics=report.metrics,
        )


def _add(reading: Reading, used: ms.Used) -> Reading:
    return reading._replace(
        slots_s=reading.slots_s + used.slots_s,
        busy_s=reading.busy_s + used.busy_s,
        reprefilled_tokens=reading.reprefilled_tokens + used.reread_tokens,
    )


def _counters(used: ms.Used) -> tuple[float, ...]:
    """Each only grows, so that the later of two reports is the greater one."""
    return used.slots_s, used.busy_s, used.tokens, used.steps, used.reread_tokens


def _rest(part: float, whole: float) -> float:
    """The share that is left; reports lag behind by a heartbeat, so it may miss by a little."""
    return min(1.0, max(0.0, 1.0 - part / whole)) if whole > 0.0 else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _parts(samples: Sequence[Sample]) -> dict[str, float]:
    names = {name for sample in samples for name in sample.parts}
    return {
        name: _mean([s.parts[name] for s in samples if name in s.parts]) for name in sorted(names)
    }


def read_records(file: Path) -> list[StepRecord | EvalRecord]:
    """The records of a run, as far as they are whole."""
    records: list[StepRecord | EvalRecord] = []
    if file.is_file():
        for line in file.read_bytes().splitlines():
            with suppress(msgspec.MsgspecError):
                records.append(_decode(line))
    return records


def records_before(file: Path, step: int) -> bytes:
    """What was written of the steps before this one: the others will be taken again."""
    kept = [
        record
        for record in read_records(file)
        if (record.version <= step if isinstance(record, EvalRecord) else record.step < step)
    ]
    return b"".join(msgspec.json.encode(record) + b"\n" for record in kept)


_decode = msgspec.json.Decoder(StepRecord | EvalRecord).decode
