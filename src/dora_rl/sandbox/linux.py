"""Calls to Linux that Python has no name for. Each says whether it worked; none decides.

Elsewhere, and where a kernel is too old or forbids it, the answer is no. The numbers are those
of the kernel's headers, and never change.
"""

import ctypes
import errno
import os
import stat
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

_PR_SET_DUMPABLE, _PR_SET_SECCOMP = 4, 22
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 36, 38
_CAPABILITY_VERSION_3 = 0x20080522
_MOST_PROCESSES = "/proc/sys/kernel/pid_max"


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


# Newer calls for mounts, of Linux 5.12: their numbers are the same everywhere.
_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442
_CLONE, _ALL_BELOW, _HERE, _MOVE_OPEN = 1, 0x8000, -100, 0x4 | 0x10
_SETTING = struct.pack("=QQQQ", READ_ONLY, 0, 0, 0)


def mount_read_only(besides: Iterable[str]) -> bool:
    """Everything that is mounted can only be read from now on, but for these directories.

    For namespaces of mounts that are our own.
    """
    if not on_linux():
        return False
    libc = _libc()
    kept: list[tuple[str, int]] = []
    try:
        for path in besides:
            flags = _CLONE | _ALL_BELOW | os.O_CLOEXEC
            kept.append((path, _syscall(libc, _OPEN_TREE, _HERE, os.fsencode(path), flags)))
        if any(tree < 0 for _, tree in kept) or _syscall(
            libc, _MOUNT_SETATTR, _HERE, b"/", _ALL_BELOW, _SETTING, len(_SETTING)
        ):
            return False
        return all(
            _syscall(libc, _MOVE_MOUNT, tree, b"", _HERE, os.fsencode(path), _MOVE_OPEN) == 0
            for path, tree in kept
        )
    finally:
        for _, tree in kept:
            if tree >= 0:
                os.close(tree)


def adopt_orphans() -> None:
    """What our descendants leave behind becomes our child."""
    if on_linux():
        _libc().prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def refuse_privileges() -> bool:
    """No program that is started from here gets more than we have."""
    return on_linux() and bool(_libc().prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0)


def set_dumpable(allowed: bool) -> bool:
    """Whether others of our user may trace us, take our files and read our memory.

    A fork has it from us, a program that is started from here has not. While they may not, our
    own files below /proc belong to root.
    """
    return on_linux() and bool(_libc().prctl(_PR_SET_DUMPABLE, int(allowed), 0, 0, 0) == 0)


