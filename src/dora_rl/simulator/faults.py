"""Seeded faults: how often, drawn by whom, and a log of what was done.

Each kind of fault has a random stream of its own, so that raising one rate leaves the draws of
the others alone. Invariant: a run is a pure function of the scenario and the seed. Knows how
to draw, not what a fault does: that is for whoever asks.
"""

from random import Random
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field

_RATE = Field(default=0.0, ge=0, description="per instance and hour")
_SHARE = Field(default=0.0, ge=0, le=1, description="probability, each time")


class FaultParams(BaseModel):
    """Every rate is 0 unless told: `*_per_hour` per instance, the others a probability each."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    crash_per_hour: float = _RATE
    silent_share: float = Field(
        default=0.5, ge=0, le=1, description="crashes that are not reported"
    )
    hang_per_hour: float = _RATE
    hang_s: float = Field(default=120.0, gt=0, description="mean length of a hang")
    partition_share: float = Field(
        default=0.5, ge=0, le=1, description="hangs in which it works on, but its messages are lost"
    )
    slow_per_hour: float = _RATE
    slow_s: float = Field(default=300.0, gt=0, description="mean length of a slow spell")
    slow_factor: float = Field(default=3.0, ge=1, description="everything takes this much longer")
    leave_per_hour: float = _RATE
    rejoin_s: float = Field(default=300.0, gt=0, description="mean absence after a leave")

    lost: float = Field(default=0.0, ge=0, lt=1, description="messages that never arrive")
    duplicated: float = Field(default=0.0, ge=0, lt=1, description="messages that come twice")
    delayed: float = Field(default=0.0, ge=0, le=1, description="messages that come late")
    delay_s: float = Field(default=5.0, gt=0, description="mean delay of a late message")

    failed_migration: float = _SHARE
    failed_kv_path: float = _SHARE
    failed_publication: float = _SHARE
    failed_install: float = _SHARE
    wrong_digest: float = _SHARE
    failed_train: float = _SHARE
    rejected_batch: float = _SHARE
    endless_environment: float = _SHARE
    failed_reward: float = _SHARE

    @property
    def any_message(self) -> bool:
        """Whether a message can be anything but delivered, once and at once."""
        return bool(self.lost or self.duplicated or self.delayed)

    @property
    def any(self) -> bool:
        """Whether anything can go wrong at all."""
        return self.any_message or any(
            getattr(self, name)
            for name in type(self).model_fields
            if name.endswith("_per_hour") or name in _EACH
        )


_EACH = (
    "failed_migration",
    "failed_kv_path",
    "failed_publication",
    "failed_install",
    "wrong_digest",
    "failed_train",
    "rejected_batch",
    "endless_environment",
    "failed_reward",
)


class Fault(NamedTuple):
    """One thing that went wrong on purpose."""

    time: float
    kind: str
    subject: str

    def __str__(self) -> str:
        return f"{self.time:12.3f}s  {self.kind:<20} {self.subject}"


class Faults:
    """Draws from the streams, and writes down what was drawn."""

    def __init__(self, params: FaultParams, seed: int) -> None:
        self.params = params
        self.log: list[Fault] = []
        self._seed = seed
        self._streams: dict[str, Random] = {}

    def stream(self, kind: str) -> Random:
        """The random stream of one kind of fault."""
        stream = self._streams.get(kind)
        if stream is None:
            # A string as seed is hashed whole, and the same on every machine.
            stream = self._streams[kind] = Random(f"{self._seed}/{kind}")
        return stream

    def note(self, now: float, kind: str, subject: str) -> None:
        self.log.append(Fault(now, kind, subject))

    def strikes(self, now: float, kind: str, share: float, subject: str) -> bool:
        """Whether this one goes wrong; a rate of 0 draws nothing."""
        if share <= 0.0 or self.stream(kind).random() >= share:
            return False
        self.note(now, kind, subject)
        return True

    def next_after_s(self, kind: str, per_hour: float) -> float | None:
        """Seconds to the next of a Poisson stream, or None where the rate is 0."""
        if per_hour <= 0.0:
            return None
        return self.stream(kind).expovariate(per_hour / 3600.0)

    def lasting_s(self, kind: str, mean_s: float) -> float:
        """An exponential duration."""
        return self.stream(kind).expovariate(1.0 / mean_s)

    def deliveries(self, now: float, subject: object) -> tuple[float, ...]:
        """Delays after which a message arrives: none if it is lost, two if it is doubled."""
        params = self.params
        stream = self.stream("messages")
        if stream.random() < params.lost:
            self.note(now, "lost", str(subject))
            return ()
        copies = 1
        if stream.random() < params.duplicated:
            self.note(now, "duplicated", str(subject))
            copies = 2
        delays = []
        for _ in range(copies):
            delay_s = 0.0
            if stream.random() < params.delayed:
                delay_s = stream.expovariate(1.0 / params.delay_s)
                self.note(now, "delayed", f"{delay_s:.3f}s {subject}")
            delays.append(delay_s)
        return tuple(delays)
