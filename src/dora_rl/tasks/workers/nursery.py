"""The process that makes the workers, and the loop of a worker.

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
from typing import NamedTuple, NoReturn, Protocol

import msgspec

from dora_rl import framing, linux
from dora_rl.core.errors import UserError
from dora_rl.tasks.names import said
from dora_rl.tasks.workers import cells, isolation, scratch
from dora_rl.tasks.workers.wire import (
    Answer,
    Ended,
    Frames,
    Isolation,
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
_TRIAL_S = 30.0  # to hear what a worker gets here
_TRIAL = -1  # the number of that worker
_CHUNK = 1 << 16


class Servant(Protocol):
    """The user's code, ready to be called."""

    spent: bool
    """After this call the worker had better be replaced."""

    def handle(self, request: bytes) -> bytes: ...


def run(
    control: socket.socket,
    build: Callable[[], Servant],
    limits: Limits,
    driver: int,
    directory: str,
) -> NoReturn:
    """Be a nursery until the driver is gone. Never returns, and runs no exit handlers."""
    try:
        try:
            alone = isolation.enter_nursery(limits)
            home = Home(limits, directory, driver, alone)
            servant = build()
            found, apart = _try(home)
        except UserError as error:
            control.sendall(pack(Refused(str(error))))
        except BaseException as error:  # SystemExit too: the user's import may do anything
            control.sendall(pack(Refused(said(error))))
        else:
            nursery = _Nursery(control, servant, home, found, apart)
            control.sendall(pack(Started(found)))
            nursery.loop()
    finally:
        scratch.remove(directory)
        os._exit(0)


class Home(NamedTuple):
    """What every worker of a nursery finds."""

    limits: Limits
    scratch: str
    driver: int
    alone: bool  # without the machine's network

    def scratch_of(self, number: int) -> str:
        return os.path.join(self.scratch, str(number))

    def enter(self, number: int, cell: isolation.Cell | None) -> Isolation:
        """In a worker: what is in force from now on."""
        return isolation.enter_worker(
            self.limits,
            self.scratch_of(number),
            driver=self.driver,
            alone=self.alone,
            cell=cell,
        )


def _try(home: Home) -> tuple[Isolation, bool]:
    """What a worker really gets here, and whether in namespaces: made, asked and let go."""
    for apart in (True, False) if linux.LINUX else (False,):
        ours, theirs = socket.socketpair()
        number = theirs.detach()

        def tell(cell: isolation.Cell | None, number: int = number) -> None:
            with socket.socket(fileno=number) as channel:
                channel.sendall(pack(Started(home.enter(_TRIAL, cell))))

        try:
            process = cells.start(
                tell, scratch=home.scratch, apart=apart, channel=number, closing=[ours.fileno()]
            )
        except OSError:
            ours.close()
            continue
        finally:
            os.close(number)
        with ours, suppress(OSError):  # it ended, or hangs
            ours.settimeout(_TRIAL_S)
            told = msgspec.msgpack.decode(read_frame(ours), type=Started)
            _let_go(process, home)
            return told.isolation, apart
        _let_go(process, home)
    raise OSError("no worker can be started here")


def _let_go(process: cells.Process, home: Home) -> None:
    process.kill()
    _, status = os.waitpid(process.pid, 0)
    process.ended(status)
    scratch.remove(home.scratch_of(_TRIAL))


class _Nursery:
    def __init__(
        self, control: socket.socket, servant: Servant, home: Home, promised: Isolation, apart: bool
    ) -> None:
        self._control = control
        self._servant = servant
        self._home = home
        self._promised = promised
        self._apart = apart
        self._orders = Frames()
        self._sockets: list[int] = []  # that came with orders not read yet
        self._workers: dict[int, tuple[int, cells.Process]] = {}  # by process id
        self._kin = set(cells.children())  # what the user's import started
        self._wake, self._wake_up = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(self._wake_up, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._wake_up, warn_on_full_buffer=False)

    def loop(self) -> None:
        control = self._control.fileno()
        poller = select.poll()  # not `select`: a fork of the driver may have many files
        for number in (control, self._wake):
            poller.register(number, select.POLLIN)
        try:
            while os.getppid() == self._home.driver:
                ready = [number for number, _ in poller.poll(1000 * _LOOK_S)]
                if self._wake in ready:
                    with suppress(BlockingIOError):
                        os.read(self._wake, _CHUNK)
                self._reap()
                self._kill_orphans()
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
                    for other, process in self._workers.values():
                        if other == worker:
                            process.kill()
        return bool(data)

    def _spawn(self, worker: int, number: int) -> None:
        ours = [self._control.fileno(), self._wake, self._wake_up, *self._sockets]
        ours += [file for _, process in self._workers.values() for file in process.files()]

        def work(cell: isolation.Cell | None) -> None:
            # Less than was promised is not enough.
            if self._home.enter(worker, cell) == self._promised:
                os.set_inheritable(number, False)
                with suppress(OSError), socket.socket(fileno=number) as channel:
                    _work(channel, self._servant)

        try:
            process = cells.start(
                work, scratch=self._home.scratch, apart=self._apart, channel=number, closing=ours
            )
        except OSError:
            self._control.sendall(pack(Ended(worker, 1)))
        else:
            self._workers[process.pid] = (worker, process)
        finally:
            os.close(number)

    def _reap(self) -> None:
        while True:
            try:
                # Looked at before it is removed: while it is there, its number is no one else's.
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None:
                return
            pid = found.si_pid
            worker, process = self._workers.pop(pid, (None, None))
            if process is not None:
                process.kill()
            _, status = os.waitpid(pid, 0)
            if process is not None and worker is not None:
                self._control.sendall(pack(Ended(worker, process.ended(status))))
                if not self._apart:  # else its file system went with it
                    scratch.remove(self._home.scratch_of(worker))

    def _end(self) -> None:
        """Leave nobody behind: what workers started becomes ours as they die, and dies too."""
        deadline = time.monotonic() + _END_S
        while time.monotonic() < deadline:
            for _, process in self._workers.values():
                process.kill()
            self._kill_orphans()
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            self._workers.pop(pid, None)
            if pid == 0:
                if not self._workers and self._kin.issuperset(cells.children()):
                    return
                time.sleep(0.001)

    def _kill_orphans(self) -> None:
        """What workers left behind, dead or alive, also outside their process group."""
        known = self._workers.keys() | self._kin
        cells.kill_all(pid for pid in cells.children() if pid not in known)


def _work(channel: socket.socket, servant: Servant) -> None:
    """Serve one request after the other until the driver closes the socket."""
    os.register_at_fork(after_in_child=channel.close)  # a copy of us has nothing to say
    requests = Frames()
    number = 0
    channel.sendall(pack(Ready()))
    while data := channel.recv(_CHUNK):
        for request in requests.feed(data):
            number += 1
            began = time.monotonic()
            content = servant.handle(request)
            seconds = time.monotonic() - began
            channel.sendall(pack(Answer(number, content, seconds, servant.spent)))


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
