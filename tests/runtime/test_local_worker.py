"""The loop of a rollout worker, in a thread of this process: what it sends, when, and its end."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from dora_rl.core.protocol import commands as cm
from dora_rl.core.protocol import events as ev
from dora_rl.engines.fake import FakeEngine
from dora_rl.runtime.config import RunConfig
from dora_rl.runtime.control import messages as ms
from dora_rl.runtime.launchers.local import worker
from dora_rl.runtime.launchers.local.channel import Channel, Gone
from dora_rl.runtime.launchers.local.site import Site
from tests.patience import PATIENCE_S
from tests.runtime.instances import Versions, store

PERIOD_S = 0.05


@dataclass(kw_only=True, eq=False)
class SlowEngine(FakeEngine):
    """A version with a gate is loaded when that is open; `closed` counts."""

    gates: dict[int, threading.Event] = field(default_factory=dict)
    closed: int = 0

    def install(self, version: int, directory: Path, evict: int | None = None) -> str:
        if version in self.gates:
            assert self.gates[version].wait(PATIENCE_S)
        return super().install(version, directory, evict)

    def close(self) -> None:
        super().close()
        self.closed += 1


@contextmanager
def serving(engine: SlowEngine, root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Channel]:
    """The driver's end of a worker with this engine, which has joined; at the end it has ended."""
    weights = Versions(store(root, (0, 1, 2)))
    monkeypatch.setattr("dora_rl.runtime.workers.engines.make_engine", lambda *_: engine)
    monkeypatch.setattr("dora_rl.transports.weights.registry.make_receiver", lambda *_: weights)
    ours, theirs = (Channel(end) for end in socket.socketpair())
    config = RunConfig.model_validate(
        {"model": {"path": "m"}, "runtime": {"report_period_s": PERIOD_S}}
    )
    setup, site = ms.Setup(role="rollout", config={}, threads=1), Site("m", str(root.parent), 0)
    site.trajectories.mkdir()

    def serve() -> None:
        try:
            worker._serve_rollout(theirs, setup, site, config)
        except Gone:
            return

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        heard(ours, ev.InstanceJoined)
        yield ours
    finally:
        for gate in engine.gates.values():
            gate.set()  # whatever failed, the thread must end
        ours.close()
        thread.join(PATIENCE_S)
        theirs.close()
    assert not thread.is_alive()


def heard(channel: Channel, kind: type) -> object:
    """The next message or event of this kind; what came before it is dropped."""
    while True:
        assert channel.wait(PATIENCE_S), f"no {kind.__name__}"
        messages = channel.receive()
        for at, message in enumerate(messages):
            said = message.event if isinstance(message, ms.Reported) else message
            if isinstance(said, kind):
                channel.put_back(messages[at + 1 :])
                return said


def test_answers_and_reports_do_not_wait_for_the_next_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An install may take minutes; by then the core would have given the first one up."""
    engine = SlowEngine(version_slots=3, gates={1: threading.Event(), 2: threading.Event()})
    with serving(engine, tmp_path / "weights", monkeypatch) as channel:
        for version in (0, 1, 2):
            channel.send(ms.Perform.of(cm.Install(0, 0, version)))
        found = heard(channel, ev.VersionInstalled)
        assert found == ev.VersionInstalled(0, 0, 0, "digest-0")
        time.sleep(2 * PERIOD_S)  # a report is due when version 1 is here
        engine.gates[1].set()
        found = heard(channel, ev.VersionInstalled)
        assert found == ev.VersionInstalled(0, 0, 1, "digest-1")
        heard(channel, ms.Used)  # of a report: the heartbeat's thread does not know it
        engine.gates[2].set()
        found = heard(channel, ev.VersionInstalled)
        assert found == ev.VersionInstalled(0, 0, 2, "digest-2")


@pytest.mark.parametrize("end", ["told", "driver gone"])
def test_the_engine_is_closed_however_the_worker_ends(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = SlowEngine()
    with serving(engine, tmp_path / "weights", monkeypatch) as channel:
        channel.send(ms.Perform.of(cm.Install(0, 0, 0)))
        heard(channel, ev.VersionInstalled)
        assert not engine.closed
        if end == "told":
            channel.send(ms.Shutdown())
    assert engine.closed == 1


def test_threads_that_are_lent_are_used_until_the_step_is_taken() -> None:
    ours, theirs = (Channel(end) for end in socket.socketpair())
    before = torch.get_num_threads()
    try:
        lent = worker._LentThreads(theirs, own=1)
        lent.take()
        ours.send(ms.Save(3))
        ours.send(ms.LendThreads(2))
        lent.take()
        assert torch.get_num_threads() == 2
        lent.give_back()
        assert torch.get_num_threads() == 1
        assert theirs.receive() == [ms.Save(3)]  # it waits for its turn
    finally:
        torch.set_num_threads(before)
        ours.close()
        theirs.close()
