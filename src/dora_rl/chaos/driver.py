"""The driver of a run under chaos: `python -m dora_rl.chaos.driver FD SEED ARGUMENTS…`.

It is `dora-rl` with two hands on it: its disk asks the storm (see `disk`), and while the storm
says so, what a part tells the driver is heard twice, as after a lost acknowledgement.
"""

import os
import random
import runpy
import socket
import sys
import threading
import time
from collections import deque
from typing import Any

from dora_rl.chaos import disk
from dora_rl.runtime.local.runtime import LocalRuntime

_REMEMBERED = 32  # messages, of which one is heard again


class Echo:
    """Lets the driver hear messages again: at once, and one of the last few."""

    def __init__(self, seed: int) -> None:
        self._until = 0.0
        self._random = random.Random(seed)
        self._heard: deque[tuple[LocalRuntime, Any, Any]] = deque(maxlen=_REMEMBERED)

    def listen(self, line: socket.socket) -> None:
        """Obey the storm: each line is for how many seconds."""
        with line.makefile("r", encoding="ascii") as orders:
            for order in orders:
                self._until = time.monotonic() + float(order)

    def install(self) -> None:
        take = LocalRuntime._take

        def take_twice(runtime: LocalRuntime, process: Any, message: Any) -> None:
            take(runtime, process, message)
            if self._heard and self._heard[-1][0] is not runtime:  # it goes on anew
                self._heard.clear()
            self._heard.append((runtime, process, message))
            if time.monotonic() < self._until:
                take(runtime, process, message)
                take(*self._random.choice(self._heard))

        LocalRuntime._take = take_twice  # type: ignore[assignment, method-assign]


def main(fd: int, seed: int, arguments: list[str]) -> None:
    os.set_inheritable(fd, False)
    line = socket.socket(fileno=fd)
    disk.hand_over(line)
    echo = Echo(seed)
    echo.install()
    threading.Thread(target=echo.listen, args=(line,), daemon=True).start()
    sys.argv = ["dora-rl", *arguments]
    runpy.run_module("dora_rl", run_name="__main__")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
