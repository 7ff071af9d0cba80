"""Workers as forks of a process that has imported what they need: they start in milliseconds.

    driver    Fork, with the worker's socket and log  ->  server    fork  ->  worker
              <-  Forked(pid)
              <-  Ended(code)                                             <-  its end

The server imports and does nothing else, so that a fork inherits one thread, no pool of OpenMP and
no device. It serves all runs of a process, ends with it, and its workers end with it.
"""

import atexit
import gc
import importlib
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, ClassVar, NamedTuple

import msgspec

from dora_rl.framing import Frames, frame
from dora_rl.machine.fast_paths import Unavailable, fast_path, on_linux
from dora_rl.machine.gpus import may_have_gpu
from dora_rl.machine.parent import die_with_parent
from dora_rl.runtime.launchers.local import worker
from dora_rl.runtime.launchers.local.site import Site

MODULE = "dora_rl.runtime.launchers.local.forkserver"
_LARGEST = 1 << 24  # bytes of one message: an environment is the longest part
_CHUNK = 1 << 16
_FILES = 16  # at most, that come with what is received at once
_THREADS = Path("/proc/self/task")
_NAME = Path("/proc/self/comm")
_NAME_BYTES = 15
_AT_ONCE_S = 0.001  # for what has been said already
_IMPORTED = (
    "dora_rl.runtime.workers.engines",
    "dora_rl.runtime.workers.heartbeat",
    "dora_rl.runtime.workers.rollout",
    "dora_rl.transports.kv.shared_directory",
)
TRAINER = "dora_rl.runtime.workers.trainer"


class Fork(msgspec.Struct, tag=True, frozen=True):
    """A worker is wanted. With it come two files: its socket and its log."""

    name: str
    site: Site
    environment: dict[str, str]


class Forked(msgspec.Struct, tag=True, frozen=True):
    """The answer to each `Fork`, in their order."""

    pid: int


class Ended(msgspec.Struct, tag=True, frozen=True):
    pid: int
    code: int  # negative: the signal that ended it


class Refused(msgspec.Struct, tag=True, frozen=True):
    """No fork of it can be trusted."""

    why: str


_Answer = Forked | Ended | Refused
_log = logging.getLogger(MODULE)  # it is run as __main__


@fast_path("worker-fork")
def worker_fork() -> tuple[str, int]:
    """Whether a process that has its imports can be forked, and its forks be watched."""
    if not on_linux():
        raise Unavailable("not Linux")
    if may_have_gpu():
        raise Unavailable("a GPU that an import has touched is lost to a fork")
    os.close(os.pidfd_open(os.getpid()))
    return "a server imports, and forks", 0


# The driver's side


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
    thread: int  # the kernel ends the server with the thread that has started it

    @classmethod
    def now(cls) -> "_Surroundings":
        cores = frozenset(os.sched_getaffinity(0))
        return cls(frozenset(os.environ.items()), os.getcwd(), cores, threading.get_native_id())


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

    def started(self, pid: int) -> None:
        self._pid = pid

    def ended(self, code: int) -> None:
        self.returncode = code


