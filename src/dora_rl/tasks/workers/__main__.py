"""The nursery as a program of its own: `python -m dora_rl.tasks.workers SOCKET_NUMBER`."""

import functools
import os
import socket
import sys

import msgspec

from dora_rl.tasks.workers import nursery, serving
from dora_rl.tasks.workers.wire import Birth


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    birth = msgspec.msgpack.decode(nursery.read_frame(control), type=Birth)
    enter_path(birth)
    # Until here standard error told the driver why Python did not start.
    os.dup2(0, 2)
    sys.stderr = sys.stdout
    build = functools.partial(serving.build, birth.program)
    directory = os.fsdecode(birth.scratch)
    nursery.run(control, build, birth.program.limits, birth.driver, directory, birth)


def enter_path(birth: Birth) -> None:
    """The driver's search path came as PYTHONPATH; programs that rewards start get the user's."""
    sys.path[:] = map(os.fsdecode, birth.path)
    os.environ.pop("PYTHONPATH", None)
    if birth.environment_path is not None:
        os.environ["PYTHONPATH"] = os.fsdecode(birth.environment_path)


if __name__ == "__main__":
    main()
