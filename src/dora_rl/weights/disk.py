"""Every call to the file system that the weight store makes, and nothing else.

A failing call becomes a `WeightsError` that names the path and the fix. Calls go through `os`,
one kind in one function, so that a test can fail any one of them.
"""

import errno
import fcntl
import mmap
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dora_rl.weights.errors import WeightsError

_POLL_S = 0.02
_LOCK_MODE = 0o222  # but for the umask
_MAX_WRITE = 1 << 30  # Linux writes no more than 2 GB in one call
_FIXES = {
    errno.ENOSPC: "Free space on this disk, then publish again.",
    errno.EDQUOT: "Free space within the quota, then publish again.",
    errno.EACCES: "Check the permissions of this path.",
    errno.EPERM: "Check the permissions of this path.",
    errno.EROFS: "Name a directory that can be written.",
    errno.ENOENT: "Check the path; it may have been deleted.",
    errno.ELOOP: "Put the file itself here, not a link to it.",
    errno.ENOMEM: "It is larger than this machine's memory can hold or map.",
    errno.EMFILE: "Raise the limit of open files (`ulimit -n`).",
    errno.EOPNOTSUPP: "Use a file system that has file locks.",
    errno.ENOLCK: "Use a file system that has file locks.",
}


@contextmanager
def _naming(doing: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        fix = _FIXES.get(error.errno or 0, "Check this disk, then try again.")
        raise WeightsError(f"cannot {doing} `{path}`: {error.strerror or error}. {fix}") from error


def make_root(path: Path) -> None:
    """A directory and those above it, where they are missing; they survive a power failure."""
    if exists(path):
        return
    make_root(path.parent)
    with _naming("make the directory", path), suppress(FileExistsError):
        os.mkdir(path)
    sync_directory(path.parent)


def make_directory(path: Path) -> None:
    with _naming("make the directory", path):
        os.mkdir(path)


@contextmanager
def new_file(
    path: Path, *, durable: bool = True, mode: int = 0o444
) -> Iterator[Callable[[bytes | memoryview], None]]:
    """A function that appends to a new file; on leaving, all of it is on the disk, if `durable`.

    Read-only from the start: whoever has it in memory must not see it change.
    """
    with _naming("create", path):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        yield lambda data: _write(fd, data, path)
        if durable:
            _sync(fd, path)
    finally:
        _close(fd, path)


def _write(fd: int, data: bytes | memoryview, path: Path) -> None:
    rest = memoryview(data)
    with _naming("write", path):
        while rest:
            written = os.write(fd, rest[:_MAX_WRITE])
            if not written:
                raise OSError(errno.EIO, "no byte was taken")
            rest = rest[written:]


def _sync(fd: int, path: Path) -> None:
    with _naming("sync", path):
        os.fsync(fd)


def _close(fd: int, path: Path) -> None:
    with _naming("close", path):
        os.close(fd)


def _close_unchanged(fd: int) -> None:
    """Nothing was written: an error on closing cannot have lost anything."""
    with suppress(OSError):
        os.close(fd)


def sync_directory(path: Path) -> None:
    """Make the names in a directory survive a power failure."""
    with _naming("open", path):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _sync(fd, path)
    finally:
        _close(fd, path)


def rename(source: Path, target: Path) -> None:
    with _naming("rename to", target):
        os.rename(source, target)


def exists(path: Path) -> bool:
    with _naming("look at", path):
        try:
            os.lstat(path)
        except FileNotFoundError:
            return False
        return True


def size(path: Path) -> int:
    with _naming("look at", path):
        return os.lstat(path).st_size


def names(path: Path) -> list[str]:
    """What a directory holds, in order of name."""
    with _naming("list", path):
        return sorted(os.listdir(path))


def remove_tree(path: Path) -> None:
    """Remove a directory that nobody else can see; another may be removing it too.

    A link, or a file in its place, is removed itself: what it leads to is not ours.
    Some network file systems keep a deleted file until its last mapping is gone: then the
    directory stays, and the next sweep takes it.
    """
    with _naming("remove", path):
        try:
            is_directory = stat.S_ISDIR(os.lstat(path).st_mode)
        except FileNotFoundError:
            return
        if not is_directory:
            with suppress(FileNotFoundError):
                os.unlink(path)
            return
        with suppress(FileNotFoundError), os.scandir(path) as found:
            for entry in found:
                if entry.is_dir(follow_symlinks=False):
                    remove_tree(Path(entry.path))
                else:
                    with suppress(FileNotFoundError):
                        os.unlink(entry.path)
        with suppress(FileNotFoundError):
            try:
                os.rmdir(path)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise


@contextmanager
def locked(path: Path, timeout_s: float) -> Iterator[None]:
    """Hold the lock that this file is. The kernel frees it when its holder dies.

    To lock a file it must be open, and this one can be opened for writing alone: a reward, which
    may write nothing, cannot hold up a publication.
    """
    with _naming("open", path):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, _LOCK_MODE)
    try:
        _close_to_readers(fd, path)
        _wait_for_lock(fd, path, timeout_s)
        try:
            yield
        finally:
            # Explicitly: a child that was forked meanwhile has a copy of the descriptor.
            fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        _close_unchanged(fd)


def _close_to_readers(fd: int, path: Path) -> None:
    """Of a lock that an earlier release made; one of another user's is left as it is."""
    with _naming("open", path):
        mode = stat.S_IMODE(os.fstat(fd).st_mode)
        if mode & ~_LOCK_MODE:
            with suppress(PermissionError):
                os.fchmod(fd, mode & _LOCK_MODE)


def _wait_for_lock(fd: int, path: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        with _naming("lock", path):
            try:
                return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pass
        if time.monotonic() >= deadline:
            raise WeightsError(
                f"another process has been publishing for {timeout_s:g} s: it holds `{path}`. "
                "End it (`fuser` names it), then publish again."
            )
        time.sleep(_POLL_S)


@contextmanager
def _opened(path: Path, *, follow_links: bool) -> Iterator[tuple[int, int]]:
    """A regular file to read and its size; never waits for a pipe."""
    follow = 0 if follow_links else os.O_NOFOLLOW
    with _naming("open", path):
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | follow)
    try:
        with _naming("open", path):
            status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise WeightsError(f"not a regular file: `{path}`. Put the file itself here.")
        yield fd, status.st_size
    finally:
        _close_unchanged(fd)


def read_small(path: Path, limit: int, *, follow_links: bool = False) -> bytes:
    """The whole of a file that must not be larger than `limit`; a larger one is not read."""
    with _opened(path, follow_links=follow_links) as (fd, size):
        _check_size(size, limit, path)
        chunks = []
        with _naming("read", path):
            while chunk := os.read(fd, 1 << 20):
                chunks.append(chunk)
                _check_size(sum(map(len, chunks)), limit, path)
        return b"".join(chunks)


def _check_size(size: int, limit: int, path: Path) -> None:
    if size > limit:
        raise WeightsError(f"`{path}` has {size} bytes; the limit is {limit}. It is not read.")


def map_file(path: Path, *, follow_links: bool = False) -> mmap.mmap | None:
    """A file in memory without a copy of it; none if it is empty.

    The mapping is private: writing to it changes neither the file nor other processes. It
    stays when the file is deleted.
    """
    with _opened(path, follow_links=follow_links) as (fd, size), _naming("map", path):
        return mmap.mmap(fd, size, access=mmap.ACCESS_COPY) if size else None
