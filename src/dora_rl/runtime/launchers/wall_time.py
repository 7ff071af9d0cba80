"""The clock and the timer of a run on the machine's monotonic clock."""

import time


class WallTime:
    """The run's clock and timer, by the machine's monotonic clock."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._at: float | None = None

    def begin(self, now: float) -> None:
        """It is now so many seconds since the run began."""
        self._began = time.monotonic() - now

    def now(self) -> float:
        return time.monotonic() - self._began

    def set(self, at: float) -> None:
        self._at = at

    def rings(self) -> bool:
        """Whether the time that was set has come; said once."""
        if self._at is None or self.now() < self._at:
            return False
        self._at = None
        return True

    def wait_s(self) -> float | None:
        """How long until it rings, if a time is set."""
        return None if self._at is None else self._at - self.now()
