"""The process of one part: started with its share of the cores, watched, and ended for sure."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from dora_rl.runtime import messages as ms
from dora_rl.runtime.local.channel import Channel, Gone

_LAST_WORDS = 2000  # bytes of a log that may tell why a process died
_FAULTS = {signal.SIGILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGABRT}
_END_S = 5.0  # from being told to end to being killed


class PartProcess:
    """One running part. `name` is for messages, `log` for what it prints."""

    def __init__(self, name: str, setup: ms.Setup, log: Path) -> None:
        self.name = name
        self._log = log
        self._killed = False  # by us
        ours, theirs = socket.socketpair()
        with theirs, open(log, "ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "dora_rl.runtime.local.part", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(theirs.fileno(),),
                env=_environment(setup.threads),
                start_new_session=True,  # an interrupt at the terminal is the driver's alone
            )
        ours.setblocking(False)
        self.channel = Channel(ours)
        with suppress(Gone):  # its death is noticed by whoever reads
            self.channel.send(setup)

    @property
    def pid(self) -> int:
        return self._process.pid

    def death(self, blame: Callable[[], str | None] = lambda: None) -> str:
        """What it died of, in one line; waits for the death.

        `blame` is asked who has sent a SIGKILL that was not ours.
        """
        try:
            code = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.kill()
            code = self._process.wait()
        how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        by = blame() if code == -signal.SIGKILL and not self._killed else None
        if by is not None:
            return f"{self.name} ended with {how}, {by}"
        words = self._last_words()
        return f"{self.name} ended with {how}{f': {words}' if words else ''}"

    @property
    def failed(self) -> bool:
        """Whether it ended by an error of its own: an exception, or a fault of the processor."""
        code = self._process.returncode
        return code is not None and (code > 0 or -code in _FAULTS)

    def _last_words(self) -> str:
        with suppress(OSError), open(self._log, "rb") as file:
            file.seek(max(0, self._log.stat().st_size - _LAST_WORDS))
            lines = file.read().decode(errors="replace").strip().splitlines()
            return lines[-1].strip() if lines else ""
        return ""

    def kill(self) -> None:
        """End it at once, with whatever it has started."""
        self._killed = True
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Ask it to end, and see to it that it does."""
        with suppress(Gone, OSError):
            self.channel.send(ms.Shutdown())
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self.kill()
        self._process.wait()
        self.channel.close()


def _environment(threads: int) -> dict[str, str]:
    """Its share of the cores.

    Threads that wait spin for some microseconds, as long as the next operation of a small model
    lets them wait, and then sleep: the cores belong to whoever computes.
    """
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OPENBLAS_NUM_THREADS": str(threads),
        "GOMP_SPINCOUNT": "20000",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
