"""Commands that show what they have when they are interrupted: by Ctrl-C, and by a kill alike."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INCOMPLETE = "INCOMPLETE: it ended early; what follows was measured until then."


@contextmanager
def kills_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP raise KeyboardInterrupt, as Ctrl-C does."""
    signals = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, _interrupt) for number in signals]
    try:
        yield
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
