"""A worker as a fresh interpreter: `python -m dora_rl.sandbox.fresh_worker FILE SOCKET NUMBER`.

The file tells what it is to be; it imports the user's code itself, as its zygote did.
"""

import os
import sys

import msgspec

from dora_rl.machine.parent import die_with_parent
from dora_rl.sandbox import isolation, zygote
from dora_rl.sandbox.protocol import WorkerSetup
from dora_rl.sandbox.zygote_main import enter_path


def main(told: int, channel: int, number: int) -> None:
    content = os.pread(told, os.fstat(told).st_size, 0)
    os.close(told)
    worker = msgspec.msgpack.decode(content, type=WorkerSetup)
    setup, promised = worker.of_zygote, worker.promised
    limits = setup.program.limits
    die_with_parent(worker.zygote)
    enter_path(setup)
    isolation.enter_fresh(limits)
    service = zygote.build(setup.program)
    context = zygote.WorkerContext(limits, os.fsdecode(setup.scratch), setup.driver, worker.alone)
    found = context.enter(number, None)
    if promised is None:
        zygote.tell_isolation(channel, found)
    elif found == promised:
        zygote.serve(channel, service)


if __name__ == "__main__":
    try:
        main(*map(int, sys.argv[1:]))
    finally:
        os._exit(0)  # without exit handlers of the user's code, as a fork
