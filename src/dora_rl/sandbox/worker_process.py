"""The process of a worker, in one of three ways, the first that the system allows.

    apart    zygote ── first process of the namespaces ── worker ── whatever it starts
    forked   zygote ── worker ── whatever it starts
    fresh    the same, but the worker is a fresh interpreter: where a fork cannot be trusted

The first process reaps what the worker leaves behind. When it ends, the system ends everybody
in there with it; and it ends when the worker does, or the zygote, or when it is killed. From
inside it cannot be killed, and nobody outside can be seen.
"""

import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, NoReturn

from dora_rl.machine.fast_paths import Unavailable, fast_path, on_linux
from dora_rl.machine.parent import die_with_parent
from dora_rl.sandbox import isolation, linux

Body = Callable[[isolation.Namespaces | None], object]
Enter = Callable[[], isolation.Namespaces]
Way = Literal["apart", "forked", "fresh"]

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

    def kill(self, *, waited_for: bool = False) -> None:
        """Also of a worker that has ended: of one that was waited for, its group alone."""
        # The whole group, where there are no namespaces. Its number is taken while it has members.
        for end in (os.killpg,) if waited_for else (os.killpg, os.kill):
            with suppress(ProcessLookupError, PermissionError):
                end(self.pid, signal.SIGKILL)


def start(body: Body, *, enter: Enter | None, channel: int, closing: list[int]) -> Process:
    """A process that runs `body`, and ends; an `OSError` if there can be none.

    With `enter` it is apart, and that is what its first process does. `channel` is its own,
    `closing` are files of the zygote that it must not have.
    """
    if enter is not None:
        return _start_apart(body, enter, channel, closing)
    zygote = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            _close(closing)
            _forget_children()
            die_with_parent(zygote)
            body(None)
        finally:
            os._exit(0)
    with suppress(OSError):  # it was faster
        os.setpgid(pid, pid)
    return Process(pid)


def start_fresh(told: int, channel: int, number: int) -> Process:
    """A fresh interpreter that reads what it is to be from the file `told`."""
    for file in (told, channel):
        os.set_inheritable(file, True)  # of all files, it has these two
    arguments = [sys.executable, "-P", "-m", "dora_rl.sandbox.fresh_worker"]
    nothing = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)]
    try:
        pid = os.posix_spawn(
            sys.executable,
            [*arguments, str(told), str(channel), str(number)],
            {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            file_actions=nothing,
            setpgroup=0,
        )
    finally:
        os.set_inheritable(told, False)
    return Process(pid)


@fast_path("fork")
def fork_workers() -> tuple[str, int]:
    """Whether a process that has imported the user's code can be forked with confidence."""
    if sys.platform == "darwin":
        raise Unavailable("system libraries of macOS may crash in a fork")
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    if os.waitpid(pid, 0)[1]:
        raise Unavailable("a fork died at once")
    return "a fork started and ended", 0


@fast_path("orphan-list")
def orphan_list() -> tuple[str, int]:
    """Whether the system lists the children of a process, adopted ones among them."""
    with open(_CHILDREN, encoding="ascii") as file:
        file.read()
    return _CHILDREN, 0


def children() -> list[int]:
    if not orphan_list().in_force:
        return []
    try:
        with open(_CHILDREN, encoding="ascii") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:  # hidden since
        return []


def next_ended() -> tuple[int, int | None] | None:
    """A child that has ended, and its status if it had to be waited for to be known.

    Linux shows it before it is removed: while it is there, its number is no one else's.
    """
    with suppress(ChildProcessError):
        if on_linux():
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            return None if found is None else (found.si_pid, None)
        pid, status = os.waitpid(-1, os.WNOHANG)
        return (pid, status) if pid else None
    return None


def _start_apart(body: Body, enter: Enter, channel: int, closing: list[int]) -> Process:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        helper = os.fork()
        if helper == 0:
            ours.close()
            _help(body, enter, channel, closing, theirs)
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
    body: Body, enter: Enter, channel: int, closing: list[int], tie: socket.socket
) -> NoReturn:
    """Only what is forked after `unshare` is inside, and who called it has no way back."""
    try:
        if linux.unshare(linux.NEW_PIDS | linux.NEW_MOUNTS | linux.NEW_IPC):
            first = os.fork()
            if first == 0:
                _be_first(body, enter, channel, closing, tie)
            tie.send(b"p%d" % first)
    finally:
        os._exit(0)


def _be_first(
    body: Body, enter: Enter, channel: int, closing: list[int], tie: socket.socket
) -> NoReturn:
    try:
        if os.getpid() != 1:
            os._exit(1)
        _close(closing)
        namespaces = enter()
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
                body(namespaces)
            finally:
                os._exit(0)
        os.close(channel)
        _watch(worker, tie, wake, namespaces.own_view)
    finally:
        os._exit(1)


def _watch(worker: int, tie: socket.socket, wake: int, own_view: bool) -> None:
    poller = select.poll()
    for number in (tie.fileno(), wake):
        poller.register(number, select.POLLIN)
    while True:
        ready = [number for number, _ in poller.poll(1000 * _LOOK_S)]
        if tie.fileno() in ready:
            return  # the zygote is gone
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
