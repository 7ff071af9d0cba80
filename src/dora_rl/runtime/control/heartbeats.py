"""Heartbeats are not history: which reports of an instance the core has to hear of.

A report that repeats the last one, with no new length and no saved prefix, tells the core only
that the instance lives, unless its KV is above `kv_pressure`: then each one has the core try again
to move work away. The core looks at that when a silence timer ends, and looks for stuck
trajectories when a report comes. So a repeated report is handed over only when an eighth of the
shorter of the two timeouts has passed since the last one that was. All that reaches the core is in
the journal, as before, and a replay decides the same; what does not reach it, it never knew.

What holds: the core misses at most the last eighth of `heartbeat_timeout_s` before a silence. An
instance whose reports are never 7/8 of the timeout apart is not given up; one that falls silent is,
at most an eighth of the timeout earlier than without this. (`runtime.report_period_s` is at most
half of the timeout, which leaves 3/8 of it for delays.) A stuck trajectory is found at most an
eighth of its timeout later.
"""

from typing import NamedTuple

from dora_rl.core.protocol.events import InstanceJoined, InstanceProgressed
from dora_rl.core.protocol.settings import Settings
from dora_rl.core.protocol.types import InstanceId

_SHARE = 1 / 8  # of a timeout


class _Heard(NamedTuple):
    """The last report of an instance that was handed to the core."""

    incarnation: int
    kv_tokens: int
    at: float


class Heartbeats:
    """The reports of one run's instances, as far as the core knows them."""

    def __init__(self, settings: Settings) -> None:
        self._period_s = _SHARE * min(settings.heartbeat_timeout_s, settings.trajectory_timeout_s)
        self._kv_pressure = settings.kv_pressure
        self._kv_capacity: dict[InstanceId, int] = {}
        self._heard: dict[InstanceId, _Heard] = {}

    def joined(self, event: InstanceJoined) -> None:
        """An instance is up, with so much KV."""
        self._kv_capacity[event.instance] = event.kv_capacity_tokens

    def is_news(self, now: float, report: InstanceProgressed) -> bool:
        """Whether the core is to hear of it; if so, it counts as heard."""
        last = self._heard.get(report.instance)
        if (
            last is not None
            and not report.lengths
            and not report.saved
            and not self._is_pressed(report)
            and (report.incarnation, report.kv_tokens) == last[:2]
            and now - last.at < self._period_s
        ):
            return False
        self._heard[report.instance] = _Heard(report.incarnation, report.kv_tokens, now)
        return True

    def _is_pressed(self, report: InstanceProgressed) -> bool:
        capacity = self._kv_capacity.get(report.instance)
        return capacity is not None and report.kv_tokens >= self._kv_pressure * capacity
