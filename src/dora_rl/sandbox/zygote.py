"""The process that makes the workers, and the loop of a worker.

It has loaded the user's code and does nothing with it: only the workers call it, its forks or
fresh interpreters that load it again.
It ends, and takes all workers with it, when the driver closes its socket or is gone.
"""

import functools
import importlib
import os
import select
import signal
import socket
import tempfile
import time
from contextlib import suppress
from typing import NamedTuple, NoReturn, Protocol

import msgspec

from dora_rl import framing
from dora_rl.core.protocol.errors import UserError
from dora_rl.machine.fast_paths import on_linux
from dora_rl.sandbox import isolation, scratch, worker_process
from dora_rl.sandbox.objects import said
from dora_rl.sandbox.protocol import (
    KEY_BYTES,
    Answer,
    Ended,
    Frames,
    Isolation,
    Kill,
    Limits,
    Order,
    Program,
    Ready,
    Refused,
    Spawn,
    Started,
    WorkerSetup,
    ZygoteSetup,
    pack,
)

_LOOK_S = 1.0  # how often to see whether the driver is there
_END_S = 3.0  # to see everybody gone
_TRIAL_S = 30.0  # to hear what a worker gets here
TRIAL = -1  # the number of that worker
_CHUNK = 1 << 16


class Service(Protocol):
    """The user's code, ready to be called."""

    spent: bool
    """After this call the worker had better be replaced."""

    def handle(self, request: bytes) -> bytes: ...


def build(program: Program) -> Service:
    """Load the user's code as the program's service wants it."""
    module, _, name = program.service.partition(":")
    service: Service = getattr(importlib.import_module(module), name)(program)
    return service


def run(
    control: socket.socket,
    program: Program,
    driver: int,
    directory: str,
    setup: ZygoteSetup | None,
) -> NoReturn:
    """Be a zygote until the driver is gone. Never returns, and runs no exit handlers.

    Without a `setup` the user's code has no import path, so that every worker must be a fork.
    """
    try:
        try:
            alone = isolation.enter_zygote(program.limits)
            told = None
            if setup is not None:
                worker = WorkerSetup(of_zygote=setup, zygote=os.getpid(), alone=alone)
                told = _written(worker)
            context = WorkerContext(program.limits, directory, driver, alone, told)
            service = build(program)
            found, way = _try(context)
            if way == "fresh":
                promise = msgspec.structs.replace(worker, promised=found)
                context = context._replace(told=_written(promise))
        except UserError as error:
            control.sendall(pack(Refused(str(error))))
        except BaseException as error:  # SystemExit too: the user's import may do anything
            control.sendall(pack(Refused(said(error))))
        else:
            zygote = _Zygote(control, service, context, found, way)
            control.sendall(pack(Started(found)))
            zygote.loop()
    finally:
        scratch.remove(directory)
        os._exit(0)


class WorkerContext(NamedTuple):
    """What every worker of a zygote finds."""

    limits: Limits
    scratch: str
    driver: int
    alone: bool  # without the machine's network
    told: int | None = None  # the file that tells a fresh interpreter what it is to be

    def ways(self) -> list[worker_process.Way]:
        """How a worker may be started here, the best first."""
        if self.told is not None and not worker_process.fork_workers().in_force:
            return ["fresh"]
        return ["apart", "forked"] if on_linux() else ["forked"]

    def start(
        self,
        number: int,
        body: worker_process.Body,
        way: worker_process.Way,
        *,
        channel: int,
        closing: list[int],
    ) -> worker_process.Process:
        """The process of a worker; a fresh one does by itself what `body` does in a fork."""
        if way == "fresh":
            assert self.told is not None
            return worker_process.start_fresh(self.told, channel, number)
        enter = functools.partial(isolation.enter_namespaces, self.scratch, self.limits)
        return worker_process.start(
            body, enter=enter if way == "apart" else None, channel=channel, closing=closing
        )

    def scratch_of(self, number: int) -> str:
        return os.path.join(self.scratch, str(number))

    def enter(self, number: int, namespaces: isolation.Namespaces | None) -> Isolation:
        """In a worker: what is in force from now on."""
        return isolation.enter_worker(
            self.limits,
            self.scratch_of(number),
            driver=self.driver,
            alone=self.alone,
            namespaces=namespaces,
        )


