"""The knobs of the core: each with its range, the reason for it, and a good default.

Stdlib only. Times are seconds of the world's monotonic clock, whatever drives it.
"""

from dataclasses import dataclass, field, fields
from enum import StrEnum

from dora_rl.core.protocol.errors import SettingsError
from dora_rl.core.protocol.types import ADDED


class ParadigmName(StrEnum):
    SYNC = "sync"
    ONE_STEP = "one_step"
    PARTIAL = "partial"
    IN_FLIGHT = "in_flight"
    MULTI_VERSION = "multi_version"


class OnFailedMember(StrEnum):
    """What a failed member does to its group."""

    TRAIN_REST = "train_rest"  # the others are trained; the batch records the true size
    FAIL_GROUP = "fail_group"  # the others fail with it


class Elastic(StrEnum):
    """Which role may borrow the other's devices while those would idle (docs/elastic.md)."""

    OFF = "off"
    ROLLOUT = "rollout"  # rollout borrows from a trainer that waits
    BOTH = "both"  # and training from instances that have nothing to do


@dataclass(frozen=True)
class Settings:
    """All of `[orchestration]`. Build it from a mapping with `dora_rl.config`."""

    paradigm: ParadigmName = ParadigmName.MULTI_VERSION
    groups_per_step: int = 64
    """B: complete groups per train step."""
    group_size: int = 8
    """Trajectories per prompt."""
    max_staleness: int = 3
    """K: the hard bound on (consuming step - version). 0 is synchronous training."""
    pipeline_depth: int = 0
    """Groups to keep outstanding besides those being trained. 0 follows the slots: as many as
    keep every one busy."""
    version_slots: int = 1
    """Versions that one instance may hold; an instance may offer fewer."""
    max_steps: int = 0
    """Train steps to take; 0 is no limit. Work that no step could consume is not started."""

    rebalance_period_s: float = 10.0
    """Trigger: look for lone stragglers and idle slots this often."""
    idle_slots: float = 0.02
    """Trigger: the share of all slots that may idle, while work waits for another version's."""
    kv_pressure: float = 0.92
    """Trigger: the share of an instance's KV memory in use above which work moves away."""
    migration_gain: float = 1.5
    """Hysteresis: a move must gain this many times the slot time that it costs."""
    turn_s: float = 60.0
    """With more live versions than places for them: how long a version keeps its turn."""
    fill_older: bool = False
    """Start new groups on an older version's odd slots, where the bound admits them.

    Off: it keeps versions from draining, and costs more slots than it fills (decision 005).
    """
    install_estimate_s: float = 5.0
    """Time to install a version, until it has been observed."""
    migration_estimate_s: float = 1.0
    """Time to migrate one trajectory, until it has been observed."""

    elastic: Elastic = field(default=Elastic.OFF, metadata=ADDED)
    """Lend devices between training and rollout, where the paradigm splits and rebalances them."""
    elastic_gain: float = field(default=2.0, metadata=ADDED)
    """Hysteresis: a loan must save this many times what it may cost."""
    switch_estimate_s: float = field(default=10.0, metadata=ADDED)
    """Time for an instance to fall asleep, or to wake, until it has been observed."""

    max_retries: int = 3
    """Failures of its own that a trajectory survives; the next one is terminal."""
    max_losses: int = 10
    """Instances that may die under a trajectory before it is taken for their poison."""
    on_failed_member: OnFailedMember = OnFailedMember.TRAIN_REST
    max_train_attempts: int = 3
    max_publish_attempts: int = 5
    max_wasted_batches: int = 10
    """Batches' worth of groups in a row that fail or are filtered, before the run halts."""

    heartbeat_timeout_s: float = 60.0
    """Silence after which an instance is taken for dead."""
    trajectory_timeout_s: float = 1800.0
    """A placement that makes no progress for this long has failed: `timeout`."""
    score_timeout_s: float = 600.0
    install_timeout_s: float = 300.0
    migration_timeout_s: float = 120.0
    prompt_timeout_s: float = 120.0
    train_timeout_s: float = 4 * 3600.0
    publish_timeout_s: float = 900.0
    fleet_timeout_s: float = 1800.0
    """Work waits and no instance is there for this long: the run halts and says so."""

    def __post_init__(self) -> None:
        for name, choices in _CHOICES:
            object.__setattr__(self, name, _choice(name, getattr(self, name), choices))
        for name, least, reason in _AT_LEAST:
            _require_at_least(name, getattr(self, name), least, reason)
        for name, most, reason in _AT_MOST:
            if getattr(self, name) > most:
                raise SettingsError(f"{name} must be <= {most}: `{getattr(self, name)}`. {reason}")
        for each in fields(self):
            if each.name.endswith("_timeout_s"):
                _require_duration(each.name, getattr(self, each.name), "Every wait needs an end.")
        if not 0.0 < self.idle_slots <= 1.0:
            raise SettingsError(
                f"idle_slots must be in (0, 1]: `{self.idle_slots}`. "
                "It is a share of the slots; 1 leaves the rebalance to its period."
            )
        if not 0.0 < self.kv_pressure <= 1.0:
            raise SettingsError(
                f"kv_pressure must be in (0, 1]: `{self.kv_pressure}`. "
                "It is a share of the KV memory; 1 leaves pressure to the engine."
            )
        _require_duration(
            "rebalance_period_s", self.rebalance_period_s, "Use a large value to rebalance rarely."
        )
        _require_duration("turn_s", self.turn_s, "It is the length of a version's turn.")
        for name, what in (("migration_gain", "moves"), ("elastic_gain", "loans")):
            if not getattr(self, name) >= 1.0:
                raise SettingsError(
                    f"{name} must be >= 1: `{getattr(self, name)}`. "
                    f"Below 1, {what} that lose time would be made."
                )
        if 0 < self.pipeline_depth < self.groups_per_step:
            raise SettingsError(
                f"pipeline_depth must be 0 or >= groups_per_step ({self.groups_per_step}): "
                f"`{self.pipeline_depth}`. With fewer outstanding groups no batch ever fills."
            )
        most = (self.max_staleness + 1) * self.groups_per_step
        if self.pipeline_depth > most:
            raise SettingsError(
                f"pipeline_depth must be <= (max_staleness + 1) * groups_per_step ({most}): "
                f"`{self.pipeline_depth}`. The staleness bound admits no more; raise max_staleness."
            )


