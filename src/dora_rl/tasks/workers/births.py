"""How a nursery comes to be: a fresh interpreter, or a fork of the driver.

A fresh interpreter knows nothing of the driver, and is the way wherever the user's code can be
imported by name. What cannot (a notebook's function, a lambda, a closure, a callable object)
exists in the driver alone, and is reached by a fork of it; nothing is ever pickled.
"""

import functools
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import IO

import msgspec

from dora_rl.tasks.errors import TaskError
from dora_rl.tasks.names import name_of, search_path
from dora_rl.tasks.workers import scratch
from dora_rl.tasks.workers.isolation import clean_environment
from dora_rl.tasks.workers.wire import (
    Birth,
    Frames,
    Isolation,
    Order,
    Program,
    Refused,
    Report,
    Started,
    pack,
)

_LOAD_S = 120.0  # to import the user's code; some libraries are slow from a cold disk
_END_S = 5.0
_CHUNK = 1 << 16


class Nursery:
    """The driver's hold on a nursery."""

    def __init__(
        self, control: socket.socket, pid: int, wait: Callable[[float], bool], directory: str
    ) -> None:
        self.control = control
        self.isolation = Isolation()
        self._pid = pid
        self._wait = wait
        self._scratch = directory
        self._frames = Frames()
        self._closed = False

    def order(self, order: Order, channel: socket.socket | None = None) -> None:
        """Tell it what to do; a worker's socket goes along."""
        message = pack(order)
        if channel is None:
            with suppress(OSError):  # it is gone, and so is whatever was to be killed
                self.control.sendall(message)
        else:
            socket.send_fds(self.control, [message], [channel.fileno()])

    def reports(self) -> tuple[list[bytes], bool]:
        """What it reported, and whether it is still there; call when its socket is readable."""
        try:
            data = self.control.recv(_CHUNK)
        except OSError:
            data = b""
        return self._frames.feed(data), bool(data)

    def await_start(self, words: Callable[[], str]) -> None:
        """Wait until it has loaded the user's code; what it refuses is a `TaskError`."""
        deadline = time.monotonic() + _LOAD_S
        with selectors.DefaultSelector() as selector:
            selector.register(self.control, selectors.EVENT_READ)
            while True:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TaskError(
                        f"the reward's or environment's module was not imported within "
                        f"{_LOAD_S:g} s. Move what takes so long out of its import."
                    )
                contents, alive = self.reports()
                if contents:
                    report = msgspec.msgpack.decode(contents[0], type=Report)
                    if isinstance(report, Refused):
                        raise TaskError(report.why)
                    assert isinstance(report, Started)
                    self.isolation = report.isolation
                    return
                if not alive:
                    raise TaskError(f"the workers did not start. {words()}".rstrip())

    def close(self) -> None:
        """End it: it takes its workers along when its socket closes."""
        if self._closed:
            return
        self._closed = True
        self.control.close()
        if not self._wait(_END_S):
            self.kill()
            self._wait(_END_S)
        scratch.remove(self._scratch)  # of one that was killed

    def kill(self) -> None:
        """End it at once; its workers end too. `close` is still to be called."""
        with suppress(ProcessLookupError, PermissionError):
            os.kill(self._pid, signal.SIGKILL)


def start_nursery(program: Program) -> Nursery:
    """A nursery that has loaded the program."""
    named = _by_name(program)
    directory = tempfile.mkdtemp(prefix="dora-rl-workers-")
    try:
        return _fork(program, directory) if named is None else _launch(named, directory)
    except BaseException:
        scratch.remove(directory)
        raise


def _by_name(program: Program) -> Program | None:
    """The program with import paths alone, if all of it can be imported."""
    parts = []
    for part in program.parts:
        name = part.function if isinstance(part.function, str) else name_of(part.function)
        if name is None:
            return None
        parts.append(msgspec.structs.replace(part, function=name))
    return msgspec.structs.replace(program, parts=tuple(parts))


def _launch(program: Program, directory: str) -> Nursery:
    ours, theirs = socket.socketpair()
    path = search_path()
    try:
        with theirs:
            child = subprocess.Popen(
                # -P: the search path is the driver's, and not the working directory first.
                [sys.executable, "-P", "-m", "dora_rl.tasks.workers", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=clean_environment(os.environ) | {"PYTHONPATH": os.pathsep.join(path)},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
    except BaseException:
        ours.close()
        raise
    assert child.stderr is not None
    nursery = Nursery(ours, child.pid, functools.partial(_wait_for_child, child), directory)
    before = os.environ.get("PYTHONPATH")
    birth = Birth(
        program=program,
        driver=os.getpid(),
        scratch=os.fsencode(directory),
        path=[os.fsencode(entry) for entry in path],
        environment_path=None if before is None else os.fsencode(before),
    )
    try:
        with child.stderr as stderr:
            with suppress(BrokenPipeError, ConnectionResetError):
                ours.sendall(pack(birth))
            nursery.await_start(functools.partial(_last_words, stderr))
    except BaseException:
        nursery.close()
        raise
    return nursery


def _last_words(stderr: IO[bytes]) -> str:
    lines = stderr.read(_CHUNK).decode("utf-8", "replace").split("\n")
    return " | ".join(line.strip() for line in lines[-4:] if line.strip())


def _wait_for_child(child: "subprocess.Popen[bytes]", timeout_s: float) -> bool:
    try:
        child.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def _fork(program: Program, directory: str) -> Nursery:
    ours, theirs = socket.socketpair()
    driver = os.getpid()
    try:
        with theirs, warnings.catch_warnings():
            # Python warns of other threads' locks: the fork runs the user's function and our loop.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
            if pid == 0:
                _be_nursery(program, theirs, driver, directory)
    except BaseException:
        ours.close()
        raise
    nursery = Nursery(ours, pid, functools.partial(_wait_for_fork, pid), directory)
    try:
        nursery.await_start(str)
    except BaseException:
        nursery.close()
        raise
    return nursery


def _be_nursery(program: Program, control: socket.socket, driver: int, directory: str) -> None:
    """In the fork; never returns."""
    try:
        from dora_rl.tasks.workers import isolation, nursery, serving

        os.setsid()
        isolation.forget_driver(control.fileno())
        build = functools.partial(serving.build, program)
        nursery.run(control, build, program.limits, driver, directory, birth=None)
    finally:
        os._exit(1)


def _wait_for_fork(pid: int, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    pause = 0.001
    while True:
        try:
            found, _ = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return True
        if found:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
