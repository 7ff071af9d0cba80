"""What a worker process runs: `python -m dora_rl.runtime.launchers.local.worker FD SITE`.

Or a fork does: see `forkserver`. The first message says what it is to be. It ends when it is told
to, when the driver is gone, or when it cannot continue, and then says why.
"""

import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from dora_rl.config import validate
from dora_rl.core.protocol.errors import UserError
from dora_rl.logs import start_worker
from dora_rl.machine.fast_paths import Trial, tried
from dora_rl.machine.parent import die_with_parent
from dora_rl.runtime.config import RunConfig
from dora_rl.runtime.control import messages as ms
from dora_rl.runtime.launchers.local.channel import Channel, Gone
from dora_rl.runtime.launchers.local.site import Site

if TYPE_CHECKING:  # torch is loaded late, with what needs it
    from dora_rl.runtime.workers.heartbeat import Heartbeat
    from dora_rl.runtime.workers.rollout import RolloutInstance

_POLL_S = 0.05  # between two looks at a checkpoint that is being written
_TELL_S = 1.0  # between two signs of progress
_log = logging.getLogger("dora_rl.runtime.launchers.local.worker")  # it is run as __main__


def main(fd: int, site: Site) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver decides what an interrupt means
    channel = Channel(socket.socket(fileno=fd))
    try:
        _run(channel, site)
    except Gone:
        return 1
    except UserError as error:
        channel.send(ms.Broken(str(error), user=True))
        return 2
    except Exception as error:
        _log.error("failed: %s: %s", type(error).__name__, error)
        traceback.print_exc()  # its last line is what the driver shows
        channel.send(ms.Broken(f"{type(error).__name__}: {error}", user=False))
        return 1
    return 0


def _run(channel: Channel, site: Site) -> None:
    messages = channel.receive()
    while not messages:
        messages = channel.receive()
    setup, *rest = messages
    if not isinstance(setup, ms.Setup):
        raise TypeError(f"the first message must be a setup: {setup}")
    channel.put_back(rest)
    role = "evaluator" if setup.evaluation else setup.role
    start_worker(role, setup.instance, setup.incarnation)
    _log.info("started: process %d, %d threads", os.getpid(), setup.threads)
    die_with_parent(site.parent)
    config = validate(RunConfig, setup.config, "the driver's configuration")
    _limit_threads(setup.threads)
    if setup.role == "trainer":
        _serve_training(channel, setup, site, config)
    else:
        _serve_rollout(channel, setup, site, config)


def _serve_rollout(channel: Channel, setup: ms.Setup, site: Site, config: RunConfig) -> None:
    from dora_rl.runtime.workers.engines import make_engine, sampling_of
    from dora_rl.runtime.workers.heartbeat import Heartbeat
    from dora_rl.runtime.workers.rollout import RolloutInstance
    from dora_rl.transports.kv.registry import make_kv
    from dora_rl.transports.objects.link import ObjectLink
    from dora_rl.transports.samples.shared_directory import SampleReader, SampleWriter
    from dora_rl.transports.weights.registry import make_receiver

    objects = None if site.objects is None else ObjectLink(socket.socket(fileno=site.objects))
    copies = site.copies(setup.instance)
    instance = RolloutInstance(
        setup.instance,
        setup.incarnation,
        make_engine(config, Path(site.model)),
        make_receiver(config.runtime.weights, site.weights, copies, objects),
        SampleWriter(site.trajectories, setup.instance, setup.incarnation),
        SampleReader(site.trajectories),
        make_kv(config.runtime.kv, site.exchange, objects, site.scratch),
        sampling_of(config, evaluation=setup.evaluation),
        config.run.seed,
        elastic=setup.elastic,
    )
    # Loading the engine is the launcher's to watch (runtime.start_timeout_s): the core awaits
    # heartbeats of instances that have joined.
    period_s = config.runtime.report_period_s
    try:
        instance.join()
        notice = _Notice(channel)
        speaker = _Speaker(channel, instance, config, saves=not setup.evaluation)
        speaker.tell()
        with Heartbeat(lambda: channel.send(instance.still_alive()), period_s) as heartbeat:
            _serve_messages(channel, config, instance, heartbeat, speaker, notice)
    finally:
        instance.engine.close()  # an engine may have processes and device memory of its own
        instance.weights.close()


