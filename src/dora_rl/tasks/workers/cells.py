"""The process of a worker, in namespaces of its own where the system allows it.

    nursery ── first process of the namespaces ── worker ── whatever it starts

The first process reaps what the worker leaves behind. When it ends, the system ends everybody
in there with it; and it ends when the worker does, or the nursery, or when it is killed. From
inside it cannot be killed, and nobody outside can be seen.
"""

import os
import select
import signal
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

from dora_rl import linux
from dora_rl.tasks.workers import isolation

Body = Callable[[isolation.Cell | None], object]

_LOOK_S = 1.0  # how often to look for what a worker left behind
_CHILDREN = "/proc/thread-self/children"
_CHUNK = 1 << 12


@dataclass(frozen=True, slots=True)
class Process:
    """What is to be killed, and waited for, so that all of a worker is gone."""

    pid: int
    tie: socket.socket | None = None  # to the first process; it ends when this is closed
    told: int | None = None  # how the worker ended, if that was known at once

    def files(self) -> list[int]:
        return [] if self.tie is None else [self.tie.fileno()]

    def ended(self, waited: int) -> int:
        """How the worker ended: its exit code, or the signal as a negative number."""
        status = os.waitstatus_to_exitcode(waited) if self.told is None else self.told
        if self.tie is None:
            return status
        with self.tie as tie:
            tie.setblocking(False)
            with suppress(OSError, ValueError):
                while message := tie.recv(_CHUNK):
                    if message[:1] == b"s":
                        status = int(message[1:])
        return status

    def kill(self) -> None:
        """Also of a worker that has ended, if it has not been waited for."""
        for end in (os.killpg, os.kill):  # the whole group, where there are no namespaces
            with suppress(ProcessLookupError, PermissionError):
                end(self.pid, signal.SIGKILL)


def start(body: Body, *, scratch: str, apart: bool, channel: int, closing: list[int]) -> Process:
    """A process that runs `body`, and ends; an `OSError` if there can be none.

    `channel` is its own, `closing` are files of the nursery that it must not have.
    """
    if apart:
        return _start_apart(body, scratch, channel, closing)
    nursery = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            _close(closing)
            _forget_children()
            linux.die_with_parent()
            if os.getppid() == nursery:  # else it died before we asked to die with it
                body(None)
        finally:
            os._exit(0)
    with suppress(OSError):  # it was faster
        os.setpgid(pid, pid)
    return Process(pid)


def children() -> list[int]:
    try:
        with open(_CHILDREN, encoding="ascii") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:  # not Linux, or a kernel without it
        return []


def _start_apart(body: Body, scratch: str, channel: int, closing: list[int]) -> Process:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        helper = os.fork()
        if helper == 0:
            ours.close()
            _help(body, scratch, channel, closing, theirs)
    # The helper is gone when this returns, and the first process is ours: we adopt orphans.
    os.waitpid(helper, 0)
    told = None
    while said := ours.recv(_CHUNK):
        if said[:1] == b"p":
            return Process(int(said[1:]), ours, told)
        told = int(said[1:])  # it was over before the helper told who it was
    ours.close()
    raise OSError("no namespaces, or no process, can be had")


def _help(
    body: Body, scratch: str, channel: int, closing: list[int], tie: socket.socket
) -> NoReturn:
    """Only what is forked after `unshare` is inside, and who called it has no way back."""
    try:
        if linux.unshare(linux.NEW_PIDS | linux.NEW_MOUNTS | linux.NEW_IPC):
            first = os.fork()
            if first == 0:
                _be_first(body, scratch, channel, closing, tie)
            tie.send(b"p%d" % first)
    finally:
        os._exit(0)


def _be_first(
    body: Body, scratch: str, channel: int, closing: list[int], tie: socket.socket
) -> NoReturn:
    try:
        if os.getpid() != 1:
            os._exit(1)
        _close(closing)
        cell = isolation.enter_cell(scratch)
        wake, wake_up = os.pipe()
        for number in (wake, wake_up):
            os.set_blocking(number, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(wake_up, warn_on_full_buffer=False)
        worker = os.fork()
        if worker == 0:
            try:
                _forget_children()
                _close((wake, wake_up, tie.fileno()))
                body(cell)
            finally:
                os._exit(0)
        os.close(channel)
        _watch(worker, tie, wake, cell.own_view)
    finally:
        os._exit(1)


def _watch(worker: int, tie: socket.socket, wake: int, own_view: bool) -> None:
    poller = select.poll()
    for number in (tie.fileno(), wake):
        poller.register(number, select.POLLIN)
    while True:
        ready = [number for number, _ in poller.poll(1000 * _LOOK_S)]
        if tie.fileno() in ready:
            return  # the nursery is gone
        with suppress(BlockingIOError):
            os.read(wake, _CHUNK)
        pid = -1
        while pid:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == worker:
                tie.send(b"s%d" % os.waitstatus_to_exitcode(status))
                return
        if own_view:  # else the numbers are those of another view
            kill_all(pid for pid in children() if pid != worker)


def kill_all(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _forget_children() -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _close(numbers: Iterable[int]) -> None:
    for number in numbers:
        with suppress(OSError):
            os.close(number)
