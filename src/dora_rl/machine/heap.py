"""Memory that a process frees and takes again: kept, instead of given back to the system."""

import ctypes

from dora_rl.machine.fast_paths import Unavailable, fast_path, on_linux

# Of glibc's mallopt.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 1 << 30  # at the end of the heap; more is given back
_FROM_HEAP_BYTES = 1 << 25  # the most that glibc allows; larger blocks are mapped


@fast_path("heap-reuse")
def heap_reuse() -> tuple[str, int]:
    """Let the process keep what it frees.

    The results of a training pass are some megabytes each: by default every one is mapped anew, and
    the kernel clears its pages.
    """
    if not on_linux():
        raise Unavailable("this is not Linux")
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        raise Unavailable("the C library has no mallopt") from None
    if not mallopt(_MMAP_THRESHOLD, _FROM_HEAP_BYTES) or not mallopt(_TRIM_THRESHOLD, _KEPT_BYTES):
        raise Unavailable("mallopt refused")
    return "glibc keeps what is freed", 0
