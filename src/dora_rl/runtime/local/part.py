"""What a process beside the driver runs: `python -m dora_rl.runtime.local.part FD`.

The first message says what it is to be. It ends when it is told to, when the driver is gone, or
when it cannot go on, and then says why.
"""

import signal
import socket
import sys
import time
import traceback
from pathlib import Path

from dora_rl.config import validate
from dora_rl.core.errors import UserError
from dora_rl.machine.fast_paths import Trial, tried
from dora_rl.machine.parent import die_with_parent
from dora_rl.runtime import messages as ms
from dora_rl.runtime.config import RunConfig
from dora_rl.runtime.local.channel import Channel, Gone

_POLL_S = 0.05  # between two looks at a checkpoint that is being written
_TELL_S = 1.0  # between two signs of progress


def main(fd: int) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver decides what an interrupt means
    channel = Channel(socket.socket(fileno=fd))
    try:
        _run(channel)
    except Gone:
        return 1
    except UserError as error:
        channel.send(ms.Broken(str(error), user=True))
        return 2
    except Exception as error:
        traceback.print_exc()
        channel.send(ms.Broken(f"{type(error).__name__}: {error}", user=False))
        return 1
    return 0


def _run(channel: Channel) -> None:
    messages = channel.receive()
    while not messages:
        messages = channel.receive()
    setup, *rest = messages
    if not isinstance(setup, ms.Setup):
        raise TypeError(f"the first message must be a setup: {setup}")
    channel.put_back(rest)
    die_with_parent(setup.driver)
    config = validate(RunConfig, setup.config, "the driver's configuration")
    _limit_threads(setup.threads)
    if setup.role == "trainer":
        _serve_training(channel, setup, config)
    else:
        _serve_rollout(channel, setup, config)


def _serve_rollout(channel: Channel, setup: ms.Setup, config: RunConfig) -> None:
    from dora_rl.runtime.engines import make_engine, sampling_of
    from dora_rl.runtime.rollout import RolloutInstance
    from dora_rl.weights.store import WeightStore

    instance = RolloutInstance(
        setup.instance,
        setup.incarnation,
        make_engine(config, Path(setup.model)),
        WeightStore(Path(setup.weights)).path,
        sampling_of(config, evaluation=setup.evaluation),
        config.run.seed,
    )
    instance.join()
    period_s = config.runtime.report_period_s
    report_at = time.monotonic() + period_s
    news = _News(channel)
    save_at = time.monotonic() + config.run.save_every_s
    while True:
        # Nothing but the next report is due while there is no work.
        wait_s = 0.0 if instance.busy else max(0.0, report_at - time.monotonic())
        while channel.wait(wait_s):
            for message in channel.receive():
                if isinstance(message, ms.Shutdown):
                    return
                instance.handle(message)  # type: ignore[arg-type]
            wait_s = 0.0
        if instance.busy:
            instance.step()
        if time.monotonic() >= report_at:
            report_at = time.monotonic() + period_s
            instance.report()
            news.tell()
        if time.monotonic() >= save_at and not setup.evaluation and config.run.durable:
            save_at = time.monotonic() + config.run.save_every_s
            instance.save_prefixes()
        for answer in instance.outbox:
            channel.send(answer)
        instance.outbox.clear()


def _serve_training(channel: Channel, setup: ms.Setup, config: RunConfig) -> None:
    from dora_rl.runtime.training import TrainerPart
    from dora_rl.weights.store import WeightStore

    store = WeightStore(Path(setup.weights))
    checkpoint = Path(setup.checkpoint) if setup.checkpoint else None
    progress, news = _Progress(channel), _News(channel)
    part = TrainerPart.open(config, Path(setup.model), store, checkpoint, progress=progress.made)
    channel.send(ms.TrainerReady())
    while True:
        news.tell()
        if channel.wait(_POLL_S):
            for message in channel.receive():
                for answer in part.handle(message):  # type: ignore[arg-type]
                    channel.send(answer)
                if isinstance(message, ms.Shutdown):
                    return
        for answer in part.poll():
            channel.send(answer)


class _News:
    """Tells the driver of fast paths as they are tried."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._told: dict[str, Trial] = {}

    def tell(self) -> None:
        found = tried()
        new = {name: trial for name, trial in found.items() if self._told.get(name) != trial}
        if new:
            self._told = found
            self._channel.send(ms.Tried(new))


class _Progress:
    """Tells the driver now and then that the trainer gets on."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._told_at = 0.0

    def made(self) -> None:
        if time.monotonic() >= self._told_at + _TELL_S:
            self._told_at = time.monotonic()
            self._channel.send(ms.Progressed())


def _limit_threads(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
