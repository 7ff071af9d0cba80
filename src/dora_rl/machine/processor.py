"""The processor: how many cores this process may use, and what they can do."""

import os
import platform
from pathlib import Path

from dora_rl.machine.cgroups import cgroup_limits
from dora_rl.machine.fast_paths import Unavailable, fast_path, on_linux

_CPUINFO = Path("/proc/cpuinfo")
# Of the flags that Linux lists, those that decide which products are fast.
_TELLING = ("sse4_2", "avx", "avx2", "fma", "avx512f", "avx512bw", "avx512_bf16", "amx_tile")
_TELLING_ARM = ("asimd", "sve", "bf16", "i8mm")


def cores() -> int:
    """Those that this process may use: by its affinity, and for as much time as it gets."""
    count = affinity().value or os.cpu_count() or 1
    return min(count, cgroup_limits().value or count)


@fast_path("cpu-affinity")
def affinity() -> tuple[str, int]:
    """What a scheduler, a cpuset or `taskset` leaves to this process."""
    if not hasattr(os, "sched_getaffinity"):
        raise Unavailable(f"{platform.system()} does not tell")
    count = len(os.sched_getaffinity(0))
    return f"{count} of {os.cpu_count()} cores", count


def model_name() -> str:
    """As the kernel names it; the architecture where it does not."""
    return _first("model name") or platform.processor() or platform.machine()


def flags() -> frozenset[str]:
    """Instruction sets as Linux names them; empty where they are not told."""
    return frozenset((_first("flags") or _first("Features") or "").split())


def telling_flags() -> list[str]:
    """Those of the instruction sets that decide how fast a model runs."""
    found = flags()
    return [flag for flag in (*_TELLING, *_TELLING_ARM) if flag in found]


def _first(field: str) -> str | None:
    """One processor tells for all, and a big machine lists hundreds."""
    if not on_linux():
        return None
    try:
        with open(_CPUINFO, encoding="ascii", errors="replace") as file:
            line = next((line for line in file if line.startswith(field)), None)
    except OSError:
        return None
    return None if line is None else line.partition(":")[2].strip()
