"""The driver's side of the server that forks workers: one for all runs of a process.

A server is taken again as long as nothing has changed that its imports may depend on. What it does
not answer in time is ended with it, as any worker that hangs.
"""

import atexit
import logging
import os
import resource
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, ClassVar, NamedTuple

import msgspec

from dora_rl.framing import Frames, frame
from dora_rl.machine.fast_paths import Unavailable, fast_path, on_linux
from dora_rl.machine.gpus import may_have_gpu
from dora_rl.machine.parent import parent_death
from dora_rl.runtime.launchers.local.forkserver import (
    CHUNK,
    LARGEST,
    MODULE,
    Answer,
    Ended,
    Fork,
    Forked,
    NotForked,
    Refused,
)
from dora_rl.runtime.launchers.local.site import Site

_AT_ONCE_S = 0.001  # for what has been said already
_SEND_S = 120.0  # to take an order: it reads none while it imports
_STATUS = Path("/proc/thread-self/status")
_LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
_log = logging.getLogger(__name__)


@fast_path("worker-fork")
def worker_fork() -> tuple[str, int]:
    """Whether a process that has its imports can be forked, and its forks be watched."""
    if not on_linux():
        raise Unavailable("not Linux")
    if may_have_gpu():
        raise Unavailable("a GPU that an import has touched is lost to a fork")
    if not parent_death().in_force:
        raise Unavailable("workers would outlive their server")
    os.close(os.pidfd_open(os.getpid()))
    return "a server imports, and forks", 0


class Recipe(NamedTuple):
    """How a server is started."""

    command: tuple[str, ...]  # that runs the module which is named after it
    imports: tuple[str, ...]  # besides what every rollout worker imports
    environment: frozenset[tuple[str, str]]


class _Surroundings(NamedTuple):
    """What a process inherits when it starts, and its imports may depend on."""

    environment: frozenset[tuple[str, str]]
    directory: str
    cores: frozenset[int]
    nice: int
    umask: str
    limits: tuple[tuple[int, int], ...]
    thread: int  # the kernel ends the server with the thread that has started it

    @classmethod
    def now(cls) -> "_Surroundings":
        status = _STATUS.read_text(encoding="ascii", errors="replace").splitlines()
        directory = ""
        with suppress(FileNotFoundError):  # it was removed
            directory = os.getcwd()
        return cls(
            environment=frozenset(os.environ.items()),
            directory=directory,
            cores=frozenset(os.sched_getaffinity(0)),
            nice=os.getpriority(os.PRIO_PROCESS, 0),
            umask=next((line for line in status if line.startswith("Umask:")), ""),
            limits=tuple(map(resource.getrlimit, _LIMITS)),
            thread=threading.get_native_id(),
        )


class ForkedProcess:
    """A worker, as `subprocess.Popen` has it."""

    def __init__(self, server: "ForkServer") -> None:
        self._server = server
        self._pid: int | None = None  # until the server has answered, whose imports take seconds
        self.returncode: int | None = None

    @property
    def pid(self) -> int:
        """Waits for it."""
        while self._pid is None:
            if self.returncode is not None:
                raise ProcessLookupError("it was never started")
            self._server.hear(None)
        return self._pid

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                assert timeout is not None
                raise subprocess.TimeoutExpired(MODULE, timeout)
            self._server.hear(left)
        return self.returncode

    def kill(self) -> None:
        """With all that it has started. One that is not there yet will not be, nor its server."""
        if self.returncode is None:
            self._server.hear(_AT_ONCE_S)
        if self._pid is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._pid, signal.SIGKILL)
        elif self.returncode is None:
            self._server.kill()

    def give_up(self) -> None:
        """It is dead, and its server does not say so: end that as well."""
        self._server.kill()

    def started(self, pid: int) -> None:
        self._pid = pid

    def ended(self, code: int) -> None:
        self.returncode = code


