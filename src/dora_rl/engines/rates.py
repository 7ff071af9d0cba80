"""Tokens per second of each version, over the last few seconds."""

import time
from collections import defaultdict, deque
from collections.abc import Callable

from dora_rl.core.protocol.types import Version

_WINDOW_S = 5.0
_BUCKETS_PER_S = 10  # so that the memory does not grow with the speed


class Rates:
    """Counts tokens in short intervals and forgets those that are older than the window."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counts: dict[Version, deque[tuple[int, int]]] = defaultdict(deque)

    def add(self, version: Version, tokens: int) -> None:
        counts, bucket = self._recent(version)
        if counts and counts[-1][0] == bucket:
            tokens += counts.pop()[1]
        counts.append((bucket, tokens))

    def tokens_per_s(self, version: Version) -> float:
        counts, _ = self._recent(version)
        return sum(tokens for _, tokens in counts) / _WINDOW_S

    def forget(self, version: Version) -> None:
        self._counts.pop(version, None)

    def _recent(self, version: Version) -> tuple[deque[tuple[int, int]], int]:
        """The counts within the window, and the interval that is now."""
        now = int(self._clock() * _BUCKETS_PER_S)
        counts = self._counts[version]
        while counts and now - counts[0][0] >= _WINDOW_S * _BUCKETS_PER_S:
            counts.popleft()
        return counts, now