def _written(setup: WorkerSetup) -> int:
    """A file without a name that holds it."""
    with tempfile.TemporaryFile() as file:
        file.write(msgspec.msgpack.encode(setup))
        file.flush()
        return os.dup(file.fileno())


def _try(context: WorkerContext) -> tuple[Isolation, worker_process.Way]:
    """What a worker really gets here, and in which way: made, asked and let go."""
    for way in context.ways():
        ours, theirs = socket.socketpair()
        number = theirs.detach()

        def tell(namespaces: isolation.Namespaces | None, number: int = number) -> None:
            tell_isolation(number, context.enter(TRIAL, namespaces))

        try:
            process = context.start(TRIAL, tell, way, channel=number, closing=[ours.fileno()])
        except OSError:
            ours.close()
            continue
        finally:
            os.close(number)
        with ours, suppress(OSError):  # it ended, or hangs
            ours.settimeout(_TRIAL_S)
            told = msgspec.msgpack.decode(read_frame(ours), type=Started)
            _let_go(process, context)
            return told.isolation, way
        _let_go(process, context)
    raise OSError("no worker can be started here")


def tell_isolation(number: int, found: Isolation) -> None:
    """What the worker of the trial does with its channel."""
    with socket.socket(fileno=number) as channel:
        channel.sendall(pack(Started(found)))


def _let_go(process: worker_process.Process, context: WorkerContext) -> None:
    process.kill()
    _, status = os.waitpid(process.pid, 0)
    process.ended(status)
    scratch.remove(context.scratch_of(TRIAL))


class _Zygote:
    def __init__(
        self,
        control: socket.socket,
        service: Service,
        context: WorkerContext,
        promised: Isolation,
        way: worker_process.Way,
    ) -> None:
        self._control = control
        self._service = service
        self._context = context
        self._promised = promised
        self._way = way
        self._orders = Frames()
        self._sockets: list[int] = []  # that came with orders not read yet
        self._workers: dict[int, tuple[int, worker_process.Process]] = {}  # by process id
        self._kin = set(worker_process.children())  # what the user's import started
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
            while os.getppid() == self._context.driver:
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

        def work(namespaces: isolation.Namespaces | None) -> None:
            # Less than was promised is not enough.
            if self._context.enter(worker, namespaces) == self._promised:
                serve(number, self._service)

        try:
            process = self._context.start(worker, work, self._way, channel=number, closing=ours)
        except OSError:
            self._control.sendall(pack(Ended(worker, 1)))
        else:
            self._workers[process.pid] = (worker, process)
        finally:
            os.close(number)

    def _reap(self) -> None:
        while (ended := worker_process.next_ended()) is not None:
            pid, status = ended
            worker, process = self._workers.pop(pid, (None, None))
            if process is not None:
                process.kill(waited_for=status is not None)
            if status is None:
                _, status = os.waitpid(pid, 0)
            if process is not None and worker is not None:
                self._control.sendall(pack(Ended(worker, process.ended(status))))
                if self._way != "apart":  # else its file system went with it
                    scratch.remove(self._context.scratch_of(worker))

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
                if not self._workers and self._kin.issuperset(worker_process.children()):
                    return
                time.sleep(0.001)

    def _kill_orphans(self) -> None:
        """What workers left behind, dead or alive, also outside their process group."""
        known = self._workers.keys() | self._kin
        worker_process.kill_all(pid for pid in worker_process.children() if pid not in known)


def serve(number: int, service: Service) -> None:
    """Be a worker on the socket of this number, until the driver closes it."""
    os.set_inheritable(number, False)
    with suppress(OSError), socket.socket(fileno=number) as channel:
        _work(channel, service)


def _work(channel: socket.socket, service: Service) -> None:
    """Serve one request after the other."""
    key = bytearray(os.urandom(KEY_BYTES))

    def forget() -> None:
        """A copy of us has nothing to say."""
        channel.close()
        key[:] = bytes(KEY_BYTES)

    os.register_at_fork(after_in_child=forget)
    requests = Frames()
    number = 0
    channel.sendall(pack(Ready(bytes(key))))
    while data := channel.recv(_CHUNK):
        for request in requests.feed(data):
            number += 1
            began = time.monotonic()
            content = service.handle(request)
            seconds = time.monotonic() - began
            answer = Answer(number, content, seconds, service.spent)
            channel.sendall(pack(answer.sealed(key)))


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
