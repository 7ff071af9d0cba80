"""A process of a data-parallel group, started by the leader: reads commands, until they end."""

import signal
import sys
from contextlib import suppress
from pathlib import Path

from dora_rl.core.errors import UserError
from dora_rl.models import cpu
from dora_rl.trainer.errors import StepRejected
from dora_rl.trainer.parallel import Join, Publish, Restore, Save, Train, receive
from dora_rl.trainer.replica import Replica
from dora_rl.trainer.world import join, leave


def main() -> int:
    # Interrupting a run is the leader's business; it ends this process by closing the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    cpu.guard()
    pipe = sys.stdin.buffer
    first = receive(pipe)
    if not isinstance(first, Join):
        return 1
    world = join(Path(first.rendezvous), first.rank, first.size)
    replica = Replica(first.plan, world)
    while command := receive(pipe):
        # The leader meets the same refusal and reports it.
        with suppress(StepRejected, UserError):
            match command:
                case Train(samples):
                    replica.take(replica.batch(samples))
                case Publish():
                    replica.published()
                case Save():
                    replica.snapshot()
                case Restore(directory):
                    replica.restore(Path(directory))
    leave(world)
    return 0


if __name__ == "__main__":
    sys.exit(main())