class ForkServer:
    """The driver's end of a server."""

    refused: str | None = None
    """Why workers are no forks in this process, though the fast path is in force."""
    _shared: ClassVar[dict[tuple[_Surroundings, Recipe], "ForkServer"]] = {}
    _sharing: ClassVar[threading.Lock] = threading.Lock()

    @classmethod
    def of_this_process(cls, recipe: Recipe, log: BinaryIO) -> "ForkServer | None":
        """The one that was so started in the surroundings of now, or a new one; None if refused.

        `log` has what goes wrong before a new one serves.
        """
        now = _Surroundings.now()
        key = (now, recipe)
        with cls._sharing:
            cls._end_stale(now)
            if cls.refused is not None:
                return None
            if key not in cls._shared:
                cls._shared[key] = cls(recipe, log)
            return cls._shared[key]

    @classmethod
    def _end_stale(cls, now: _Surroundings) -> None:
        """Those of threads that have ended, and of this one: others may be about to use theirs."""
        living = {thread.native_id for thread in threading.enumerate()}
        for (surroundings, recipe), server in list(cls._shared.items()):
            thread = surroundings.thread
            unused = server.idle and (surroundings != now or cls.refused is not None)
            if thread not in living or (thread == now.thread and (unused or not server.alive)):
                cls._shared.pop((surroundings, recipe)).close()

    def __init__(self, recipe: Recipe, log: BinaryIO) -> None:
        self._socket, theirs = socket.socketpair()
        self._frames = Frames(LARGEST)
        self._unanswered: deque[ForkedProcess] = deque()
        self._running: dict[int, ForkedProcess] = {}
        self._environment = dict(recipe.environment)
        self._over = False
        with theirs:
            arguments = (MODULE, str(theirs.fileno()), str(os.getpid()), *recipe.imports)
            self._process = subprocess.Popen(
                [*recipe.command, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                pass_fds=(theirs.fileno(),),
                env=self._environment,
                start_new_session=True,  # an interrupt at the terminal is the driver's alone
            )
        atexit.register(self.close)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def idle(self) -> bool:
        return not self._running and not self._unanswered

    def fork(
        self, name: str, site: Site, environment: dict[str, str], channel: socket.socket, log: int
    ) -> ForkedProcess:
        """A worker that has this end of a channel, and this file for its output."""
        site = site._replace(parent=self._process.pid)
        changed = {k: v for k, v in environment.items() if self._environment.get(k) != v}
        content = frame(msgspec.json.encode(Fork(name, site.encode(), changed)))
        process = ForkedProcess(self)
        self._unanswered.append(process)
        try:
            self._socket.settimeout(_SEND_S)
            sent = socket.send_fds(self._socket, [content], [channel.fileno(), log])
            self._socket.sendall(content[sent:])
        except OSError:  # it is gone, or hangs: whoever waits for the worker hears of it
            self.kill()
        except BaseException:  # half an order may be out
            self.kill()
            raise
        return process

    def hear(self, timeout_s: float | None) -> None:
        """Wait for news of workers, and pass them on."""
        self._socket.settimeout(timeout_s)
        try:
            data = self._socket.recv(CHUNK)
        except TimeoutError:
            return
        except OSError:
            data = b""
        if not data:
            self._gone()
        for content in self._frames.feed(data):
            match msgspec.json.decode(content, type=Answer):
                case Forked(pid):
                    process = self._unanswered.popleft()
                    process.started(pid)
                    self._running[pid] = process
                case NotForked():
                    self._unanswered.popleft().ended(1)
                case Ended(pid, code):
                    self._running.pop(pid).ended(code)
                case Refused(why):
                    ForkServer.refused = why
                    _log.warning("workers start as fresh interpreters from now on: %s", why)

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        """End it, and its workers with it."""
        atexit.unregister(self.close)
        self.kill()
        while not self._over:  # what it has said is heard
            self.hear(None)
        self._socket.close()

    def _gone(self) -> None:
        """The kernel ends its workers with it; what was not started ended as it did."""
        code = self._process.wait()
        self._over = True
        for process in self._running.values():
            process.ended(-signal.SIGKILL)
        for process in self._unanswered:
            process.ended(code)
        self._running.clear()
        self._unanswered.clear()
