"""The supervisor of one program: `python -m dora_rl.sandbox.programs SOCKET_NUMBER`.

    run_python ── supervisor ── first process of the namespaces ── the program ── its children

A fresh interpreter, so that nothing of the reward's memory is below it. It ends the program and
all that it started at the time limit, when the program ends, and when its caller is gone.
"""

import functools
import os
import select
import signal
import socket
import sys
import sysconfig
import time
from contextlib import suppress
from typing import NoReturn

import msgspec

from dora_rl.sandbox import isolation, linux, worker_process
from dora_rl.sandbox.programs.messages import Ended, Job, gaps
from dora_rl.sandbox.protocol import Frames, Isolation, Limits, pack
from dora_rl.sandbox.zygote import read_frame

_END_S = 3.0  # to see everybody gone
_CHUNK = 1 << 16
_PROGRAM = "main.py"
# What an interpreter opens, besides its own directories and its libraries'.
_SYSTEM = (
    *("/usr", "/lib", "/lib64", "/lib32", "/bin", "/sbin", "/opt", "/nix/store", "/gnu/store"),
    *("/etc/ld.so.cache", "/etc/ld.so.preload", "/etc/localtime", "/etc/alternatives"),
)


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)
    job = msgspec.msgpack.decode(read_frame(channel), type=Job)
    limits = Limits(timeout_s=job.timeout_s, memory_mb=job.memory_mb, readable=_readable())
    limited = linux.processes_limited(isolation.PROCESSES)
    alone = isolation.enter_zygote(limits)
    process, found = _start(job, limits, alone, channel.fileno())
    began = time.monotonic()
    timed_out, status = _watch(process, channel, began + job.timeout_s)
    seconds = time.monotonic() - began
    returncode = _end(process, status)
    orphans = worker_process.orphan_list().in_force
    message = Ended(
        returncode=returncode,
        timed_out=timed_out,
        seconds=seconds,
        gaps=gaps(found, forks_limited=limited, orphans_found=orphans),
    )
    with suppress(OSError):  # the caller is gone
        channel.sendall(pack(message))


def _readable() -> tuple[str, ...]:
    """The interpreter and what is installed for it."""
    paths = sysconfig.get_paths()
    own = {sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix}
    own |= {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    own |= {os.path.dirname(os.path.realpath(sys.executable))}
    return (*_SYSTEM, *sorted(own))


def _start(
    job: Job, limits: Limits, alone: bool, control: int
) -> tuple[worker_process.Process, Isolation]:
    """The program, in the best way that the system allows, and what is in force for it."""
    place = os.fsdecode(job.scratch)
    enter = functools.partial(isolation.enter_namespaces, place, limits)
    for entering in (enter, None):
        told, tell = os.pipe()

        def body(namespaces: isolation.Namespaces | None, tell: int = tell) -> None:
            _become_program(job, limits, alone, namespaces, tell)

        try:
            process = worker_process.start(
                body, enter=entering, channel=tell, closing=[control, told]
            )
        except OSError:
            os.close(told)
            continue
        finally:
            os.close(tell)
        with open(told, "rb") as file:
            said = Frames().feed(file.read())  # to its end: the program has begun, or there is none
        if len(said) == 1:
            return process, msgspec.msgpack.decode(said[0], type=Isolation)
        _end(process, None)
        if said:
            raise OSError(msgspec.msgpack.decode(said[1], type=str))
    raise OSError("no process can be had")


def _become_program(
    job: Job, limits: Limits, alone: bool, namespaces: isolation.Namespaces | None, tell: int
) -> NoReturn:
    """Tells what is in force, and then, if it is not the program by then, why not."""
    own = os.path.join(os.fsdecode(job.scratch), "run")
    found = isolation.enter_worker(
        limits, own, driver=os.getppid(), alone=alone, namespaces=namespaces
    )
    os.write(tell, pack(found))
    try:
        with open(_PROGRAM, "xb") as file:
            file.write(job.code)
        os.closerange(3, tell)
        os.closerange(tell + 1, os.sysconf("SC_OPEN_MAX"))
        for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        os.execve(sys.executable, [sys.executable, "-s", "-P", _PROGRAM], _environment(own))
    except OSError as error:
        os.write(tell, pack(str(error)))
    os._exit(1)


def _environment(own: str) -> dict[str, str]:
    return isolation.clean_environment({}) | {
        "PATH": os.defpath,
        "HOME": own,
        "TMPDIR": own,
        "LANG": "C.UTF-8",
        "PYTHONUTF8": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def _watch(
    process: worker_process.Process, channel: socket.socket, deadline: float
) -> tuple[bool, int | None]:
    """Until the program ends: whether its time was over, and its status if it ended by itself."""
    wake, wake_up = os.pipe()
    for number in (wake, wake_up):
        os.set_blocking(number, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake_up, warn_on_full_buffer=False)
    poller = select.poll()
    for number in (wake, channel.fileno()):
        poller.register(number, select.POLLIN)
    while True:
        pid, status = os.waitpid(process.pid, os.WNOHANG)
        if pid:
            return False, status
        left = deadline - time.monotonic()
        if left <= 0:
            return True, None
        ready = [number for number, _ in poller.poll(1000 * left + 1)]
        if channel.fileno() in ready:
            return False, None  # the caller is gone
        with suppress(BlockingIOError):
            os.read(wake, _CHUNK)


def _end(process: worker_process.Process, status: int | None) -> int:
    """Leave nobody behind; how the program ended."""
    process.kill(waited_for=status is not None)
    if status is None:
        _, status = os.waitpid(process.pid, 0)
    returncode = process.ended(status)
    deadline = time.monotonic() + _END_S
    with suppress(ChildProcessError):
        while time.monotonic() < deadline:  # what it left behind became ours
            worker_process.kill_all(worker_process.children())
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.001)
    return returncode


if __name__ == "__main__":
    main()
