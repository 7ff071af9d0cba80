"""The driver process of a run under chaos: started, observed, stopped and killed by the storm."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from dora_rl.faultlab.disk import Disk
from dora_rl.faultlab.processes import descendants, signal_to, workers_of_run
from dora_rl.runtime.errors import RunFailed

_GONE_S = 30.0  # for processes that were killed
_FAILED, _BAD_INPUT, STOPPED = 1, 2, 130  # exit codes of `dora-rl train`


class DriverProcess:
    """One incarnation of the driver, from a start or a resume to its exit; output goes to `log`."""

    def __init__(
        self,
        arguments: Sequence[str],
        log: Path,
        seed: int,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`seed` draws the messages that are duplicated; `environment` is added to ours."""
        ours, theirs = socket.socketpair()
        self._socket = ours
        self._log = log
        with theirs, open(log, "ab") as output:
            self._began = output.tell()
            command = [sys.executable, "-m", "dora_rl.faultlab.driver_main"]
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(seed), *arguments],
                stdout=output,
                stderr=output,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, **(environment or {})},
            )
        self.disk = Disk(ours)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def failed(self) -> bool:
        """Whether it exited with an error of its own."""
        return self._process.poll() in (_FAILED, _BAD_INPUT)

    @property
    def refused_input(self) -> bool:
        """Whether it refused its input before it trained anything."""
        return self._process.poll() == _BAD_INPUT

    @property
    def error_message(self) -> str:
        """The last error that it printed; empty if there is none."""
        _, found, rest = f"\n{self._output}".rpartition("\nerror: ")
        return rest if found else ""

    @property
    def _output(self) -> str:
        """What it has printed so far."""
        with open(self._log, "rb") as file:
            file.seek(self._began)
            return file.read().decode(errors="replace")

    @property
    def has_trained(self) -> bool:
        """Whether it has trained a step."""
        return re.search(r"^step \d", self._output, re.MULTILINE) is not None

    def repeat_messages(self, for_s: float) -> bool:
        """Duplicate messages for that long; whether the driver was there to be told."""
        with suppress(OSError):
            self._socket.sendall(f"{for_s}\n".encode())
            return True
        return False

    def stop(self, within_s: float) -> int:
        """Send SIGTERM and wait; the exit code, `STOPPED` (as after Ctrl-C) if all is well."""
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise RunFailed(
                f"the run did not exit within {within_s:g} s of SIGTERM: see {self._log}"
            ) from None

    def kill(self, run: Path) -> None:
        """Kill the driver and all that it has started, and wait until they are gone."""
        left = set(workers_of_run(run).values())
        if not self.ended:  # else its pid may have been reused
            left |= {self.pid, *descendants(self.pid)}
        for pid in left:
            signal_to(pid, signal.SIGKILL)
        self._process.wait()
        deadline = time.monotonic() + _GONE_S
        while workers_of_run(run):
            if time.monotonic() > deadline:
                raise RunFailed(f"processes of the run survive SIGKILL: {workers_of_run(run)}")
            time.sleep(0.05)
        self.close()

    def close(self) -> None:
        """Release the socket of a driver that has exited."""
        self._socket.close()
