"""Python's search for cycles in pieces, for a process that must answer within milliseconds.

A search of everything stops a driver with 64,000 trajectories for 200 to 400 ms, whenever the
objects of a generation have grown by a quarter. What lives long is frozen instead, out of reach of
the search, as soon as it has survived one: each search looks at what was made since. A cycle that
dies after it was frozen stays until the next whole search, which is as rare as it may be long.
Reference counts free all else at once, as ever.
"""

import gc
import time
from collections.abc import Callable

_PIECE_S = 0.25  # between two searches: a piece takes a few milliseconds
_WHOLE_S = 600.0  # between two of everything: what they stop is less than a thousandth


class CycleSearch:
    """Inside, `step` searches what is due, now and then; afterwards all is as it was before."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._piece_at = self._whole_at = 0.0

    def __enter__(self) -> "CycleSearch":
        self._piece_at = self._clock() + _PIECE_S
        self._whole_at = self._clock() + _WHOLE_S
        gc.freeze()  # what was imported stays
        return self

    def step(self) -> None:
        """Search what was made since the last time, if that is long ago; to be called often."""
        now = self._clock()
        if now < self._piece_at:
            return
        if now >= self._whole_at:
            gc.unfreeze()
        gc.collect()
        gc.freeze()
        after = self._clock()  # a search that took long delays the next
        self._piece_at = after + _PIECE_S
        if now >= self._whole_at:
            self._whole_at = after + _WHOLE_S

    def __exit__(self, *about: object) -> None:
        gc.unfreeze()
