"""A program that tries what it should not be able to do, and rewards that run it. By name."""

from typing import Any

from dora_rl.sandbox import run_python

# Prints a word for each thing that it got done.
ATTEMPTS = """
import ctypes, glob, json, os, signal, socket, sys, tempfile
from contextlib import suppress

example = json.loads(input())
libc = ctypes.CDLL(None, use_errno=True)
if set(os.environ) - {
    *("PATH", "HOME", "TMPDIR", "LANG", "LC_CTYPE", "PYTHONHASHSEED", "PYTHONUTF8"),
    *("PYTHONDONTWRITEBYTECODE", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"),
}:
    print("environment")
for number in range(3, 256):
    with suppress(OSError):
        os.fstat(number)
        print("file-descriptor")
for path in example["files"]:
    with suppress(OSError):
        open(path).read()
        print("read")
    with suppress(OSError):
        open(path, "a").close()
        print("write")
    with suppress(OSError):
        os.chmod(path, 0o700)
        print("chmod")
    with suppress(OSError):
        os.listdir(os.path.dirname(path))
        print("list")
with suppress(OSError):
    socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    print("socket")
with suppress(OSError):
    socket.socket(socket.AF_UNIX).connect("\\0nobody")
    print("socket")
for kind in (socket.SOCK_DGRAM, socket.SOCK_RAW):  # a pair of datagrams can send elsewhere
    with suppress(OSError):
        socket.socketpair(socket.AF_UNIX, kind)
        print("datagrams")
for pid in {os.getppid(), example["caller"]} - {0}:
    for name in ("environ", "mem", "maps", "cmdline"):  # as the reward sees the processes
        with suppress(OSError):
            os.close(os.open(f"/proc/{pid}/{name}", os.O_RDONLY))
            print(name)
    if pid == os.getpid():
        continue  # by its number it means itself
    with suppress(OSError):
        os.kill(pid, 0 if pid == example["caller"] else signal.SIGKILL)
        if pid != 1:  # the first process of the namespaces cannot be hurt from inside
            print("kill")
    pidfd = libc.syscall(434, pid, 0)
    for number in range(64):
        if libc.syscall(438, pidfd, number, 0) >= 0:
            print("pidfd_getfd")
    if libc.ptrace(0x4206, pid, None, None) == 0:
        print("ptrace")
with suppress(OSError):
    os.kill(-1, 0)
    print("kill-all")
# What it may do.
with tempfile.NamedTemporaryFile() as file:
    file.write(b"x")
open("note", "w").close()
if os.getcwd() == os.environ["HOME"] == os.environ["TMPDIR"] and os.path.exists("note"):
    print("done")
"""
ALLOWED = {"done"}


def attempted(files: list[str]) -> tuple[set[str], tuple[str, ...]]:
    """What was got done, and what the sandbox does not claim to hold."""
    import json
    import os

    told = json.dumps({"files": files, "caller": os.getpid()})
    done = run_python(ATTEMPTS, stdin=told, timeout_s=120)
    assert done.ok, done
    return set(done.stdout.split()), done.gaps


def reward(response: str, example: dict[str, Any]) -> dict[str, float]:
    """The same below a worker: the words, and how many gaps there are."""
    from pathlib import Path

    own = Path("of-the-reward")
    own.write_text("the tests")
    words, gaps = attempted([*example["files"], str(own.absolute())])
    return {**dict.fromkeys(words, 1.0), "gaps": float(len(gaps))}


def plain(response: str) -> float:
    """The policy's own program against what it should print."""
    return float(run_python(response, timeout_s=60).stdout == "42\n")
