"""All that the core knows, in one place that can be saved, and the commands being decided.

Records are primary; fields marked derived are functions of them and are built again on
restore. Only `actions` and `handlers` change it, and only inside `Orchestrator.handle`.
"""

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from dora_rl.core.protocol.commands import Command
from dora_rl.core.protocol.paradigms import PARADIGMS, Paradigm
from dora_rl.core.protocol.settings import Elastic, Settings
from dora_rl.core.protocol.types import ADDED, Fence, GroupId, InstanceId, TrajectoryId, Version
from dora_rl.core.state.fleet import Fleet
from dora_rl.core.state.timers import Timers, Wait
from dora_rl.core.state.transfers import Migrations
from dora_rl.core.state.versions import Versions
from dora_rl.core.state.work import DERIVED, Work


class TrainerPhase(StrEnum):
    IDLE = "idle"
    TRAINING = "training"
    PUBLISHING = "publishing"


@dataclass(slots=True)
class Trainer:
    """The next step (or the one being taken), and its batch."""

    step: int = 0
    phase: TrainerPhase = TrainerPhase.PUBLISHING  # version 0 is awaited first
    batch: tuple[GroupId, ...] = ()
    attempts: int = 0
    rejections: int = 0  # of batches in a row
    stalled_since: float | None = None
    stalled_s: float = 0.0
    stalls: int = 0
    trained_at: float | None = None


@dataclass(slots=True)
class Estimates:
    """Durations as observed: exponential means that start from the settings."""

    install_s: float
    migration_s: float
    step_s: float | None = None
    sleep_s: float = field(default=0.0, metadata=ADDED)  # of an instance, from when it is asked
    wake_s: float = field(default=0.0, metadata=ADDED)
    train_s: float = field(default=0.0, metadata=ADDED)  # of a train step; 0: none was seen

    def observe_install(self, seconds: float) -> None:
        self.install_s += 0.2 * (seconds - self.install_s)

    def observe_migration(self, seconds: float) -> None:
        self.migration_s += 0.2 * (seconds - self.migration_s)

    def observe_sleep(self, seconds: float) -> None:
        self.sleep_s += 0.3 * (seconds - self.sleep_s)

    def observe_wake(self, seconds: float) -> None:
        self.wake_s += 0.3 * (seconds - self.wake_s)

    def observe_train(self, seconds: float) -> None:
        before = self.train_s or seconds
        self.train_s = before + 0.5 * (seconds - before)

    def observe_step(self, seconds: float) -> None:
        if self.step_s is None:
            self.step_s = seconds
        else:
            self.step_s += 0.5 * (seconds - self.step_s)


@dataclass(slots=True)
class Lending:
    """What loans are decided on: how fast rollout is by itself, and what was lent for which step.

    Rollout is watched from the beginning of a train step to that of the next one, or to a loan
    before it: a loan does not change what the next one is decided on.
    """

    since: float | None = 0.0  # the beginning of what is watched; None during a loan
    ready_before: int = 0  # complete groups that were there then
    groups: float = 0.0  # made ready while it was watched, and the time that took: what lies back
    seconds: float = 0.0  # a step counts half
    own_slots: int = 0  # of rollout's own devices
    trained_since: float = 0.0
    step: int = -1  # the last step that the trainer's devices were lent before
    helped_step: int = -1  # the last step that rollout's were lent during
    look_at: float = 0.0  # when to look next for instances that rollout can spare

    def watch(self, now: float, ready: int) -> None:
        """Begin to watch; `ready` groups are complete."""
        self.since, self.ready_before = now, ready

    def close(self, now: float, ready: int) -> None:
        """Take in what was watched, if anything was."""
        if self.since is not None:
            self.groups = self.groups / 2 + ready - self.ready_before
            self.seconds = self.seconds / 2 + now - self.since
            self.since = None

    @property
    def groups_per_s(self) -> float:
        """0 where it is not known."""
        return max(0.0, self.groups / self.seconds) if self.seconds > 0 else 0.0


@dataclass(slots=True)
class State:
    settings: Settings
    work: Work
    estimates: Estimates
    now: float = 0.0
    versions: Versions = field(default_factory=Versions)
    fleet: Fleet = field(default_factory=Fleet)
    migrations: Migrations = field(default_factory=Migrations)
    timers: Timers = field(default_factory=Timers)
    trainer: Trainer = field(default_factory=Trainer)
    counters: Counter[str] = field(default_factory=Counter)
    next_fence: Fence = 1
    fetching: GroupId | None = None
    fetch_attempts: int = 0
    rebalance_at: float | None = None
    rebalanced_at: float = 0.0
    suspended: bool = False
    resumed_at: float = 0.0
    fleet_lost_at: float | None = None
    wasted_groups: int = 0
    """Groups in a row that ended without being trained on."""
    halted: bool = False
    lending: Lending | None = field(default=None, metadata=ADDED)  # where devices are lent

    # Of one call of `handle`: empty before and after.
    out: list[Command] = field(default_factory=list, metadata=DERIVED)
    unplaced: set[Version] = field(default_factory=set, metadata=DERIVED)
    """Versions with a new place or new waiting work."""
    undone: set[Version] = field(default_factory=set, metadata=DERIVED)
    """Versions of migrations that failed: no idle slot is filled by another one at once."""
    disturbed: set[InstanceId] = field(default_factory=set, metadata=DERIVED)
    """Instances that something left by migration."""
    failed_members: list[tuple[TrajectoryId, str]] = field(default_factory=list, metadata=DERIVED)
    """Waiting trajectories that are to end, and why."""
    lease_dropped: bool = field(default=False, metadata=DERIVED)
    rebalance_now: bool = field(default=False, metadata=DERIVED)
    quiet: bool = field(default=False, metadata=DERIVED)
    """The event gave rise to no duty."""
    unchanged: bool = field(default=False, metadata=DERIVED)
    """The event changed nothing that `settle` looks at, but for the time."""
    paradigm: Paradigm = field(init=False, metadata=DERIVED)

    def __post_init__(self) -> None:
        self.paradigm = PARADIGMS[self.settings.paradigm]

    @classmethod
    def fresh(cls, settings: Settings) -> "State":
        lends = settings.elastic is not Elastic.OFF and PARADIGMS[settings.paradigm].lends
        switch_s = settings.switch_estimate_s if lends else 0.0
        return cls(
            settings,
            Work(settings.group_size),
            Estimates(
                settings.install_estimate_s,
                settings.migration_estimate_s,
                sleep_s=switch_s,
                wake_s=switch_s,
            ),
            lending=Lending() if lends else None,
        )

    def rebuild(self) -> None:
        self.work.rebuild()
        self.fleet.rebuild()

    @property
    def staleness(self) -> int:
        """K as it applies: the paradigm's own, or the setting."""
        return self.paradigm.max_staleness(self.settings)

    @property
    def next_step(self) -> int:
        """The next step whose batch is not chosen yet: the one that trains has no room left."""
        return self.trainer.step + (self.trainer.phase is TrainerPhase.TRAINING)

    def rebalance_soon(self, delay_s: float = 1.0) -> None:
        """Ask for a rebalance; several changes at once share one."""
        at = self.now + min(delay_s, self.settings.rebalance_period_s)
        if self.rebalance_at is None or at < self.rebalance_at:
            self.rebalance_at = at
            self.timers.set(at, Wait.REBALANCE)

    def emit(self, command: Command) -> None:
        self.out.append(command)

    def fence(self) -> Fence:
        """A number never given before."""
        self.next_fence += 1
        return self.next_fence - 1
