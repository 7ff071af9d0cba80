"""Numbers of one run from its stream of events and commands, in the steady-state window.

The window opens when version `warmup` is published and closes with the last publication, so it
holds whole steps: step s lies between the publications of s and s + 1. What no event carries
(slot time, bytes moved, stalls) comes in through `probe`, a reading of counters that only grow;
a figure of the window is the difference of two readings.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from dora_rl.core.audit import AuditReport, Spread
from dora_rl.core.protocol.commands import Command, Delete, Fail, Score, Train
from dora_rl.core.protocol.events import (
    BatchFailed,
    BatchRejected,
    BatchTrained,
    Event,
    GroupJudged,
    TrajectoryFinished,
    WeightsPublished,
)
from dora_rl.core.protocol.types import BatchGroup

# Below this gain over synchronous training, asynchrony is not worth its staleness.
WORTHWHILE = 1.05


class Reading(NamedTuple):
    """Counters of a run at one moment; each only grows."""

    slots_s: float = 0.0  # slot time in which rollout had its devices
    busy_s: float = 0.0  # of it, with a trajectory in the slot
    stalls: int = 0  # batches that waited for a group at its deadline
    stalled_s: float = 0.0
    migrated: int = 0  # trajectories
    kv_bytes_moved: float = 0.0
    reprefilled_tokens: int = 0

    def since(self, start: "Reading") -> "Reading":
        """What was added after `start`."""
        return Reading._make(end - begin for end, begin in zip(self, start, strict=True))

    @property
    def of_history(self) -> "Reading":
        """What the stream tells of it: all else was counted by processes, and ends with them."""
        return Reading(stalls=self.stalls, stalled_s=self.stalled_s, migrated=self.migrated)


class Phases(NamedTuple):
    """Seconds spent in each phase, summed since the start. Phases of one step may overlap."""

    generate: float
    """Any slot was busy."""
    train: float
    publish: float
    """Weights left the trainer."""
    install: float
    """Weights were brought onto an instance; the mean over instances."""
    switch: float
    """Colocated devices changed between rollout and training, both ways."""

    def per_step(self, start: "Phases", steps: int) -> dict[str, float]:
        """What was added after `start`, by name, for each of so many steps."""
        added = zip(self._fields, self, start, strict=True)
        return {name: (end - begin) / max(1, steps) for name, end, begin in added}


@dataclass(frozen=True, slots=True)
class Summary:
    """One paradigm in numbers: of the window, but for the counts of trajectories."""

    paradigm: str
    ok: bool
    """The run ended well and no promise was broken."""
    end: str
    """Why the run ended."""
    steps: int
    """Train steps in the window."""
    window_s: float
    step_minutes: float
    tokens_per_s: float
    """Trained response tokens."""
    rollout_only_share: float
    """Of the time, while the trainer does not train."""
    bubble_share: float
    """Idle slot time over all slot time in which rollout had the devices."""
    mean_staleness: float
    p95_staleness: float
    max_staleness: float
    deadline_stalls: int
    deadline_stall_s: float
    migrations: int
    """Trajectories that were moved."""
    kv_bytes_moved: float
    reprefilled_tokens: int
    mean_versions_live: float
    max_versions_live: int
    issued: int
    trained: int
    filtered: int
    failed: int
    mixed: int
    """Trained trajectories with tokens of more than one version."""
    audit_ok: bool
    audit: str
    wall_s: float
    """Real time that the simulation took."""
    phase_seconds: dict[str, float] | None = None
    """Of a step, by phase; None where nobody measures them."""

    def to_json(self) -> dict[str, Any]:
        """The figures that a seed reproduces: all but the real time."""
        data = asdict(self)
        del data["wall_s"]
        if self.phase_seconds is None:
            del data["phase_seconds"]
        return data


def speedup_over(summary: Summary, base: Summary | None) -> dict[str, float | None]:
    """How many times as fast as another run, by both measures; None where that has no answer.

    They differ where steps hold different numbers of tokens: batches are counted in groups.
    """
    if base is None or min(base.tokens_per_s, base.step_minutes, summary.step_minutes) <= 0.0:
        return {"by_tokens_per_s": None, "by_step_time": None}
    return {
        "by_tokens_per_s": summary.tokens_per_s / base.tokens_per_s,
        "by_step_time": base.step_minutes / summary.step_minutes,
    }


class _Stretch:
    """Time spent in a state, and a count integrated over it, up to any moment."""

    SAVED = ("level", "peak", "_at", "_integral")

    def __init__(self) -> None:
        self.level = 0
        self.peak = 0
        self._at = 0.0
        self._integral = 0.0

    def change(self, now: float, by: int) -> None:
        self._settle(now)
        self.level += by
        self.peak = max(self.peak, self.level)

    def read(self, now: float) -> float:
        self._settle(now)
        return self._integral

    def _settle(self, now: float) -> None:
        self._integral += (now - self._at) * self.level
        self._at = now


class _Mark(NamedTuple):
    """All integrals at one publication."""

    now: float
    version: int
    reading: Reading
    training_s: float
    version_s: float
    phases: Phases | None


# What is looked at beside finished trajectories; all else is passed over by one look-up.
_RARE_EVENTS = frozenset({WeightsPublished, BatchTrained, BatchFailed, BatchRejected, GroupJudged})
_RARE_COMMANDS = frozenset({Train, Delete, Fail})

RECORDS: tuple[type, ...] = (_Stretch, _Mark, Reading, Train, BatchGroup)


class Collector:
    """Feed it every event with its commands; ask for the summary at the end."""

    SAVED = (
        *("_first", "_last", "_lengths", "_batch", "_training", "_live", "_tokens"),
        "_staleness",
    )
    WIRED = ("_group_size", "_warmup", "_probe", "_phases")

    def __init__(
        self,
        group_size: int,
        warmup: int,
        probe: Callable[[], Reading],
        phases: Callable[[], Phases | None] = lambda: None,
    ) -> None:
        self._group_size = group_size
        self._warmup = warmup
        self._probe = probe
        self._phases = phases
        self._first: _Mark | None = None
        self._last: _Mark | None = None
        self._lengths: dict[int, int] = {}  # tokens of trajectories that are whole
        self._batch: Train | None = None
        self._training = _Stretch()
        self._live = _Stretch()
        self._tokens: Counter[int] = Counter()  # trained, by step
        self._staleness: dict[int, Counter[int]] = {}  # of trajectories, by step

    def restored(self) -> None:
        """It was loaded from a snapshot: what processes had counted by then ended with them."""
        for name in ("_first", "_last"):
            mark: _Mark | None = getattr(self, name)
            if mark is not None:
                setattr(self, name, mark._replace(reading=mark.reading.of_history))

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """One handled event, and the commands that answered it."""
        if isinstance(event, TrajectoryFinished):
            self._finished(event, commands)
        elif type(event) in _RARE_EVENTS:
            self._note(now, event)
        for command in commands:
            if type(command) in _RARE_COMMANDS:
                self._command(now, command)

    def _note(self, now: float, event: Event) -> None:
        if isinstance(event, WeightsPublished):
            self._published(now, event.version)
        elif isinstance(event, BatchTrained | BatchFailed | BatchRejected):
            self._trained(now, event)
        elif isinstance(event, GroupJudged) and event.filtered is not None:
            first = event.group * self._group_size
            for trajectory_id in range(first, first + self._group_size):
                self._lengths.pop(trajectory_id, None)

    def _command(self, now: float, command: Command) -> None:
        if isinstance(command, Train):
            self._train(now, command)
        elif isinstance(command, Delete):
            self._live.change(now, -1)
        elif isinstance(command, Fail):
            self._lengths.pop(command.trajectory, None)

    def _finished(self, event: TrajectoryFinished, commands: Sequence[Command]) -> None:
        """It is whole if the core has it scored: else it is a copy, or of an old placement."""
        for command in commands:
            if type(command) is Score and command.trajectory == event.trajectory:
                self._lengths[event.trajectory] = event.tokens
                return

    def _train(self, now: float, command: Train) -> None:
        if self._batch is None:  # else the core repeats itself
            self._batch = command
            self._training.change(now, 1)

    def _trained(self, now: float, event: BatchTrained | BatchFailed | BatchRejected) -> None:
        batch = self._batch
        if batch is None or batch.step != event.step:
            return  # a late copy of an old answer
        self._batch = None
        self._training.change(now, -1)
        if not isinstance(event, BatchTrained):
            return
        staleness = self._staleness.setdefault(batch.step, Counter())
        tokens = 0
        for group in batch.groups:
            staleness[batch.step - group.version] += len(group.trajectories)
            for trajectory_id in group.trajectories:
                tokens += self._lengths.pop(trajectory_id, 0)
        self._tokens[batch.step] = tokens

    def _published(self, now: float, version: int) -> None:
        if self._last is not None and version <= self._last.version:
            return  # a late copy of an old answer
        self._live.change(now, 1)
        mark = _Mark(
            now,
            version,
            self._probe(),
            self._training.read(now),
            self._live.read(now),
            self._phases(),
        )
        self._last = mark
        if self._first is None and version >= self._warmup:
            self._first = mark
            self._live.peak = self._live.level

    def summary(self, audit: AuditReport, *, ok: bool, end: str, wall_s: float) -> Summary:
        """The figures; zeros where no whole step was measured."""
        first, last = self._first, self._last
        if first is None or last is None:
            first = last = _Mark(0.0, 0, Reading(), 0.0, 0.0, None)
        steps = range(first.version, last.version)
        window_s = last.now - first.now
        per_s = 1.0 / window_s if window_s > 0.0 else 0.0
        spent = last.reading.since(first.reading)
        histogram: Counter[int] = Counter()
        for step in steps:
            histogram.update(self._staleness.get(step, {}))
        staleness = Spread.of(histogram)
        return Summary(
            paradigm=audit.paradigm,
            ok=ok and audit.ok,
            end=end,
            steps=len(steps),
            window_s=window_s,
            step_minutes=window_s / 60 / len(steps) if steps else 0.0,
            tokens_per_s=sum(self._tokens[step] for step in steps) * per_s,
            rollout_only_share=idle_share(last.training_s - first.training_s, window_s),
            bubble_share=idle_share(spent.busy_s, spent.slots_s),
            mean_staleness=staleness.mean,
            p95_staleness=staleness.p95,
            max_staleness=staleness.max,
            deadline_stalls=spent.stalls,
            deadline_stall_s=spent.stalled_s,
            migrations=spent.migrated,
            kv_bytes_moved=spent.kv_bytes_moved,
            reprefilled_tokens=spent.reprefilled_tokens,
            mean_versions_live=(last.version_s - first.version_s) * per_s,
            max_versions_live=self._live.peak,
            issued=audit.issued,
            trained=audit.trained,
            filtered=audit.filtered,
            failed=audit.failed,
            mixed=audit.mixed_trained,
            audit_ok=audit.ok,
            audit=_verdict(audit),
            wall_s=wall_s,
            phase_seconds=_each_step(first.phases, last.phases, len(steps)),
        )


def _each_step(first: Phases | None, last: Phases | None, steps: int) -> dict[str, float] | None:
    return None if first is None or last is None else last.per_step(first, steps)


def idle_share(busy: float, total: float) -> float:
    """1 - busy / total. Reports lag behind by a heartbeat, so that it may miss by a little."""
    return min(1.0, max(0.0, 1.0 - busy / total)) if total > 0.0 else 0.0


def _verdict(audit: AuditReport) -> str:
    """The audit in one line: what is broken, or what is not promised, or `clean`."""
    broken = [f"{check.promise} ({check.breaches})" for check in audit.checks if not check.ok]
    if broken:
        return f"broken: {', '.join(broken)}"
    return "; ".join(["clean", *audit.notes])
