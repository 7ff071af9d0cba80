"""How a zygote comes to be: a fresh interpreter, or a fork of the driver.

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

from dora_rl.sandbox import scratch
from dora_rl.sandbox.errors import LoadError
from dora_rl.sandbox.isolation import clean_environment
from dora_rl.sandbox.objects import name_of, search_path
from dora_rl.sandbox.protocol import (
    Frames,
    Isolation,
    Order,
    Program,
    Refused,
    Report,
    Started,
    ZygoteSetup,
    pack,
)

_LOAD_S = 120.0  # to import the user's code; some libraries are slow from a cold disk
_END_S = 5.0
_CHUNK = 1 << 16


class Zygote:
    """The driver's hold on a zygote."""

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
        """Wait until it has loaded the user's code; what it refuses is a `LoadError`."""
        deadline = time.monotonic() + _LOAD_S
        with selectors.DefaultSelector() as selector:
            selector.register(self.control, selectors.EVENT_READ)
            while True:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise LoadError(
                        f"the reward's or environment's module was not imported within "
                        f"{_LOAD_S:g} s. Move what takes so long out of its import."
                    )
                contents, alive = self.reports()
                if contents:
                    report = msgspec.msgpack.decode(contents[0], type=Report)
                    if isinstance(report, Refused):
                        raise LoadError(report.why)
                    assert isinstance(report, Started)
                    self.isolation = report.isolation
                    return
                if not alive:
                    raise LoadError(f"the workers did not start. {words()}".rstrip())

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


def start_zygote(program: Program) -> Zygote:
    """A zygote that has loaded the program."""
    named = _by_name(program)
    directory = tempfile.mkdtemp(prefix="dora-rl-workers-")
    try:
        return _fork(program, directory) if named is None else _launch(named, directory)
    except BaseException:
        scratch.remove(directory)
        raise


def _by_name(program: Program) -> Program | None:
    """The program with import paths alone, if all of it can be imported."""
    functions = []
    for given in program.functions:
        name = given.function if isinstance(given.function, str) else name_of(given.function)
        if name is None:
            return None
        functions.append(msgspec.structs.replace(given, function=name))
    return msgspec.structs.replace(program, functions=tuple(functions))


def _launch(program: Program, directory: str) -> Zygote:
    ours, theirs = socket.socketpair()
    path = search_path(program.import_path)
    try:
        with theirs:
            child = subprocess.Popen(
                # -P: the search path is the driver's, and not the working directory first.
                [sys.executable, "-P", "-m", "dora_rl.sandbox.zygote_main", str(theirs.fileno())],
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
    zygote = Zygote(ours, child.pid, functools.partial(_wait_for_child, child), directory)
    before = os.environ.get("PYTHONPATH")
    setup = ZygoteSetup(
        program=program,
        driver=os.getpid(),
        scratch=os.fsencode(directory),
        path=[os.fsencode(entry) for entry in path],
        environment_path=None if before is None else os.fsencode(before),
    )
    try:
        with child.stderr as stderr:
            with suppress(BrokenPipeError, ConnectionResetError):
                ours.sendall(pack(setup))
            zygote.await_start(functools.partial(_last_words, stderr))
    except BaseException:
        zygote.close()
        raise
    return zygote


def _last_words(stderr: IO[bytes]) -> str:
    lines = stderr.read(_CHUNK).decode("utf-8", "replace").split("\n")
    return " | ".join(line.strip() for line in lines[-4:] if line.strip())


def _wait_for_child(child: "subprocess.Popen[bytes]", timeout_s: float) -> bool:
    try:
        child.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def _fork(program: Program, directory: str) -> Zygote:
    ours, theirs = socket.socketpair()
    driver = os.getpid()
    try:
        with theirs, warnings.catch_warnings():
            # Python warns of other threads' locks: the fork runs the user's function and our loop.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
            if pid == 0:
                _be_zygote(program, theirs, driver, directory)
    except BaseException:
        ours.close()
        raise
    zygote = Zygote(ours, pid, functools.partial(_wait_for_fork, pid), directory)
    try:
        zygote.await_start(str)
    except BaseException:
        zygote.close()
        raise
    return zygote


def _be_zygote(program: Program, control: socket.socket, driver: int, directory: str) -> None:
    """In the fork; never returns."""
    try:
        from dora_rl.sandbox import isolation, zygote

        os.setsid()
        isolation.forget_driver(control.fileno())
        zygote.run(control, program, driver, directory, setup=None)
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