class ForkServer:
    """The driver's end of a server."""

    refused: str | None = None
    """Why workers are no forks in this process, though the fast path is in force."""
    _shared: ClassVar[dict[tuple[_Surroundings, Recipe], "ForkServer"]] = {}

    @classmethod
    def of_this_process(cls, recipe: Recipe, log: BinaryIO) -> "ForkServer | None":
        """The one that was so started in the surroundings of now, or a new one; None if refused.

        `log` has what goes wrong before a new one serves.
        """
        if cls.refused is not None:
            return None
        now = _Surroundings.now()
        for (surroundings, other), server in list(cls._shared.items()):
            if not server.alive or (surroundings != now and server.idle):
                cls._shared.pop((surroundings, other)).close()
        key = (now, recipe)
        if key not in cls._shared:
            cls._shared[key] = cls(recipe, log)
        return cls._shared[key]

    def __init__(self, recipe: Recipe, log: BinaryIO) -> None:
        self._socket, theirs = socket.socketpair()
        self._frames = Frames(_LARGEST)
        self._unanswered: deque[ForkedProcess] = deque()
        self._running: dict[int, ForkedProcess] = {}
        with theirs:
            arguments = (MODULE, str(theirs.fileno()), str(os.getpid()), *recipe.imports)
            self._process = subprocess.Popen(
                [*recipe.command, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                pass_fds=(theirs.fileno(),),
                env=dict(recipe.environment),
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
        process = ForkedProcess(self)
        self._unanswered.append(process)
        site = site._replace(parent=self._process.pid)
        content = frame(msgspec.json.encode(Fork(name, site, environment)))
        self._socket.settimeout(None)
        with suppress(OSError):  # it is gone: whoever waits for the worker hears of it
            sent = socket.send_fds(self._socket, [content], [channel.fileno(), log])
            self._socket.sendall(content[sent:])
        return process

    def hear(self, timeout_s: float | None) -> None:
        """Wait for news of workers, and pass them on."""
        self._socket.settimeout(timeout_s)
        try:
            data = self._socket.recv(_CHUNK)
        except TimeoutError:
            return
        except OSError:
            data = b""
        if not data:
            self._gone()
        for content in self._frames.feed(data):
            match msgspec.json.decode(content, type=_Answer):
                case Forked(pid):
                    process = self._unanswered.popleft()
                    process.started(pid)
                    self._running[pid] = process
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
        self._gone()
        self._socket.close()

    def _gone(self) -> None:
        """The kernel ends its workers with it; what was not started ended as it did."""
        code = self._process.wait()
        for process in self._running.values():
            process.ended(-signal.SIGKILL)
        for process in self._unanswered:
            process.ended(code)
        self._running.clear()
        self._unanswered.clear()


# The server's side


class _Work(NamedTuple):
    """What a fork is to do."""

    channel: int
    site: Site


def main(fd: int, driver: int, imports: Sequence[str]) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(driver)
    for name in (*_IMPORTED, *imports):
        importlib.import_module(name)
    work = _Server(socket.socket(fileno=fd), trains=TRAINER in imports).loop()
    return 0 if work is None else worker.main(work.channel, work.site)


class _Server:
    def __init__(self, control: socket.socket, *, trains: bool) -> None:
        self._control = control
        self._trains = trains
        self._frames = Frames(_LARGEST)
        self._files: list[int] = []  # that came with what is not whole yet
        self._models: set[str] = set()  # whose code is imported
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        self._null = os.open(os.devnull, os.O_WRONLY)

    def loop(self) -> _Work | None:
        """Until the driver is gone; or, in a fork, its work."""
        while True:
            for key, _ in self._selector.select():
                if key.data is not None:
                    self._reap(key.fd, key.data)
                    continue
                data, files, _, _ = socket.recv_fds(self._control, _CHUNK, _FILES)
                if not data:
                    return None
                self._files += files
                for content in self._frames.feed(data):
                    work = self._fork(msgspec.json.decode(content, type=Fork))
                    if work is not None:
                        return work

    def _fork(self, order: Fork) -> _Work | None:
        channel, log = self._files.pop(0), self._files.pop(0)
        os.dup2(log, 2)  # what goes wrong here is why this worker did not start
        self._import_model(order.site.model)
        if (threads := len(os.listdir(_THREADS))) > 1:
            self._tell(Refused(f"what they import starts threads: {threads - 1}"))
            sys.exit("not forked: a fork would lack the threads that the imports started")
        gc.collect()
        gc.freeze()  # what is shared stays so: a collection would write to all of it
        led, leads = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.setsid()
            os.close(led)
            os.close(leads)
            self._become(order, log)
            return _Work(channel, order.site)
        os.close(leads)
        os.read(led, 1)  # it leads its group: from now on, that can be killed
        os.close(led)
        os.dup2(self._null, 2)
        os.close(channel)
        os.close(log)
        self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
        self._tell(Forked(pid))
        return None

    def _import_model(self, model: str) -> None:
        """The code of its family, which a trainer needs; what is wrong with it is its to tell."""
        if self._trains and model not in self._models:
            self._models.add(model)
            from dora_rl.trainer.model import import_family

            with suppress(Exception):
                import_family(Path(model))

    def _become(self, order: Fork, log: int) -> None:
        """In the fork: have nothing of the server's."""
        for key in list(self._selector.get_map().values()):
            os.close(key.fd)
        self._selector.close()
        self._control.detach()
        for number in (1, 2):
            os.dup2(log, number)
        os.close(log)
        os.close(self._null)
        os.environ.clear()
        os.environ.update(order.environment)
        with suppress(OSError):
            _NAME.write_text(order.name[:_NAME_BYTES])

    def _reap(self, pidfd: int, pid: int) -> None:
        self._selector.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        self._tell(Ended(pid, os.waitstatus_to_exitcode(status)))

    def _tell(self, answer: _Answer) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # the driver is gone
            self._control.sendall(frame(msgspec.json.encode(answer)))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
