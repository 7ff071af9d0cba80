"""A process that has imported what workers need, and forks them: they start in milliseconds.

    driver    Fork, with the worker's socket and log  ->  server    fork  ->  worker
              <-  Forked(pid), or NotForked
              <-  Ended(code)                                             <-  its end

It imports and does nothing else, so that a fork inherits one thread, no pool of OpenMP and no
device. It ends with the driver, and its workers end with it. `forkserver_client` is the driver's
side.
"""

import gc
import importlib
import os
import selectors
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from dora_rl.framing import Frames, frame
from dora_rl.machine.parent import die_with_parent
from dora_rl.runtime.launchers.local import worker
from dora_rl.runtime.launchers.local.site import Site

MODULE = "dora_rl.runtime.launchers.local.forkserver"
LARGEST = 1 << 20  # bytes of one message
CHUNK = 1 << 16
_FILES = 16  # at most, that come with what is received at once
_THREADS = Path("/proc/self/task")
_NAME = Path("/proc/self/comm")
_NAME_BYTES = 15
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
    site: str  # encoded
    variables: dict[str, str]  # of its environment, where that is not the server's


class Forked(msgspec.Struct, tag=True, frozen=True):
    """The answer to each `Fork`, in their order."""

    pid: int


class NotForked(msgspec.Struct, tag=True, frozen=True):
    """The other answer: the system refuses; the worker's log says why."""


class Ended(msgspec.Struct, tag=True, frozen=True):
    pid: int
    code: int  # negative: the signal that ended it


class Refused(msgspec.Struct, tag=True, frozen=True):
    """No fork of it can be trusted."""

    why: str


Answer = Forked | NotForked | Ended | Refused


class _Work(NamedTuple):
    """What a fork is to do."""

    channel: int
    site: Site


def main(fd: int, driver: int, imports: Sequence[str]) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would take the codes of workers
    die_with_parent(driver)
    for name in (*_IMPORTED, *imports):
        importlib.import_module(name)
    work = _Server(socket.socket(fileno=fd), trains=TRAINER in imports).loop()
    return 0 if work is None else worker.main(work.channel, work.site)


class _Server:
    def __init__(self, control: socket.socket, *, trains: bool) -> None:
        self._control = control
        self._trains = trains
        self._frames = Frames(LARGEST)
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
                data, files, _, _ = socket.recv_fds(self._control, CHUNK, _FILES)
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
        site = Site.parse(order.site)
        self._import_model(site.model)
        if (threads := len(os.listdir(_THREADS))) > 1:
            self._tell(Refused(f"what they import starts threads: {threads - 1}"))
            sys.exit("not forked: a fork would lack the threads that the imports started")
        gc.collect()
        gc.freeze()  # what is shared stays so: a collection would write to all of it
        led, leads = os.pipe()
        try:
            pid = os.fork()
        except OSError as error:
            os.write(2, f"not forked: {error}\n".encode())
            for file in (led, leads, channel, log):
                os.close(file)
            os.dup2(self._null, 2)
            self._tell(NotForked())
            return None
        if pid == 0:
            os.setsid()
            os.close(led)
            os.close(leads)
            self._become(order, log)
            return _Work(channel, site)
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
        for file in (log, self._null, *self._files):  # of those that are asked for next, too
            os.close(file)
        os.environ.update(order.variables)
        with suppress(OSError):
            _NAME.write_text(order.name[:_NAME_BYTES])

    def _reap(self, pidfd: int, pid: int) -> None:
        self._selector.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        self._tell(Ended(pid, os.waitstatus_to_exitcode(status)))

    def _tell(self, answer: Answer) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # the driver is gone
            self._control.sendall(frame(msgspec.json.encode(answer)))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
