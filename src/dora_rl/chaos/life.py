"""One life of a run: its driver's process, what it said, and our hands on it."""

import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from dora_rl.chaos.disk import Disk
from dora_rl.chaos.processes import below, parts, signal_to
from dora_rl.runtime.errors import RunFailed

_GONE_S = 30.0  # for processes that were killed
_FAILED, _BAD_INPUT, _STOPPED = 1, 2, 130  # exit codes of `dora-rl train`


class Life:
    """From a start or a resume to the driver's end. Its output is appended to `log`."""

    def __init__(self, arguments: Sequence[str], log: Path, seed: int) -> None:
        """`seed` is of the messages that are heard again."""
        ours, theirs = socket.socketpair()
        self._line = ours
        self._log = log
        with theirs, open(log, "ab") as output:
            self._began = output.tell()
            command = [sys.executable, "-m", "dora_rl.chaos.driver"]
            self._driver = subprocess.Popen(
                [*command, str(theirs.fileno()), str(seed), *arguments],
                stdout=output,
                stderr=output,
                pass_fds=(theirs.fileno(),),
            )
        self.disk = Disk(ours)

    @property
    def pid(self) -> int:
        return self._driver.pid

    @property
    def ended(self) -> bool:
        return self._driver.poll() is not None

    @property
    def failed(self) -> bool:
        """Whether it ended by itself, and not well."""
        return self._driver.poll() in (_FAILED, _BAD_INPUT)

    @property
    def refused_input(self) -> bool:
        """Whether it did not begin, since it did not like what it read."""
        return self._driver.poll() == _BAD_INPUT

    @property
    def complaint(self) -> str:
        """The error that it ended with, if it said one."""
        _, found, rest = f"\n{self._words}".rpartition("\nerror: ")
        return rest if found else ""

    @property
    def _words(self) -> str:
        """What it has said."""
        with open(self._log, "rb") as file:
            file.seek(self._began)
            return file.read().decode(errors="replace")

    @property
    def works(self) -> bool:
        """Whether it has taken a step."""
        return re.search(r"^step \d", self._words, re.MULTILINE) is not None

    def repeat_messages(self, for_s: float) -> bool:
        """Whether it was there to be told."""
        with suppress(OSError):
            self._line.sendall(f"{for_s}\n".encode())
            return True
        return False

    def ask_to_end(self, within_s: float) -> None:
        """It must end as after Ctrl-C."""
        self._driver.send_signal(signal.SIGTERM)
        try:
            code = self._driver.wait(within_s)
        except subprocess.TimeoutExpired:
            raise RunFailed(f"the run did not end when it was asked to: see {self._log}") from None
        if code != _STOPPED:
            raise RunFailed(
                f"the run was asked to end, and ended with exit code `{code}` instead of "
                f"{_STOPPED}: see {self._log}"
            )

    def kill(self, run: Path) -> None:
        """The driver and all that it has started, gone."""
        left = set(parts(run).values())
        if not self.ended:  # else its number may be another's by now
            left |= {self.pid, *below(self.pid)}
        for pid in left:
            signal_to(pid, signal.SIGKILL)
        self._driver.wait()
        deadline = time.monotonic() + _GONE_S
        while parts(run):
            if time.monotonic() > deadline:
                raise RunFailed(f"processes of the run survive SIGKILL: {parts(run)}")
            time.sleep(0.05)
        self.close()

    def close(self) -> None:
        """It has ended: we have nothing more to tell it."""
        self._line.close()
