"""The one timer of the core in virtual time."""

from collections.abc import Callable

from dora_rl.core.protocol.commands import SetTimer
from dora_rl.core.protocol.events import Event, TimerFired
from dora_rl.simulator.clock import Clock
from dora_rl.simulator.errors import WorldError

_FIRES_PER_INSTANT = 10_000  # more at one moment of virtual time is an endless loop


class CoreTimer:
    """Fires once for each `set`, unless another `set` came before it was due."""

    def __init__(self, clock: Clock, report: Callable[[Event], None]) -> None:
        self._clock = clock
        self._report = report
        self._number = 0  # of the last `set`
        self._fired_at = 0.0
        self._fires = 0  # at that moment

    def set(self, command: SetTimer) -> None:
        self._number += 1
        self._clock.at(command.at, self._fire, self._number)

    def _fire(self, number: int) -> None:
        if number != self._number:
            return
        now = self._clock.now
        if self._fired_at != now:
            self._fired_at, self._fires = now, 0
        self._fires += 1
        if self._fires > _FIRES_PER_INSTANT:
            raise WorldError(f"the core sets its timer to {now}, which is now, for ever")
        self._report(TimerFired())
