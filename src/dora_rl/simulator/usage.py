"""Facts that no event carries: slot time, tokens computed, spans of work.

`Usage` integrates piecewise-constant counts in constant time per change, so a share over any
window is the difference of two readings. A slot is busy while a trajectory of the batch holds
it, decoding or prefilling; while training has the devices (colocated), no slot counts.
Facts only: what is a good share is for whoever reads them.
"""

from typing import NamedTuple, Protocol


class UsageReading(NamedTuple):
    """The integrals at one moment, in slot-seconds but for the last; subtract two for a window."""

    time: float
    slots_s: float
    busy_s: float
    suspended_s: float
    generating_s: float = 0.0
    """Plain seconds, in which any slot was busy."""

    def since(self, start: "UsageReading") -> "UsageReading":
        """What went by between `start` and this reading."""
        return UsageReading(*(end - begin for end, begin in zip(self, start, strict=True)))

    @property
    def bubble_share(self) -> float:
        """Idle slot time over all slot time; 0 where there was none."""
        return 1.0 - self.busy_s / self.slots_s if self.slots_s > 0.0 else 0.0


class Usage:
    """Slots of live instances, and how many of them are busy, integrated over time."""

    __slots__ = (
        "_at",
        "_busy_s",
        "_generating_s",
        "_slots_s",
        "_suspended_s",
        "busy",
        "slots",
        "suspended",
    )

    def __init__(self) -> None:
        self.slots = 0
        self.busy = 0
        self.suspended = False
        self._at = 0.0
        self._slots_s = 0.0
        self._busy_s = 0.0
        self._suspended_s = 0.0
        self._generating_s = 0.0

    def change(self, now: float, busy: int = 0, slots: int = 0) -> None:
        """From `now` on, so many more (or fewer) are busy, or there."""
        if now != self._at:
            self._settle(now)
        self.busy += busy
        self.slots += slots

    def suspend(self, now: float, suspended: bool) -> None:
        """From `now` on, training has the devices, or gives them back."""
        self._settle(now)
        self.suspended = suspended

    def read(self, now: float) -> UsageReading:
        """The integrals up to `now`."""
        self._settle(now)
        return UsageReading(now, self._slots_s, self._busy_s, self._suspended_s, self._generating_s)

    def _settle(self, now: float) -> None:
        passed = now - self._at
        self._at = now
        if self.suspended:
            self._suspended_s += passed * self.slots
        else:
            self._slots_s += passed * self.slots
            self._busy_s += passed * self.busy
            if self.busy:
                self._generating_s += passed


class Span(NamedTuple):
    """Something that took time. `lane` is an instance, or None for the trainer."""

    kind: str
    lane: int | None
    start: float
    end: float
    version: int
    detail: str = ""


class Facts:
    """Counters of what the world did, and the few spans that every metric needs."""

    __slots__ = (
        "cancelled_tokens",
        "failed_migrations",
        "generated_tokens",
        "install_s",
        "installs",
        "kv_bytes_moved",
        "migrated",
        "migrations",
        "parked",
        "preemptions",
        "prefilled_tokens",
        "publish_s",
        "publish_spans",
        "reprefilled_tokens",
        "shared_tokens",
        "switch_s",
        "switches",
        "train_s",
        "train_spans",
        "trained_tokens",
    )

    def __init__(self) -> None:
        self.generated_tokens = 0  # sampled, whatever became of them
        self.cancelled_tokens = 0  # of them, lost with a cancelled placement or a dead instance
        self.prefilled_tokens = 0  # computed by prefill, re-prefill included
        self.reprefilled_tokens = 0  # of them, computed before: prefixes, moves, new weights
        self.shared_tokens = 0  # prompt tokens that a sibling had prefilled already
        self.trained_tokens = 0  # prompts and observations included
        self.preemptions = 0  # runs that a full KV memory sent to host memory
        self.parked = 0  # runs parked by command
        self.installs = 0
        self.migrations = 0
        self.migrated = 0  # trajectories in them
        self.failed_migrations = 0
        self.kv_bytes_moved = 0.0
        self.train_s = 0.0  # failed steps included, switches not
        self.publish_s = 0.0
        self.install_s = 0.0  # summed over instances
        self.switch_s = 0.0  # of colocated devices, both ways
        self.switches = 0  # of instances that fell asleep or woke
        self.train_spans: list[Span] = []
        self.publish_spans: list[Span] = []


class Recorder(Protocol):
    """Who draws a timeline. Nothing is called, and nothing costs, where there is none."""

    def slots(self, now: float, instance: int, busy: int, version: int | None) -> None:
        """From `now` on, so many slots are busy; `version` is the newest among them."""

    def span(self, span: Span) -> None:
        """A train, publish, install, migrate, park, sleep, wake or suspend span has ended."""


class Timeline:
    """The recorder that keeps everything: changes of slots, and spans."""

    def __init__(self) -> None:
        self.changes: list[tuple[float, int, int, int | None]] = []
        self.spans: list[Span] = []

    def slots(self, now: float, instance: int, busy: int, version: int | None) -> None:
        self.changes.append((now, instance, busy, version))

    def span(self, span: Span) -> None:
        self.spans.append(span)