_CHOICES: tuple[tuple[str, type[StrEnum]], ...] = (
    ("paradigm", ParadigmName),
    ("on_failed_member", OnFailedMember),
    ("elastic", Elastic),
)
_AT_MOST: tuple[tuple[str, int, str], ...] = (
    ("groups_per_step", 10_000_000, "No cluster trains on more in a step."),
    ("group_size", 100_000, "No prompt needs more responses."),
    ("max_staleness", 10_000, "A bound that large is none."),
    ("version_slots", 1_000, "No memory holds that many versions."),
)
_SHORTEST_S = 1e-3  # a time-out or period below this would only spin

_AT_LEAST: tuple[tuple[str, int, str], ...] = (
    ("groups_per_step", 1, "A train step needs at least one group."),
    ("group_size", 1, "Use 1 where an algorithm needs no siblings."),
    ("max_staleness", 0, "Use 0 for synchronous training."),
    ("pipeline_depth", 0, "Use 0 to follow the slots."),
    ("version_slots", 1, "An instance holds at least the version that it serves."),
    ("max_steps", 0, "Use 0 for no limit."),
    ("max_retries", 0, "Use 0 to fail a trajectory at its first failure."),
    ("max_losses", 0, "Use 0 to fail a trajectory with its first instance."),
    ("max_train_attempts", 1, "A step must be tried once."),
    ("max_publish_attempts", 1, "A publication must be tried once."),
    ("max_wasted_batches", 1, "Use a large value to continue whatever happens."),
    ("install_estimate_s", 0, "It is a duration."),
    ("migration_estimate_s", 0, "It is a duration."),
    ("switch_estimate_s", 0, "It is a duration."),
)


def _choice(name: str, value: str, choices: type[StrEnum]) -> StrEnum:
    try:
        return choices(value)
    except ValueError:
        known = ", ".join(choices)
        raise SettingsError(f"{name} must be one of {known}: `{value}`.") from None


def _require_at_least(name: str, value: float, least: int, reason: str) -> None:
    if not value >= least:  # so written that NaN is refused
        raise SettingsError(f"{name} must be >= {least}: `{value}`. {reason}")


def _require_duration(name: str, value: float, reason: str) -> None:
    if not value >= _SHORTEST_S:
        raise SettingsError(f"{name} must be >= {_SHORTEST_S} s: `{value}`. {reason}")