def drop_capabilities() -> bool:
    """Root without its powers: it cannot join another network, or read another's memory."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    return on_linux() and bool(_libc().capset(header, (ctypes.c_uint32 * 6)()) == 0)


# Landlock: https://docs.kernel.org/userspace-api/landlock.html

_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_LANDLOCK_VERSION = 1
_PATH_BENEATH = 1
_WRITE_FILE, _TRUNCATE = 1 << 1, 1 << 14
_EXECUTE, _READ_FILE, _READ_DIRECTORY = 1 << 0, 1 << 2, 1 << 3
_READS = _EXECUTE | _READ_FILE | _READ_DIRECTORY
_OF_FILES = _EXECUTE | _READ_FILE | _WRITE_FILE | _TRUNCATE
# Write, remove, make of every kind; then move (2nd edition) and truncate (3rd).
_WRITES = (_WRITE_FILE | 0b11111111 << 4 | 1 << 12, 1 << 13, _TRUNCATE)
_SCOPE_ABSTRACT_SOCKETS, _SCOPE_SIGNALS = 1, 2  # 6th edition


def confine_files(
    directories: Iterable[str], files: Iterable[str], readable: Iterable[str] | None = None
) -> bool:
    """From now on, this thread and what it starts write nowhere but there.

    With `readable`, they open and execute nothing but that and those, either. They also cannot
    reach into processes outside: not by ptrace, nor through /proc, nor, from Linux 6.12 on, by a
    signal.
    """
    if not on_linux():
        return False
    libc = _libc()
    edition = _syscall(libc, _LANDLOCK_CREATE, None, 0, _LANDLOCK_VERSION)
    if edition < 1:
        return False
    writes = _WRITES[0] | (_WRITES[1] if edition >= 2 else 0) | (_WRITES[2] if edition >= 3 else 0)
    reads = 0 if readable is None else _READS
    scoped = _SCOPE_ABSTRACT_SOCKETS | _SCOPE_SIGNALS
    attributes = struct.pack("=QQQ", writes | reads, 0, scoped)[: 24 if edition >= 6 else 8]
    rules = _syscall(libc, _LANDLOCK_CREATE, attributes, len(attributes), 0)
    if rules < 0:
        return False
    try:
        for path in directories:
            if not _allow(libc, rules, path, writes | reads):
                return False
        for path in files:
            _allow(libc, rules, path, writes | reads)  # it may not exist
        for path in readable or ():
            _allow(libc, rules, path, reads)
        return _syscall(libc, _LANDLOCK_RESTRICT, rules, 0) == 0
    finally:
        os.close(rules)


def _allow(libc: Any, rules: int, path: str, what: int) -> bool:
    try:
        at = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        if not stat.S_ISDIR(os.fstat(at).st_mode):
            what &= _OF_FILES
        rule = struct.pack("=Qi", what, at)
        return _syscall(libc, _LANDLOCK_ADD, rules, _PATH_BENEATH, rule, 0) == 0
    finally:
        os.close(at)


# seccomp: https://docs.kernel.org/userspace-api/seccomp_filter.html


class _Machine(NamedTuple):
    """What a filter must know of a processor: its name in the kernel, and its call numbers."""

    audit: int
    ioctl: int
    socket: int
    socketpair: int
    kill: int
    pwrite64: int
    fsync: int
    fdatasync: int
    seccomp: int
    tracing: tuple[int, ...]  # ptrace, process_vm_readv, process_vm_writev
    attributes: tuple[int, ...]  # chmod, chown, utime, setxattr and removexattr, of every kind


_MACHINES = {
    "x86_64": _Machine(
        audit=0xC000003E,
        ioctl=16,
        socket=41,
        socketpair=53,
        kill=62,
        pwrite64=18,
        fsync=74,
        fdatasync=75,
        seccomp=317,
        tracing=(101, 310, 311),
        attributes=(
            *(90, 91, 92, 93, 94, 132, 188, 189, 190, 197, 198, 199, 235, 260, 261, 268, 280),
        ),
    ),
    "aarch64": _Machine(
        audit=0xC00000B7,
        ioctl=29,
        socket=198,
        socketpair=199,
        kill=129,
        pwrite64=68,
        fsync=82,
        fdatasync=83,
        seccomp=277,
        tracing=(117, 270, 271),
        attributes=(5, 6, 7, 14, 15, 16, 52, 53, 54, 55, 88),
    ),
}
# Of newer calls the number is the same everywhere.
_PIDFD_GETFD = 438
_NEW_ATTRIBUTES = (452, 463, 466, 469)  # fchmodat2, setxattrat, removexattrat, file_setattr
_SET_FLAGS = (0x40086602, 0x401C5820)  # to ioctl: what `chattr` does
_IO_URING_SETUP = 425  # makes sockets and attributes as well, and is seen by no filter
_X32 = 0x40000000  # calls of another kind, under other numbers
_LOAD, _AND, _IF_EQUAL, _IF_AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000 | errno.EACCES, 0x80000000
_FORBID = 0x00050000 | errno.EPERM
_ASK = 0x7FC00000
_SECCOMP_FILTER = 2  # to prctl
_SET_FILTER, _NEW_LISTENER, _GET_SIZES = 1, 8, 3  # to seccomp
_NUMBER, _ARCHITECTURE, _FIRST, _SECOND = 0, 4, 16, 24  # where they are in what a filter sees
_SOCK_DGRAM, _SOCK_RAW = 2, 3

_Step = tuple[int, int, int, int]


def filter_calls(*, sockets: bool, attributes: bool) -> bool:
    """From now on, refuse `kill(-1)` and whatever reaches into another process.

    Unless they are allowed, every socket but a connected pair, and every change of a file's mode,
    owner, times or attributes. A pair of datagram sockets is refused too: it could still send to
    another address.
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
        *_refused((*machine.tracing, _PIDFD_GETFD), _FORBID),
        *_refused((_IO_URING_SETUP,), _REFUSE),
    ]
    if not sockets:
        steps += _refused((machine.socket,), _REFUSE)
    if not attributes:
        steps += _refused((*machine.attributes, *_NEW_ATTRIBUTES), _FORBID)
        steps += _refused_if(machine.ioctl, _SECOND, _SET_FLAGS, _FORBID)
    steps += _refused_if(machine.kill, _FIRST, (0xFFFFFFFF,), _REFUSE)
    if not sockets:
        steps += [
            *((_IF_EQUAL, 0, 6, machine.socketpair), (_LOAD, 0, 0, _SECOND), (_AND, 0, 0, 0xF)),
            *_refused((_SOCK_DGRAM, _SOCK_RAW), _REFUSE),  # Linux makes datagrams of a raw pair
        ]
    steps.append((_RETURN, 0, 0, _ALLOW))
    with _program(steps) as program:
        return bool(_libc().prctl(_PR_SET_SECCOMP, _SECCOMP_FILTER, program, 0, 0) == 0)


def _refused(numbers: Iterable[int], answer: int) -> list[_Step]:
    """With the number of the call at hand: these are answered so."""
    return [step for n in numbers for step in ((_IF_EQUAL, 0, 1, n), (_RETURN, 0, 0, answer))]


def _refused_if(number: int, where: int, values: tuple[int, ...], answer: int) -> list[_Step]:
    """This call, with one of these as its argument; with another it is allowed."""
    inner = [(_LOAD, 0, 0, where), *_refused(values, answer), (_RETURN, 0, 0, _ALLOW)]
    return [(_IF_EQUAL, 0, len(inner), number), *inner]


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
def _program(steps: list[_Step]) -> Iterator[bytes]:
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


def processes_limited(count: int) -> bool:
    """Whether no more than these can be in the namespace of processes that we see."""
    if not on_linux():
        return False
    with suppress(OSError, ValueError), open(_MOST_PROCESSES, encoding="ascii") as file:
        return int(file.read()) <= count
    return False


def limit_processes(count: int) -> bool:
    """At most so many at once in our own namespace of processes; only for its first."""
    # Before this release the number is that of the whole machine, and must not be touched.
    if not on_linux() or os.getpid() != 1 or _release() < (6, 14):
        return False
    with suppress(OSError), open(_MOST_PROCESSES, "w", encoding="ascii") as file:
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
