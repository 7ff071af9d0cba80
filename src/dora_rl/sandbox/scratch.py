"""The end of a directory that workers wrote to, whatever they made in it."""

import itertools
import os
import stat
import time
from collections.abc import Iterator
from contextlib import suppress

_END_S = 5.0  # the rest stays: nobody is to wait for ever


def remove(path: str) -> None:
    """Remove a directory with all in it, as far as we may; links are not followed.

    What is deep is moved up first, so that neither the stack nor the number of open files nor
    the length of a path is an end to it.
    """
    deadline = time.monotonic() + _END_S
    numbers = itertools.count()
    with suppress(OSError):
        top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            changed = True
            while changed and time.monotonic() < deadline:
                changed = False
                for name in _strip(top):
                    changed |= _level(top, name, numbers)
        finally:
            os.close(top)
        os.rmdir(path)


def _strip(directory: int) -> list[str]:
    """Remove all files of a directory; the names of the directories that are left."""
    found = []
    for name in os.listdir(directory):
        with suppress(OSError):
            if stat.S_ISDIR(os.lstat(name, dir_fd=directory).st_mode):
                found.append(name)
            else:
                os.unlink(name, dir_fd=directory)
    return found


def _level(top: int, name: str, numbers: Iterator[int]) -> bool:
    """Move what a directory has to the top, and remove it; whether anything was done."""
    changed = False
    with suppress(OSError):
        os.chmod(name, 0o700, dir_fd=top)
        directory = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
        try:
            for inner in _strip(directory):
                with suppress(OSError):
                    os.chmod(inner, 0o700, dir_fd=directory)
                    # Onto another that is there already it fails, and has a new name next time.
                    place = f".{next(numbers)}"
                    os.rename(inner, place, src_dir_fd=directory, dst_dir_fd=top)
                    changed = True
        finally:
            os.close(directory)
        os.rmdir(name, dir_fd=top)
        changed = True
    return changed
