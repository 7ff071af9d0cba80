"""What is taken from a process before it runs the user's code on what a policy wrote.

No secrets in its environment, no network, no privileges, bounded memory and files. It guards
against accidents and common mischief; code that a policy wrote, run on purpose, deserves a
container around the whole as well. Linux has all of it, other systems a part; `Isolation` says
what was had.
"""

import ctypes
import gc
import os
import resource
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal, NoReturn

from dora_rl.tasks.workers.wire import Isolation, Limits

KEPT = frozenset(
    (
        *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TMPDIR", "TZ", "VIRTUAL_ENV"),
        *("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "PYTHONHASHSEED"),
        *("HF_HOME", "XDG_CACHE_HOME", "ONEDNN_MAX_CPU_ISA"),
    )
)
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_FILE_BYTES = 64 << 20
_OPEN_FILES = 256
_LINUX = sys.platform == "linux"
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _PR_SET_CHILD_SUBREAPER = 1, 38, 36
_CAPABILITY_VERSION_3 = 0x20080522


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What a worker may know of the driver's environment."""
    kept = {k: v for k, v in environment.items() if k in KEPT or k.startswith("LC_")}
    # The same rewards in every run, also from code that depends on the order of a set.
    kept.setdefault("PYTHONHASHSEED", "0")
    return kept | dict.fromkeys(_ONE_THREAD, "1")


def forget_driver(keep: int) -> None:
    """In a fork of the driver: let go of its files, its environment, its handlers.

    A file is replaced rather than closed, so that an object of the driver's that is collected
    here closes nothing of ours.
    """
    gc.freeze()
    null = os.open(os.devnull, os.O_RDWR)
    try:
        numbers = [int(name) for name in os.listdir("/dev/fd")]
    except OSError:
        numbers = list(range(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))
    for number in {0, 1, 2, *numbers} - {keep, null}:
        with suppress(OSError):  # the listing's own
            if number > 2:
                os.fstat(number)
            os.dup2(null, number)
    # A notebook's own would hand the text to a thread that is not here.
    sys.stdin = open(os.devnull)  # noqa: SIM115
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    kept = clean_environment(os.environ)
    _wipe_environment(set(kept))
    os.environ.clear()
    os.environ.update(kept)


def enter_nursery(limits: Limits) -> Isolation:
    """For the process that forks the workers, before it imports the user's code."""
    network = "open" if limits.network else _leave_network()
    if _LINUX:
        libc = _libc()
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        # What a worker leaves behind becomes ours, and can be found and killed.
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    return Isolation(
        network=network,
        privileges="none" if _LINUX else "inherited",
        memory="limited" if _LINUX else "unlimited",
    )


def enter_worker(limits: Limits, nursery: int) -> None:
    """For a worker, right after its fork."""
    with suppress(OSError):
        os.setpgid(0, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE_BYTES, _FILE_BYTES))
    _lower(resource.RLIMIT_NOFILE, _OPEN_FILES)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # an OSError instead of a death
    if _LINUX:
        _lower(resource.RLIMIT_AS, _mapped_bytes() + (limits.memory_mb << 20))
        _libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        _drop_capabilities()
        if os.getppid() != nursery:  # it died before we asked to die with it
            os._exit(1)


def _leave_network() -> Literal["namespace", "python"]:
    if _LINUX:
        libc = _libc()
        if libc.unshare(_CLONE_NEWNET) == 0:
            return "namespace"
        user, group = os.getuid(), os.getgid()
        if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) == 0:
            with suppress(OSError):
                _write("/proc/self/uid_map", f"{user} {user} 1")
                _write("/proc/self/setgroups", "deny")
                _write("/proc/self/gid_map", f"{group} {group} 1")
            return "namespace"
    block_sockets()
    return "python"


def block_sockets() -> None:
    """Where the system cannot: Python code gets no socket but local ones."""
    original = socket.socket

    class LocalSocket(original):  # type: ignore[misc,valid-type]
        """A socket that stays on this machine."""

        def __init__(self, family: int = -1, *args: Any, **kwargs: Any) -> None:
            if family != socket.AF_UNIX and kwargs.get("fileno") is None and len(args) < 3:
                _refuse()
            super().__init__(family, *args, **kwargs)

    def refused(*args: Any, **kwargs: Any) -> NoReturn:
        _refuse()

    socket.socket = LocalSocket  # type: ignore[misc]
    socket.SocketType = LocalSocket
    socket.getaddrinfo = refused
    socket.create_connection = refused


def _refuse() -> NoReturn:
    raise PermissionError("no network here: set task.reward_network = true to allow it")


def _drop_capabilities() -> None:
    """Root without its powers: it cannot join another network, or read the driver's memory."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _libc().capset(header, (ctypes.c_uint32 * 6)())


def _wipe_environment(keep: set[str]) -> None:
    """Overwrite what the system itself would show of the environment at our start."""
    if not _LINUX:
        return
    entries = ctypes.POINTER(ctypes.c_void_p).in_dll(_libc(), "environ")
    index = 0
    while entries and entries[index]:
        text = ctypes.string_at(entries[index])
        if text.partition(b"=")[0].decode("utf-8", "replace") not in keep:
            ctypes.memset(entries[index], 0, len(text))
        index += 1


def _mapped_bytes() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _lower(what: int, limit: int) -> None:
    hard = resource.getrlimit(what)[1]
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(what, (limit, limit))


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)
