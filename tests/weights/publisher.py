"""A process that publishes on request: `python -m tests.weights.publisher ROOT KILL`.

For each line `VERSION SEED` on standard input, the digest or the refusal goes to standard
output. The process kills itself at its n-th write, unless KILL is 0.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from dora_rl.transports.weights.shared_directory import WeightStore
from dora_rl.weights import disk
from dora_rl.weights.errors import WeightsError
from tests.weights.samples import weights


class MortalOS:
    """The `os` module, until the n-th write."""

    def __init__(self, writes: int) -> None:
        self.writes = writes

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def write(self, fd: int, data: memoryview) -> int:
        self.writes -= 1
        if self.writes == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return os.write(fd, data)


def main(root: str, kill: str) -> None:
    if int(kill):
        vars(disk)["os"] = MortalOS(int(kill))
    store = WeightStore(Path(root))
    print("ready", flush=True)
    for line in sys.stdin:
        version, seed = map(int, line.split())
        try:
            print(store.publish(version, weights(seed)).digest, flush=True)
        except WeightsError as error:
            print("refused", error, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
