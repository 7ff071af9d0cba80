"""The zygote as a program of its own: `python -m dora_rl.sandbox.zygote_main SOCKET_NUMBER`."""

import os
import socket
import sys

import msgspec

from dora_rl.sandbox import zygote
from dora_rl.sandbox.protocol import ZygoteSetup


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    setup = msgspec.msgpack.decode(zygote.read_frame(control), type=ZygoteSetup)
    enter_path(setup)
    # Until here standard error told the driver why Python did not start.
    os.dup2(0, 2)
    sys.stderr = sys.stdout
    directory = os.fsdecode(setup.scratch)
    zygote.run(control, setup.program, setup.driver, directory, setup)


def enter_path(setup: ZygoteSetup) -> None:
    """The driver's search path came as PYTHONPATH; programs that rewards start get the user's."""
    sys.path[:] = map(os.fsdecode, setup.path)
    os.environ.pop("PYTHONPATH", None)
    if setup.environment_path is not None:
        os.environ["PYTHONPATH"] = os.fsdecode(setup.environment_path)


if __name__ == "__main__":
    main()
