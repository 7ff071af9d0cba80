"""The guard against AMX that a machine advertises and does not have.

Some virtual machines show `amx_tile` and answer CPUID leaf 0x1D (the tile palettes) with
nothing. oneDNN believes the former and dies of SIGILL, or finds no primitive, in its first
bf16 matmul. A child process tries one, for only that tells. Nothing here imports torch.
"""

import importlib.util
import os
import signal
import subprocess
import sys
from enum import StrEnum

from dora_rl.machine import processor
from dora_rl.machine.fast_paths import Unavailable, fast_path, portable

MARKER = "DORA_RL_AMX"  # how the trial went, for the processes that this one starts
LIMIT = "ONEDNN_MAX_CPU_ISA"  # oneDNN reads it at its first use, children inherit it
LIMIT_BEFORE = "DNNL_MAX_CPU_ISA"  # the older name of the same, which oneDNN still reads
WITHOUT_AMX = "AVX512_CORE_BF16"
PLAIN = "AVX2"  # what the portable way leaves to oneDNN
_TIMEOUT_S = 120.0  # nearly all of it the import of torch: 1 s, more from a cold disk
_NO_TORCH = 3
# What a processor or an allocator does to a process, as opposed to a user or the OOM killer.
_FAULTS = {signal.SIGILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGABRT}
_TRIAL = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
try:
    import torch
except ImportError:
    sys.exit({_NO_TORCH})
x = torch.ones(32, 576, dtype=torch.bfloat16)
w = torch.ones(960, 576, dtype=torch.bfloat16)
sys.exit(not bool((torch.nn.functional.linear(x, w) == 576).all()))
"""


class Amx(StrEnum):
    WORKS = "works"
    BROKEN = "broken"
    UNKNOWN = "unknown"


def guard() -> str | None:
    """Keep oneDNN off a broken AMX; what was found and done, or None if all is well.

    Call it before the first matmul of a process. The first call in a family of processes takes
    about two seconds on a machine with AMX; every other one takes none.
    """
    if LIMIT in os.environ or LIMIT_BEFORE in os.environ:
        return None
    if portable():
        os.environ[LIMIT] = PLAIN
        return None
    known = os.environ.get(MARKER)
    amx: str
    if known is None:
        if not _advertised() or importlib.util.find_spec("torch") is None:
            return None
        amx, finding = _try()
        os.environ[MARKER] = amx
    else:
        amx, finding = known, "an earlier process found so"
    if amx == Amx.BROKEN:
        os.environ[LIMIT] = WITHOUT_AMX
        return f"AMX does not work on this machine ({finding}): set {LIMIT}={WITHOUT_AMX}."
    if amx == Amx.UNKNOWN and known is None:
        return (
            f"AMX could not be tried on this machine ({finding}). If a process dies of SIGILL, "
            f"set {LIMIT}={WITHOUT_AMX}."
        )
    return None


@fast_path("amx")
def amx() -> tuple[str, int]:
    """Whether oneDNN multiplies by AMX here."""
    guard()
    known, limit = os.environ.get(MARKER), os.environ.get(LIMIT, os.environ.get(LIMIT_BEFORE))
    if known == Amx.BROKEN:
        raise Unavailable("the processor advertises it, and dies of it")
    if limit is not None:
        raise Unavailable(f"{LIMIT} is `{limit}`")
    if not _advertised():
        raise Unavailable("the processor does not have it")
    if known != Amx.WORKS:
        raise Unavailable("it could not be tried")
    return "a bf16 product was right", 0


def _advertised() -> bool:
    return bool(sys.executable) and "amx_tile" in processor.flags()


def _try() -> tuple[Amx, str]:
    """One bf16 matmul in a child process: how AMX is, and what was seen."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _TRIAL],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return Amx.UNKNOWN, f"a bf16 matmul took more than {_TIMEOUT_S:g} s"
    except OSError as error:
        return Amx.UNKNOWN, f"no child process: {error.strerror}"
    return _verdict(done.returncode)


def _verdict(code: int) -> tuple[Amx, str]:
    if code == 0:
        return Amx.WORKS, ""
    if code == _NO_TORCH:
        return Amx.UNKNOWN, "a child process cannot import torch"
    if code > 0:
        return Amx.BROKEN, "a bf16 matmul failed"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return Amx.BROKEN if -code in _FAULTS else Amx.UNKNOWN, f"a bf16 matmul died of {name}"
