"""The lock of a run: one process at a time carries it. It knows nothing of what is locked."""

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from dora_rl.store.errors import LedgerError

_WIDTH = 20  # of a process id in the file


def is_held(path: Path) -> bool:
    """Whether some process has the lock at this moment."""
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


class RunLock:
    """Held from its making until `release`, or until the process ends, however it does.

    The file stays: to remove it while somebody waits at its door would let two in.
    """

    def __init__(self, path: Path) -> None:
        self._holder = os.getpid()
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise LedgerError(
                f"cannot lock `{path}`: {error.strerror}. "
                "Check that its directory is there and can be written."
            ) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Padded over the last holder's: to cut the file first makes some file systems wait.
            os.pwrite(self._fd, str(self._holder).ljust(_WIDTH).encode(), 0)
        except BlockingIOError:
            holder = os.pread(self._fd, _WIDTH, 0).decode("ascii", "replace").strip()
            os.close(self._fd)
            raise LedgerError(
                f"the run is going on in process {holder or 'unknown'}: `{path}` is locked. "
                "Wait for its end, or stop it."
            ) from None
        except OSError as error:
            os.close(self._fd)
            raise LedgerError(
                f"cannot lock `{path}`: {error.strerror}. "
                "Use a disk with free space and a file system that has locks."
            ) from error

    def release(self) -> None:
        """In a fork, closes the copy alone: the parent still has the lock."""
        fd, self._fd = self._fd, -1
        with suppress(OSError):  # a second time, or a fork that has closed its files
            if os.getpid() == self._holder:
                fcntl.flock(fd, fcntl.LOCK_UN)  # a fork may not have closed its copy yet
            os.close(fd)
