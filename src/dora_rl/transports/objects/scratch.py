"""A directory of one worker on its own node, for copies that nobody else needs.

    TMPDIR/dora-rl-UID/XXXX/    locked by the process that made it, for as long as that lives

What a process that was killed has left is removed by the next one that needs a directory here.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_LOCK = ".lock"


class Scratch:
    """`path` is empty, and ours alone."""

    def __init__(self, parent: Path | None = None) -> None:
        """An `OSError` if there can be none."""
        parent = parent or Path(tempfile.gettempdir(), f"dora-rl-{os.getuid()}")
        parent.mkdir(mode=0o700, exist_ok=True)
        if parent.stat().st_uid != os.getuid():
            raise PermissionError(f"`{parent}` is another user's. Set TMPDIR.")
        # Made and locked within the lock of all: a directory without a lock is nobody's.
        with _locked(parent / _LOCK, fcntl.LOCK_EX):
            _sweep(parent)
            self.path = Path(tempfile.mkdtemp(dir=parent))
            self._fd = _open(self.path / _LOCK)
            fcntl.flock(self._fd, fcntl.LOCK_EX)

    def close(self) -> None:
        """Remove it with all that is in it; again: does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(fd)


@contextmanager
def _locked(path: Path, how: int) -> Iterator[None]:
    fd = _open(path)
    try:
        fcntl.flock(fd, how)
        yield
    finally:
        os.close(fd)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _sweep(parent: Path) -> None:
    for path in parent.iterdir():
        if path.is_dir() and not path.is_symlink():
            at_once = fcntl.LOCK_EX | fcntl.LOCK_NB
            with suppress(OSError), _locked(path / _LOCK, at_once):  # else its maker lives
                shutil.rmtree(path, ignore_errors=True)
