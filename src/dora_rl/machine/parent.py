"""No orphans: a process that ends with the one that started it, whatever that dies of."""

import ctypes
import os
import signal
import threading
import time

from dora_rl.machine.fast_paths import Unavailable, fast_path, on_linux

_SET_DEATH_SIGNAL, _GET_DEATH_SIGNAL = 1, 2  # to prctl(2)
_LOOK_S = 0.5


@fast_path("parent-death")
def parent_death() -> tuple[str, int]:
    """Whether the kernel ends a process with its parent, if it is asked to."""
    if not on_linux():
        raise Unavailable("not Linux")
    if ctypes.CDLL(None).prctl(_GET_DEATH_SIGNAL, ctypes.byref(ctypes.c_int()), 0, 0, 0):
        raise Unavailable("the kernel refuses PR_SET_PDEATHSIG")
    return "PR_SET_PDEATHSIG", 0


def die_with_parent(parent: int) -> None:
    """From now on, end when the process of this number does; at once if it has."""
    if parent_death().in_force:
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os._exit(1)
