"""A worker as a fresh interpreter: `python -m dora_rl.tasks.workers.fresh FILE SOCKET NUMBER`.

The file tells what it is to be; it imports the user's code itself, as its nursery did.
"""

import os
import sys

import msgspec

from dora_rl.machine.parent import die_with_parent
from dora_rl.tasks.workers import isolation, nursery, serving
from dora_rl.tasks.workers.__main__ import enter_path
from dora_rl.tasks.workers.wire import Hatching


def main(told: int, channel: int, number: int) -> None:
    content = os.pread(told, os.fstat(told).st_size, 0)
    os.close(told)
    hatching = msgspec.msgpack.decode(content, type=Hatching)
    birth, promised = hatching.birth, hatching.promised
    limits = birth.program.limits
    die_with_parent(hatching.nursery)
    enter_path(birth)
    isolation.enter_fresh(limits)
    servant = serving.build(birth.program)
    home = nursery.Home(limits, os.fsdecode(birth.scratch), birth.driver, hatching.alone)
    found = home.enter(number, None)
    if promised is None:
        nursery.tell_isolation(channel, found)
    elif found == promised:
        nursery.serve(channel, servant)


if __name__ == "__main__":
    try:
        main(*map(int, sys.argv[1:]))
    finally:
        os._exit(0)  # without exit handlers of the user's code, as a fork
