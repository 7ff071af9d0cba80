"""Tokens per second of each version, over the last few seconds."""

import time
from collections import defaultdict, deque
from collections.abc import Callable

from dora_rl.core.types import Version

_WINDOW_S = 5.0
_BUCKET_S = 0.1  # so that the memory does not grow with the speed


class Rates:
    """Counts tokens in short intervals and forgets the old ones."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counts: dict[Version, deque[tuple[int, int]]] = defaultdict(deque)

    def add(self, version: Version, tokens: int) -> None:
        bucket = int(self._clock() / _BUCKET_S)
        counts = self._counts[version]
        if counts and counts[-1][0] == bucket:
            tokens += counts.pop()[1]
        counts.append((bucket, tokens))
        self._drop_old(counts, bucket)

    def tokens_per_s(self, version: Version) -> float:
        counts = self._counts.get(version)
        if not counts:
            return 0.0
        now = int(self._clock() / _BUCKET_S)
        self._drop_old(counts, now)
        if not counts:
            return 0.0
        span_s = (now - counts[0][0] + 1) * _BUCKET_S
        return sum(tokens for _, tokens in counts) / span_s

    def forget(self, version: Version) -> None:
        self._counts.pop(version, None)

    def _drop_old(self, counts: deque[tuple[int, int]], now: int) -> None:
        while counts and now - counts[0][0] > _WINDOW_S / _BUCKET_S:
            counts.popleft()
