"""Files that are replaced as a whole, and survive a power loss: the old content, or the new one.

    replace_file(path, [data])   # written beside it, synced, renamed over it, directory synced

A rename alone may reach the disk before the data, and leave an empty file.
"""

import os
from collections.abc import Iterable
from pathlib import Path


def replace_file(path: Path, pieces: Iterable[bytes]) -> None:
    """Write these bytes to `path`, durable when this returns; a reader never sees half a file.

    If that fails, the file is as it was, and nothing is left beside it.
    """
    partial = partial_of(path)
    try:
        with open(partial, "wb") as file:
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def partial_of(path: Path) -> Path:
    """Where a file is written before it counts."""
    return path.with_name(f".{path.name}.partial")


def sync_directory(path: Path) -> None:
    """The names in a directory, on the disk."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
