"""Calls to Linux that Python has no name for. Each says whether it worked; none decides.

Elsewhere, and where a kernel is too old or forbids it, the answer is no. The numbers are those
of the kernel's headers, and never change.
"""

import ctypes
import errno
import os
import struct
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal, NamedTuple

from dora_rl.machine.fast_paths import Unavailable, fast_path, on_linux

NEW_MOUNTS, NEW_IPC, NEW_USER = 0x20000, 0x8000000, 0x10000000
NEW_PIDS, NEW_NETWORK = 0x20000000, 0x40000000
READ_ONLY, NO_SETUID, NO_DEVICES, NO_PROGRAMS = 1, 2, 4, 8
BIND, RECURSIVE, PRIVATE = 1 << 12, 1 << 14, 1 << 18

_PR_SET_SECCOMP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 22, 36, 38
_CAPABILITY_VERSION_3 = 0x20080522


def unshare(what: int) -> bool:
    """Leave what is shared with others, such as the network, for one of our own."""
    return on_linux() and bool(_libc().unshare(what) == 0)


def mount(kind: str, target: str, flags: int = 0, options: str = "", source: str = "") -> bool:
    """Mount a file system of this kind, or with `BIND` the source, on a directory or file."""
    if not on_linux():
        return False
    words = (source or kind or "none", target, kind or None)
    arguments = [None if word is None else os.fsencode(word) for word in words]
    return bool(_libc().mount(*arguments, ctypes.c_ulong(flags), os.fsencode(options)) == 0)


def adopt_orphans() -> None:
    """What our descendants leave behind becomes our child."""
    if on_linux():
        _libc().prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def refuse_privileges() -> bool:
    """No program that is started from here gets more than we have."""
    return on_linux() and bool(_libc().prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0)


