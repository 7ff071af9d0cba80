"""The process that forks the workers, and the loop of a worker.

It has loaded the user's code and does nothing with it: only its forks, the workers, call it.
It ends, and takes all workers with it, when the driver closes its socket or is gone.
"""

import os
import select
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn, Protocol

import msgspec

from dora_rl import framing
from dora_rl.core.errors import UserError
from dora_rl.tasks.names import said
from dora_rl.tasks.workers import isolation
from dora_rl.tasks.workers.wire import (
    Answer,
    Ended,
    Frames,
    Kill,
    Limits,
    Order,
    Ready,
    Refused,
    Spawn,
    Started,
    pack,
)

_LOOK_S = 1.0  # how often to see whether the driver is there
_END_S = 3.0  # to see everybody gone
_CHUNK = 1 << 16
_CHILDREN = "/proc/thread-self/children"


class Servant(Protocol):
    """The user's code, ready to be called."""

    spent: bool
    """After this call the worker had better be replaced."""

    def handle(self, request: bytes) -> bytes: ...


def run(
    control: socket.socket, build: Callable[[], Servant], limits: Limits, driver: int
) -> NoReturn:
    """Be a nursery until the driver is gone. Never returns, and runs no exit handlers."""
    try:
        try:
            found = isolation.enter_nursery(limits)
            servant = build()
        except UserError as error:
            control.sendall(pack(Refused(str(error))))
        except BaseException as error:  # SystemExit too: the user's import may do anything
            control.sendall(pack(Refused(said(error))))
        else:
            nursery = _Nursery(control, servant, limits, driver)
            control.sendall(pack(Started(found)))
            nursery.loop()
    finally:
        os._exit(0)


class _Nursery:
    def __init__(
        self, control: socket.socket, servant: Servant, limits: Limits, driver: int
    ) -> None:
        self._control = control
        self._servant = servant
        self._limits = limits
        self._driver = driver
        self._orders = Frames()
        self._sockets: list[int] = []  # that came with orders not read yet
        self._workers: dict[int, int] = {}  # process id -> worker
        self._kin = set(_children())  # what the user's import started
        self._wake, wake_up = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(wake_up, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(wake_up, warn_on_full_buffer=False)

    def loop(self) -> None:
        control = self._control.fileno()
        poller = select.poll()  # not `select`: a fork of the driver may have many files
        for number in (control, self._wake):
            poller.register(number, select.POLLIN)
        try:
            while os.getppid() == self._driver:
                ready = [number for number, _ in poller.poll(1000 * _LOOK_S)]
                if self._wake in ready:
                    with suppress(BlockingIOError):
                        os.read(self._wake, _CHUNK)
                self._reap()
                if control in ready and not self._obey():
                    return
        except (BrokenPipeError, ConnectionResetError):
            return
        finally:
            self._end()

    def _obey(self) -> bool:
        """Whether the driver is still there."""
        data, sockets, _, _ = socket.recv_fds(self._control, _CHUNK, 16)
        self._sockets += sockets
        for content in self._orders.feed(data):
            match msgspec.msgpack.decode(content, type=Order):
                case Spawn(worker):
                    self._spawn(worker, self._sockets.pop(0))
                case Kill(worker):
                    for pid, other in self._workers.items():
                        if other == worker:
                            _kill(pid)
        return bool(data)

    def _spawn(self, worker: int, number: int) -> None:
        nursery = os.getpid()
        pid = os.fork()
        if pid:
            os.close(number)
            with suppress(OSError):  # it was faster
                os.setpgid(pid, pid)
            self._workers[pid] = worker
            return
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._control.close()
            os.close(self._wake)
            isolation.enter_worker(self._limits, nursery)
            os.set_inheritable(number, False)
            with socket.socket(fileno=number) as channel:
                _work(channel, self._servant)
        except OSError:
            pass  # the driver has let go of us
        finally:
            os._exit(0)

    def _reap(self) -> None:
        gone = False
        while True:
            try:
                # Looked at before it is removed: while it is there, its number is no one else's.
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                found = None
            if found is None:
                break
            pid = found.si_pid
            if pid in self._workers:
                _kill(pid)
            _, status = os.waitpid(pid, 0)
            worker = self._workers.pop(pid, None)
            if worker is not None:
                self._control.sendall(pack(Ended(worker, os.waitstatus_to_exitcode(status))))
            gone = True
        if gone:
            self._kill_orphans()

    def _end(self) -> None:
        """Leave nobody behind: what workers started becomes ours as they die, and dies too."""
        deadline = time.monotonic() + _END_S
        while time.monotonic() < deadline:
            for pid in self._workers:
                _kill(pid)
            self._kill_orphans()
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            self._workers.pop(pid, None)
            if pid == 0:
                if not self._workers and self._kin.issuperset(_children()):
                    return
                time.sleep(0.001)

    def _kill_orphans(self) -> None:
        """What dead workers left behind, also outside their process group."""
        for pid in _children():
            if pid not in self._workers and pid not in self._kin:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _work(channel: socket.socket, servant: Servant) -> None:
    """Serve one request after the other until the driver closes the socket."""
    requests = Frames()
    channel.sendall(pack(Ready()))
    while data := channel.recv(_CHUNK):
        for request in requests.feed(data):
            began = time.monotonic()
            content = servant.handle(request)
            seconds = time.monotonic() - began
            channel.sendall(pack(Answer(content, seconds, servant.spent)))


def read_frame(stream: socket.socket) -> bytes:
    """One whole message; nothing of a further one is taken."""
    frames = Frames()
    header = _exactly(stream, framing.HEADER_BYTES)
    frames.feed(header)
    (content,) = frames.feed(_exactly(stream, int.from_bytes(header, "little")))
    return content


def _exactly(stream: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = stream.recv(count - len(data))
        if not more:
            raise ConnectionResetError("the driver is gone")
        data += more
    return data


def _kill(pid: int) -> None:
    """A worker that has not been removed yet, with all of its process group."""
    for end in (os.killpg, os.kill):
        with suppress(ProcessLookupError, PermissionError):
            end(pid, signal.SIGKILL)


def _children() -> list[int]:
    try:
        with open(_CHILDREN, encoding="ascii") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:  # not Linux, or a kernel without it
        return []
