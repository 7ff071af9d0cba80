"""Entry point of a driver under chaos: `python -m dora_rl.faultlab.driver_main FD SEED ARGUMENTS…`.

It is `dora-rl` with two faults built in: its disk calls are answered by the storm (see `disk`), and
while the storm says so, messages from workers are delivered twice, as after a lost acknowledgement.
The latter is a launcher of its own, registered in place of the local one.
"""

import os
import random
import runpy
import socket
import sys
import threading
import time
from collections import deque

from dora_rl.faultlab import disk
from dora_rl.runtime.control import messages as ms
from dora_rl.runtime.launchers import registry
from dora_rl.runtime.launchers.base import Runtime
from dora_rl.runtime.launchers.local.launcher import LocalRuntime, Receive
from dora_rl.runtime.launchers.local.processes import WorkerProcess
from dora_rl.runtime.records.run_files import RunFiles

_REMEMBERED = 32  # messages, of which one is delivered again


class DuplicatingReceiver:
    """Delivers duplicates to the driver: of each message at once, and of one of the last few."""

    def __init__(self, seed: int) -> None:
        self._until = 0.0
        self._random = random.Random(seed)

    def listen(self, line: socket.socket) -> None:
        """Take orders from the storm: each line says for how many seconds from now."""
        with line.makefile("r", encoding="ascii") as orders:
            for order in orders:
                self._until = time.monotonic() + float(order)

    def launch(self, files: RunFiles) -> Runtime:
        """The local launcher, with a receiver that duplicates messages."""
        return LocalRuntime(files, around_receive=self.around)

    def around(self, receive: Receive) -> Receive:
        heard: deque[tuple[WorkerProcess, ms.Message]] = deque(maxlen=_REMEMBERED)

        def receive_twice(process: WorkerProcess, message: ms.Message) -> None:
            receive(process, message)
            heard.append((process, message))
            if time.monotonic() < self._until:
                receive(process, message)
                receive(*self._random.choice(heard))

        return receive_twice


def main(fd: int, seed: int, arguments: list[str]) -> None:
    os.set_inheritable(fd, False)
    line = socket.socket(fileno=fd)
    disk.hand_over(line)
    receiver = DuplicatingReceiver(seed)
    threading.Thread(target=receiver.listen, args=(line,), daemon=True).start()
    sys.argv = ["dora-rl", *arguments]
    with registry.using("local", receiver.launch):
        runpy.run_module("dora_rl", run_name="__main__")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