def _serve_messages(
    channel: Channel,
    config: RunConfig,
    instance: "RolloutInstance",
    heartbeat: "Heartbeat",
    speaker: "_Speaker",
    notice: "_Notice",
) -> None:
    """Until it is told to end: messages first, then a step. After each of them, what is due."""
    from dora_rl.runtime.workers.heartbeat import limit_s

    step_s, core = config.runtime.step_timeout_s, config.settings()
    while True:
        # Nothing but the next report is due while there is no work.
        wait_s = 0.0 if instance.busy else speaker.next_report_s
        while channel.wait(wait_s):
            for message in channel.receive():
                if isinstance(message, ms.Shutdown):
                    return
                with heartbeat.during(limit_s(message, core, step_s)):
                    instance.handle(message)  # type: ignore[arg-type]
                speaker.tell()  # the next message may take minutes
            wait_s = 0.0
        if instance.busy:
            with heartbeat.during(step_s):
                instance.step()
        speaker.tell()
        notice.tell()


class _Speaker:
    """Sends what a rollout instance has to say: answers, reports and saved prefixes."""

    def __init__(
        self, channel: Channel, instance: "RolloutInstance", config: RunConfig, *, saves: bool
    ) -> None:
        self._channel = channel
        self._instance = instance
        self._news = _News(channel)
        self._report_every_s = config.runtime.report_period_s
        self._save_every_s = config.run.save_every_s
        self._report_at = time.monotonic() + self._report_every_s
        saves = saves and config.run.durable
        self._save_at = time.monotonic() + self._save_every_s if saves else None

    @property
    def next_report_s(self) -> float:
        """Seconds until the next report is due."""
        return max(0.0, self._report_at - time.monotonic())

    def tell(self) -> None:
        """Send all answers, and what is due by now; afterwards the outbox is empty."""
        now = time.monotonic()
        if now >= self._report_at:
            self._report_at = now + self._report_every_s
            self._instance.report()
            self._news.tell()
        if self._save_at is not None and now >= self._save_at:
            self._save_at = now + self._save_every_s
            self._instance.save_prefixes()
        for answer in self._instance.outbox:
            self._channel.send(answer)
        self._instance.outbox.clear()


def _serve_training(channel: Channel, setup: ms.Setup, site: Site, config: RunConfig) -> None:
    from dora_rl.machine.heap import heap_reuse
    from dora_rl.runtime.workers.trainer import TrainerWorker
    from dora_rl.transports.samples.shared_directory import SampleReader
    from dora_rl.transports.weights.registry import make_publisher

    heap_reuse()
    progress, news = _Progress(channel), _News(channel)
    lent = _LentThreads(channel, setup.threads)

    def progressed() -> None:
        progress.made()
        lent.take()

    trainer = TrainerWorker.open(
        config,
        Path(site.model),
        make_publisher(config.runtime.weights, site.weights),
        SampleReader(site.trajectories),
        site.checkpoints,
        setup.checkpoint,
        progress=progressed,
    )
    channel.send(ms.TrainerReady())
    notice = _Notice(channel)
    step = setup.checkpoint
    _log.info("ready, from %s", "the model" if step is None else f"the checkpoint of step {step}")
    while True:
        news.tell()
        notice.tell()
        if channel.wait(_POLL_S):
            for message in channel.receive():
                for answer in trainer.handle(message):  # type: ignore[arg-type]
                    lent.give_back()
                    channel.send(answer)
                if isinstance(message, ms.Shutdown):
                    return
        for answer in trainer.poll():
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


class _Notice:
    """SIGTERM tells a worker to go: the driver hears of it, and has its work moved or saved first.

    A second one ends the worker, as the first does before there is work.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._heard = False
        if threading.current_thread() is threading.main_thread():  # only there are signals heard
            signal.signal(signal.SIGTERM, self._hear)

    def _hear(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._heard = True

    def tell(self) -> None:
        if self._heard:
            self._heard = False
            self._channel.send(ms.ToldToGo())


class _Progress:
    """Tells the driver now and then that the trainer gets on."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._told_at = 0.0

    def made(self) -> None:
        if time.monotonic() >= self._told_at + _TELL_S:
            self._told_at = time.monotonic()
            self._channel.send(ms.Progressed())


class _LentThreads:
    """Threads of rollout instances that sleep, for the rest of a train step."""

    def __init__(self, channel: Channel, own: int) -> None:
        self._channel = channel
        self._own = own
        self._using = own

    def take(self) -> None:
        """Use what has been lent since the last call; other messages wait."""
        if not self._channel.wait(0.0):
            return
        kept: list[ms.Message] = []
        for message in self._channel.receive():
            if isinstance(message, ms.LendThreads):
                self._use(message.threads)
            else:
                kept.append(message)
        self._channel.put_back(kept)

    def give_back(self) -> None:
        """Before the answer that wakes their owners."""
        self._use(self._own)

    def _use(self, threads: int) -> None:
        if threads != self._using:
            self._using = threads
            _limit_threads(threads)


def _limit_threads(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Site.parse(sys.argv[2])))