def drop_capabilities() -> bool:
    """Root without its powers: it cannot join another network, or read another's memory."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    return on_linux() and bool(_libc().capset(header, (ctypes.c_uint32 * 6)()) == 0)


# Landlock: https://docs.kernel.org/userspace-api/landlock.html

_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_LANDLOCK_VERSION = 1
_PATH_BENEATH = 1
_WRITE_FILE, _TRUNCATE = 1 << 1, 1 << 14
# Write, remove, make of every kind; then move (2nd edition) and truncate (3rd).
_WRITES = (_WRITE_FILE | 0b11111111 << 4 | 1 << 12, 1 << 13, _TRUNCATE)
_SCOPE_ABSTRACT_SOCKETS, _SCOPE_SIGNALS = 1, 2  # 6th edition


def confine_writes(directories: Iterable[str], files: Iterable[str]) -> bool:
    """From now on, this thread and what it starts write nowhere but there.

    It also cannot reach into processes outside: not by ptrace, nor through /proc, nor, from
    Linux 6.12 on, by a signal.
    """
    if not on_linux():
        return False
    libc = _libc()
    edition = _syscall(libc, _LANDLOCK_CREATE, None, 0, _LANDLOCK_VERSION)
    if edition < 1:
        return False
    writes = _WRITES[0] | (_WRITES[1] if edition >= 2 else 0) | (_WRITES[2] if edition >= 3 else 0)
    scoped = _SCOPE_ABSTRACT_SOCKETS | _SCOPE_SIGNALS
    attributes = struct.pack("=QQQ", writes, 0, scoped)[: 24 if edition >= 6 else 8]
    rules = _syscall(libc, _LANDLOCK_CREATE, attributes, len(attributes), 0)
    if rules < 0:
        return False
    try:
        for path in directories:
            if not _allow(libc, rules, path, writes):
                return False
        for path in files:
            _allow(libc, rules, path, writes & (_WRITE_FILE | _TRUNCATE))  # it may not exist
        return _syscall(libc, _LANDLOCK_RESTRICT, rules, 0) == 0
    finally:
        os.close(rules)


def _allow(libc: Any, rules: int, path: str, what: int) -> bool:
    try:
        at = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        rule = struct.pack("=Qi", what, at)
        return _syscall(libc, _LANDLOCK_ADD, rules, _PATH_BENEATH, rule, 0) == 0
    finally:
        os.close(at)


# seccomp: https://docs.kernel.org/userspace-api/seccomp_filter.html


class _Machine(NamedTuple):
    """What a filter must know of a processor: its name in the kernel, and its call numbers."""

    audit: int
    socket: int
    socketpair: int
    kill: int
    pwrite64: int
    fsync: int
    fdatasync: int
    seccomp: int


_MACHINES = {
    "x86_64": _Machine(
        audit=0xC000003E,
        socket=41,
        socketpair=53,
        kill=62,
        pwrite64=18,
        fsync=74,
        fdatasync=75,
        seccomp=317,
    ),
    "aarch64": _Machine(
        audit=0xC00000B7,
        socket=198,
        socketpair=199,
        kill=129,
        pwrite64=68,
        fsync=82,
        fdatasync=83,
        seccomp=277,
    ),
}
_IO_URING_SETUP = 425  # makes sockets as well, and is seen by no filter
_X32 = 0x40000000  # calls of another kind, under other numbers
_LOAD, _AND, _IF_EQUAL, _IF_AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000 | errno.EACCES, 0x80000000
_ASK = 0x7FC00000
_SECCOMP_FILTER = 2  # to prctl
_SET_FILTER, _NEW_LISTENER, _GET_SIZES = 1, 8, 3  # to seccomp
_NUMBER, _ARCHITECTURE, _FIRST, _SECOND = 0, 4, 16, 24  # where they are in what a filter sees
_SOCK_DGRAM = 2


def filter_calls(*, sockets: bool) -> bool:
    """From now on, refuse `kill(-1)`, and unless allowed every socket but a connected pair.

    A pair of datagram sockets is refused too: it could still send to another address.
    """
    machine = _machine()
    if machine is None:
        return False
    steps = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_IF_EQUAL, 1, 0, machine.audit),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        *((_IF_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _KILL)),
        *((_IF_EQUAL, 0, 4, machine.kill), (_LOAD, 0, 0, _FIRST)),
        *((_IF_EQUAL, 0, 1, 0xFFFFFFFF), (_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _ALLOW)),
    ]
    if not sockets:
        for number in (machine.socket, _IO_URING_SETUP):
            steps += [(_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, _REFUSE)]
        steps += [
            *((_IF_EQUAL, 0, 4, machine.socketpair), (_LOAD, 0, 0, _SECOND), (_AND, 0, 0, 0xF)),
            *((_IF_EQUAL, 0, 1, _SOCK_DGRAM), (_RETURN, 0, 0, _REFUSE)),
        ]
    steps.append((_RETURN, 0, 0, _ALLOW))
    with _program(steps) as program:
        return bool(_libc().prctl(_PR_SET_SECCOMP, _SECCOMP_FILTER, program, 0, 0) == 0)


@fast_path("call-watch")
def call_watch() -> tuple[str, int]:
    """Whether a process may answer for system calls of another (Linux 5.5)."""
    machine, sizes = _machine(), ctypes.create_string_buffer(6)
    if machine is None:
        raise Unavailable(f"not Linux on {', '.join(_MACHINES)}")
    if _release() < (5, 5) or _syscall(_libc(), machine.seccomp, _GET_SIZES, 0, sizes):
        raise Unavailable("the kernel has no seccomp_unotify")
    return "seccomp_unotify", 0


def watch_calls(names: Iterable[Literal["pwrite64", "fsync", "fdatasync"]]) -> int | None:
    """From now on, these calls of ours and of our children wait for an answer.

    The file descriptor that is returned is asked for them (`seccomp_unotify(2)`).
    """
    machine = _machine()
    if machine is None or not refuse_privileges():
        return None
    steps = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_IF_EQUAL, 1, 0, machine.audit),
        (_RETURN, 0, 0, _ALLOW),
        (_LOAD, 0, 0, _NUMBER),
    ]
    for name in names:
        steps += [(_IF_EQUAL, 0, 1, getattr(machine, name)), (_RETURN, 0, 0, _ASK)]
    steps.append((_RETURN, 0, 0, _ALLOW))
    with _program(steps) as program:
        listener = _syscall(_libc(), machine.seccomp, _SET_FILTER, _NEW_LISTENER, program)
    return listener if listener >= 0 else None


def _machine() -> _Machine | None:
    return _MACHINES.get(os.uname().machine) if on_linux() and sys.maxsize > 2**32 else None


@contextmanager
def _program(steps: list[tuple[int, int, int, int]]) -> Iterator[bytes]:
    """A filter as the kernel takes it, which points to its steps."""
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    yield struct.pack("@HP", len(steps), ctypes.addressof(code))


def wipe_start_environment(keep: set[str]) -> None:
    """Overwrite what /proc/self/environ shows, also of variables that were changed since."""
    if not on_linux():
        return
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    begin, end = int(fields[47]), int(fields[48])  # env_start, env_end
    if not 0 < begin < end:
        return
    for entry in ctypes.string_at(begin, end - begin).split(b"\0"):
        if entry.partition(b"=")[0].decode("utf-8", "replace") not in keep:
            ctypes.memset(begin, 0, len(entry))
        begin += len(entry) + 1


def limit_processes(count: int) -> bool:
    """At most so many at once in our own namespace of processes; only for its first."""
    # Before this release the number is that of the whole machine, and must not be touched.
    if not on_linux() or os.getpid() != 1 or _release() < (6, 14):
        return False
    with suppress(OSError), open("/proc/sys/kernel/pid_max", "w", encoding="ascii") as file:
        file.write(str(count))
        return True
    return False


def _release() -> tuple[int, int]:
    numbers = [int("".join(filter(str.isdigit, p)) or 0) for p in os.uname().release.split(".")[:2]]
    return numbers[0], numbers[1]


def _syscall(libc: Any, number: int, *arguments: Any) -> int:
    whole = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return int(libc.syscall(ctypes.c_long(number), *whole))


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)
