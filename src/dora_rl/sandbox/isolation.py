"""What is taken from a process before it runs the user's code on what a policy wrote.

No secrets in its environment, no network, no privileges; bounded memory, files and processes;
nothing to write but a directory of its own, and nobody else to see or to signal. What a reward
starts cannot reach into it; code that a policy wrote is for `dora_rl.sandbox`, one level below.
Linux has all of it, other systems a part; `Isolation` says what was had, as a trial found it.
"""

import gc
import os
import resource
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

from dora_rl.machine.fast_paths import PORTABLE, on_linux
from dora_rl.sandbox import linux
from dora_rl.sandbox.protocol import Isolation, Limits

_LOCALE = (
    *("ALL", "CTYPE", "NUMERIC", "TIME", "COLLATE", "MONETARY", "MESSAGES", "PAPER", "NAME"),
    *("ADDRESS", "TELEPHONE", "MEASUREMENT", "IDENTIFICATION"),
)
KEPT = frozenset(
    (
        *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TMPDIR", "TZ", "VIRTUAL_ENV"),
        *("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "PYTHONHASHSEED"),
        "PYTHONUTF8",
        *("HF_HOME", "XDG_CACHE_HOME", "ONEDNN_MAX_CPU_ISA", PORTABLE),
        *(f"LC_{name}" for name in _LOCALE),
    )
)
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_FILE_BYTES = 64 << 20
_OPEN_FILES = 256
PROCESSES = 512
_SCRATCH = "size=256m,nr_inodes=16384,mode=0700"  # a file system in memory: it ends by itself
_PROCESSES_VIEW = "/proc"
_SHARED_MEMORY = "/dev/shm"
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty")
# Where people keep what opens something, in the home directory.
_PRIVATE = (
    *(".ssh", ".gnupg", ".aws", ".azure", ".kube", ".docker", ".config/gcloud", ".config/gh"),
    *(".netrc", ".git-credentials", ".pypirc", ".pgpass", ".cache/huggingface/token"),
    *(".cache/huggingface/stored_tokens", ".huggingface/token", ".kaggle", ".config/wandb"),
    *(".npmrc", ".yarnrc", ".yarnrc.yml", ".m2/settings.xml", ".m2/settings-security.xml"),
    *(".cargo/credentials", ".cargo/credentials.toml", ".gem/credentials", ".config/pip"),
    *(".gradle/gradle.properties", ".pip/pip.conf", ".config/rclone", ".s3cfg", ".boto"),
    *(".databrickscfg", ".terraform.d", ".terraformrc", ".vault-token", ".my.cnf"),
    *(".config/hub", ".config/glab-cli", ".config/pypoetry", ".password-store"),
)


class Namespaces(NamedTuple):
    """What the namespaces around one worker gave it."""

    own_view: bool = False  # of the processes
    own_memory: bool = False  # that processes share by name
    limited: bool = False  # the number of its processes
    read_only: bool = False  # all that it is not to write
    private: bool = False  # keys in the home directory, and whatever else is to be hidden


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What a worker may know of the driver's environment."""
    kept = {name: value for name, value in environment.items() if name in KEPT}
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
    os.environ.clear()
    os.environ.update(kept)
    linux.wipe_start_environment(set(kept))


def enter_zygote(limits: Limits) -> bool:
    """For the process that makes the workers, before it imports the user's code.

    Whether it left the machine's network.
    """
    linux.refuse_privileges()
    linux.adopt_orphans()  # what a worker leaves behind can be found and killed
    enter_fresh(limits)
    alone = _leave_network(limits)
    linux.set_dumpable(False)
    return alone


def _leave_network(limits: Limits) -> bool:
    wanted = 0 if limits.network else linux.NEW_NETWORK
    # Root needs no namespace of users; for others it is the key to all the rest.
    if os.geteuid() == 0 and linux.unshare(wanted):
        return bool(wanted)
    user, group = os.getuid(), os.getgid()
    if not linux.unshare(wanted | linux.NEW_USER):
        return False
    with suppress(OSError):
        _write("/proc/self/uid_map", f"{user} {user} 1")
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/gid_map", f"{group} {group} 1")
    return bool(wanted)


def enter_fresh(limits: Limits) -> None:
    """For whoever is about to import the user's code, where the system keeps no network away."""
    if not on_linux() and not limits.network:
        block_sockets()


def enter_namespaces(scratch: str, limits: Limits) -> Namespaces:
    """For the first process of a worker's own namespaces; whatever is refused stays as it was."""
    if not linux.mount("", "/", linux.RECURSIVE | linux.PRIVATE):
        return Namespaces(
            limited=linux.limit_processes(PROCESSES)
        )  # in a sandbox: it has no mounts
    read_only = linux.mount_read_only([scratch, *filter(os.path.isdir, limits.writable)])
    safe = linux.NO_SETUID | linux.NO_DEVICES
    own_view = linux.mount("proc", _PROCESSES_VIEW, safe | linux.NO_PROGRAMS)
    linux.mount("tmpfs", scratch, safe, _SCRATCH)
    own_memory = linux.mount("tmpfs", _SHARED_MEMORY, safe, _SCRATCH)
    # All of them, whatever fails.
    seen = [
        path for path in (*_private_paths(os.environ), *limits.hidden) if not _hide(path, scratch)
    ]
    return Namespaces(own_view, own_memory, linux.limit_processes(PROCESSES), read_only, not seen)


def _hide(path: str, scratch: str) -> bool:
    if os.path.isdir(path):
        if Path(scratch).is_relative_to(os.path.realpath(path)):
            return False
        flags = linux.NO_SETUID | linux.NO_DEVICES | linux.READ_ONLY
        return linux.mount("tmpfs", path, flags, "size=4k,mode=0500")
    return not os.path.exists(path) or linux.mount("", path, linux.BIND, source=os.devnull)


def _private_paths(environment: Mapping[str, str]) -> list[str]:
    home, hub = environment.get("HOME"), environment.get("HF_HOME")
    return [
        *(os.path.join(home, name) for name in _PRIVATE if home),
        *(os.path.join(hub, name) for name in ("token", "stored_tokens") if hub),
    ]


def hidden_by(path: str, besides: tuple[str, ...]) -> str | None:
    """The place that holds this real path, if a worker has something else there."""
    for place in (_PROCESSES_VIEW, _SHARED_MEMORY, *_private_paths(os.environ), *besides):
        if Path(path).is_relative_to(os.path.realpath(place)):
            return place
    return None


def enter_worker(
    limits: Limits, scratch: str, *, driver: int, alone: bool, namespaces: Namespaces | None
) -> Isolation:
    """For a worker, right after its fork; `alone` if it has not the machine's network."""
    with suppress(OSError):
        os.setpgid(0, 0)
    _enter_scratch(scratch)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE_BYTES, _FILE_BYTES))
    _lower(resource.RLIMIT_NOFILE, _OPEN_FILES)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # an OSError instead of a death
    if on_linux():
        _lower(resource.RLIMIT_AS, _mapped_bytes() + (limits.memory_mb << 20))
        linux.set_dumpable(True)  # else the file is root's
        with suppress(OSError):
            _write("/proc/self/oom_score_adj", "1000")  # rather we than the driver
    shared = [_SHARED_MEMORY] if namespaces and namespaces.own_memory else []
    # One that is gone by now must not be the end of all confinement.
    writable = filter(os.path.isdir, limits.writable)
    confined = linux.confine_files([scratch, *shared, *writable], _DEVICES, limits.readable)
    privileges = linux.drop_capabilities()
    read_only = namespaces is not None and namespaces.read_only
    filtered = linux.filter_calls(sockets=limits.network, attributes=read_only)
    untraceable = linux.set_dumpable(False)  # the last: other changes of a process may undo it
    return Isolation(
        network=_network(limits, alone, filtered),
        calls="filtered" if filtered else "open",
        privileges="none" if privileges else "inherited",
        memory="limited" if on_linux() else "unlimited",
        processes="apart" if namespaces else "shared",
        forks="limited" if namespaces and namespaces.limited else "unlimited",
        attributes="mounts" if read_only else "filter" if filtered else "open",
        private="hidden" if namespaces and namespaces.private else "readable",
        writes="scratch" if confined else "mounts" if read_only else "anywhere",
        answers="own" if untraceable and privileges else "exposed",
        driver="hidden"
        if (namespaces and namespaces.own_view) or not _can_look_into(driver)
        else "readable",
    )


def _can_look_into(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            file.read(1)
    except OSError:
        return False
    return True


def _network(
    limits: Limits, alone: bool, filtered: bool
) -> Literal["namespace", "filter", "python", "open"]:
    if limits.network:
        return "open"
    if alone:
        return "namespace"
    if filtered:
        return "filter"
    block_sockets()
    return "python"


def _enter_scratch(scratch: str) -> None:
    """What is written to the working or the temporary directory is ours alone, and goes with us."""
    os.makedirs(scratch, mode=0o700, exist_ok=True)
    sys.path[:] = [os.path.abspath(entry) for entry in sys.path]  # it may name where we were
    os.chdir(scratch)
    os.environ["TMPDIR"] = tempfile.tempdir = scratch


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
