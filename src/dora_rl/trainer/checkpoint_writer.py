"""Writes one checkpoint in a thread of its own. It knows neither tensors nor files."""

import traceback
from collections.abc import Callable
from pathlib import Path
from threading import Thread


class CheckpointWriter:
    """Runs `write` for one checkpoint, from its creation on; `failure` tells what went wrong."""

    def __init__(self, directory: Path, write: Callable[[], None]) -> None:
        self.directory = directory
        self._error: BaseException | None = None
        # No daemon: a process that ends lets it end too, whole or cleaned up.
        self._thread = Thread(target=self._run, args=(write,), name="dora-rl checkpoint")
        self._thread.start()

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:
            self._error = error
            del write
            _clear_frames(error)

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until it has ended, well or not, but no longer than this; whether it has."""
        self._thread.join(timeout_s)
        return self.done

    @property
    def failure(self) -> str | None:
        """Why there is no checkpoint, in one line; None as long as nothing went wrong."""
        if self._error is None:
            return None
        return " ".join(str(self._error).split()) or type(self._error).__name__

    def check(self) -> None:
        """Raise what went wrong."""
        if self._error is not None:
            raise self._error


def _clear_frames(error: BaseException | None) -> None:
    """An error remembers every frame that it passed, and those the copies of all weights."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__
