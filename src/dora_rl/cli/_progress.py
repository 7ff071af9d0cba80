"""Progress on stderr: one line that is written over on a terminal, plain lines elsewhere.

A thread shows that a long phase is alive: nothing that is measured has to give the time for it.
"""

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

TICK_S = 1.0  # between looks at the clock
STEP_S = 2.0  # between plain lines of the same phase
SILENCE_S = 10.0  # after which a plain line says that the phase continues
_CLEAR = "\r\x1b[K"


class Progress:
    """Shows progress, until the terminal cannot be written to."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._terminal = stream.isatty()
        self._lock = threading.Lock()
        self._line = ""
        self._began = self._wrote = clock()

    def say(self, line: str, begins: bool) -> None:
        with self._lock:
            now = self._clock()
            self._line = line
            if begins:
                self._began = now
            if self._terminal or begins or now - self._wrote >= STEP_S:
                self._write(now)

    def tick(self) -> None:
        """Show the time of the phase, if that is due."""
        with self._lock:
            now = self._clock()
            if self._line and (self._terminal or now - self._wrote >= SILENCE_S):
                self._write(now)

    def clear(self) -> None:
        """The measurement is over: a terminal is left as it was found."""
        with self._lock:
            self._line = ""
            if self._terminal:
                self._put(_CLEAR)

    def _write(self, now: float) -> None:
        self._wrote = now
        taken = int(now - self._began)
        text = f"{self._line} ({taken} s)" if taken else self._line
        if self._terminal:
            self._put(f"{_CLEAR}{text[: shutil.get_terminal_size().columns - 1]}")
        else:
            self._put(f"{text}\n")

    def _put(self, text: str) -> None:
        with suppress(OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()


@contextmanager
def shown() -> Iterator[Progress]:
    """Progress on stderr, with a thread that keeps its time."""
    progress = Progress(sys.stderr)
    over = threading.Event()

    def keep_time() -> None:
        while not over.wait(TICK_S):
            progress.tick()

    thread = threading.Thread(target=keep_time, name="progress", daemon=True)
    thread.start()
    try:
        yield progress
    finally:
        over.set()
        thread.join()
        progress.clear()
