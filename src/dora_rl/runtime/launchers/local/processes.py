"""The process of one worker: started with its share of the cores, watched, and ended for sure."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from dora_rl import logs
from dora_rl.engines.registry import Interpreter
from dora_rl.machine import run_module
from dora_rl.runtime.control import messages as ms
from dora_rl.runtime.launchers.local.channel import Channel, Gone
from dora_rl.runtime.launchers.local.forkserver import TRAINER
from dora_rl.runtime.launchers.local.forkserver_client import ForkedProcess, ForkServer, Recipe
from dora_rl.runtime.launchers.local.site import Site

_WORKER = "dora_rl.runtime.launchers.local.worker"
_IMPORTS = ("dora_rl.engines.embedded.engine", TRAINER)  # of a server that forks workers
_LOG_END = 1 << 16  # bytes of a log that may tell why a process died
_LONGEST_WORDS = 2000  # characters of the line that does
_FAULTS = {signal.SIGILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGABRT}
_END_S = 5.0  # from being told to end to being killed
_DEATH_S = 30.0  # from the end of its channel to its own: a large interpreter takes its time


class Exit(NamedTuple):
    """How a process ended."""

    code: int  # negative: the signal that ended it
    killed: bool  # by us
    words: str  # the last that it printed, no log record among them

    def described(self, name: str, blame: Callable[[], str | None] = lambda: None) -> str:
        """In one line; `blame` is asked who has sent a SIGKILL that was not ours."""
        code = self.code
        how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        by = blame() if code == -signal.SIGKILL and not self.killed else None
        if by is not None:
            return f"{name} ended with {how}, {by}"
        return f"{name} ended with {how}{f': {self.words}' if self.words else ''}"

    @property
    def failed(self) -> bool:
        """Whether by an error of its own: an exception, or a fault of the processor."""
        return self.code > 0 or -self.code in _FAULTS


class WorkerProcess:
    """One running worker. `name` is for messages; `log` gets what it prints.

    The incarnations of a worker share the log, each after the one before.
    """

    def __init__(
        self,
        name: str,
        setup: ms.Setup,
        site: Site,
        log: Path,
        interpreter: Interpreter | None = None,
        *,
        forked: bool = False,
    ) -> None:
        """By this Python or, where an engine has an environment of its own, by another one.

        With `forked` it is a fork of a process that has imported what it needs.
        """
        self.name = name
        self._log = log
        self._killed = False  # by us
        ours, theirs = socket.socketpair()
        with theirs, open(log, "ab") as output:
            self._log_start = output.tell()  # after what earlier incarnations have written
            environment = worker_environment(setup.threads, interpreter)
            server = ForkServer.of_this_process(_recipe(interpreter), output) if forked else None
            self._process: subprocess.Popen[bytes] | ForkedProcess
            if server is not None:
                self._process = server.fork(log.stem, site, environment, theirs, output.fileno())
            else:
                self._process = subprocess.Popen(
                    [*_command(interpreter), _WORKER, str(theirs.fileno()), site.encode()],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=[fd for fd in (theirs.fileno(), site.objects) if fd is not None],
                    env=environment,
                    start_new_session=True,  # an interrupt at the terminal is the driver's alone
                )
        ours.setblocking(False)
        self.channel = Channel(ours)
        with suppress(Gone):  # its death is noticed on reading
            self.channel.send(setup)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def waiting(self) -> bool:
        """A process of this machine waits for no resources."""
        return False

    def exit(self) -> Exit:
        """How it ended; waits for that."""
        try:
            code = self._process.wait(_DEATH_S)
        except subprocess.TimeoutExpired:
            self.kill()
            code = self._reaped()
        return Exit(code, self._killed, self._last_words())

    def death(self, blame: Callable[[], str | None] = lambda: None) -> str:
        """What it died of, in one line; waits for the death."""
        return self.exit().described(self.name, blame)

    @property
    def failed(self) -> bool:
        """Whether it has ended by an error of its own."""
        code = self._process.returncode
        return code is not None and Exit(code, self._killed, "").failed

    def _last_words(self) -> str:
        return last_words(self._log, self._log_start)

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it is still there."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def kill(self) -> None:
        """End it at once, with whatever it has started."""
        self._killed = True
        if isinstance(self._process, ForkedProcess):
            self._process.kill()
        else:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Ask it to end, and see to it that it does."""
        with suppress(Gone, OSError):
            self.channel.send(ms.Shutdown())
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self.kill()
        self._reaped()
        self.channel.close()

    def _reaped(self) -> int:
        """The exit code of one that was killed."""
        try:
            return self._process.wait(_DEATH_S)
        except subprocess.TimeoutExpired:
            if isinstance(self._process, ForkedProcess):
                self._process.give_up()
            return self._process.wait()


def last_words(log: Path, since: int) -> str:
    """The last line in a log, after so many bytes, that is no log record; empty without one."""
    with suppress(OSError), open(log, "rb") as file:
        start = max(since, log.stat().st_size - _LOG_END)
        file.seek(start)
        if start > since:
            file.readline()  # the rest of a line: it could not be told from a log record
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
        words = [line for line in lines if line and not logs.is_line(line)]
        return words[-1][:_LONGEST_WORDS] if words else ""
    return ""


def _command(interpreter: Interpreter | None) -> tuple[str, ...]:
    """What runs a module that is named after it."""
    if interpreter is None:
        return (sys.executable, "-m")
    return (str(interpreter.python), "-I", "-u", run_module.__file__)


def _recipe(interpreter: Interpreter | None) -> Recipe:
    """Of the server that forks such workers, whatever their share of the cores."""
    imports = _IMPORTS if interpreter is None else interpreter.imports
    environment = worker_environment(1, interpreter)
    return Recipe(_command(interpreter), imports, frozenset(environment.items()))


def worker_environment(threads: int, interpreter: Interpreter | None) -> dict[str, str]:
    """A worker's share of the cores, and what its Python reads.

    Threads that wait spin for some microseconds, as long as the next operation of a small model
    lets them wait, and then sleep: the cores belong to those that compute. With 20,000 turns
    instead, two processes that share their cores took three times as long for a step.
    """
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OPENBLAS_NUM_THREADS": str(threads),
        "GOMP_SPINCOUNT": "5000",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        **(interpreter.variables if interpreter is not None else {}),
    }
