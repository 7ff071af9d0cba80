"""Heartbeats of a rollout worker: a long operation does not silence it, a hang does."""

import logging
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from dora_rl.core.protocol import commands as cm
from dora_rl.core.protocol.commands import Command, Expel
from dora_rl.core.protocol.events import InstanceJoined, VersionInstalled
from dora_rl.core.protocol.settings import Settings
from dora_rl.runtime.control import messages as ms
from dora_rl.runtime.launchers.local.channel import Channel
from dora_rl.runtime.workers.heartbeat import Heartbeat, limit_s
from tests.patience import PATIENCE_S
from tests.runtime.harness import WORKERS, Record, assert_sound, records, run

# Only in rollout processes: the trainer has no engine.
PATCH = """
import sys
if {workers} & set(sys.orig_argv):
    import time
    from pathlib import Path
    from dora_rl.engines.embedded.engine import EmbeddedEngine
    plain = EmbeddedEngine.{method}
    def slow(self, *arguments):
        once = Path(__file__).with_name("once")
        if {again} or not once.exists():
            once.touch()
            time.sleep({seconds})
        return plain(self, *arguments)
    EmbeddedEngine.{method} = slow
"""
ALONE = {"kind": "local", "instances": 1, "report_period_s": 0.1}
HEARTBEAT_S = 8.0  # a busy machine may not run a process for a few seconds


def patch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, **fault: object) -> None:
    """Engines of workers that start from now on have this fault."""
    (tmp_path / "sitecustomize.py").write_text(
        PATCH.format(workers=WORKERS, method=method, **fault)
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def expelled(found: list[Record]) -> list[str]:
    commands: list[Command] = [command for record in found for command in record.commands]
    return [command.reason for command in commands if isinstance(command, Expel)]


def incarnations(found: list[Record]) -> list[int]:
    return [r.event.incarnation for r in found if isinstance(r.event, InstanceJoined)]


@pytest.mark.faults
def test_an_install_longer_than_the_heartbeat_timeout_is_waited_for(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch(tmp_path, monkeypatch, "install", again=False, seconds=2 * HEARTBEAT_S)
    ended = run(
        model,
        tmp_path / "run",
        runtime=ALONE,
        orchestration={"heartbeat_timeout_s": HEARTBEAT_S},
        run={"steps": 1},
    )
    assert_sound(ended)
    found = records(ended.directory)
    joined = next(r.now for r in found if isinstance(r.event, InstanceJoined))
    installed = next(r.now for r in found if isinstance(r.event, VersionInstalled))
    assert installed - joined >= 1.5 * HEARTBEAT_S
    assert (expelled(found), incarnations(found)) == ([], [0])


@pytest.mark.faults
def test_an_install_that_hangs_is_noticed_after_one_timeout(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch(tmp_path, monkeypatch, "install", again=False, seconds=3600)
    ended = run(
        model,
        tmp_path / "run",
        runtime=ALONE,
        orchestration={"install_timeout_s": 20.0, "heartbeat_timeout_s": HEARTBEAT_S},
        run={"steps": 1},
    )
    assert_sound(ended)
    found = records(ended.directory)
    assert "silent" in expelled(found)[0]
    assert incarnations(found)[:2] == [0, 1]


@pytest.mark.faults
def test_a_step_that_hangs_is_noticed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch(tmp_path, monkeypatch, "step", again=False, seconds=3600)
    ended = run(
        model,
        tmp_path / "run",
        runtime={**ALONE, "step_timeout_s": 8.0},
        orchestration={"heartbeat_timeout_s": HEARTBEAT_S},
        run={"steps": 1},
    )
    assert_sound(ended)
    found = records(ended.directory)
    assert "silent" in expelled(found)[0]
    assert incarnations(found)[:2] == [0, 1]


# Without processes


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_an_operation_is_vouched_for_up_to_its_limit() -> None:
    clock, limit = Clock(), 10.0
    heartbeat = Heartbeat(lambda: None, 0.5, clock)
    assert not heartbeat.due, "outside of operations the main thread reports by itself"
    with heartbeat.during(limit):
        assert not heartbeat.due, "a short operation needs none"
        clock.now = 0.5
        assert heartbeat.due
        clock.now = limit - 0.1
        assert heartbeat.due
        clock.now = limit
        assert not heartbeat.due
    assert not heartbeat.due
    with pytest.raises(OSError), heartbeat.during(limit):
        clock.now += 1.0
        raise OSError
    assert not heartbeat.due, "an operation that failed is over"


def test_beats_come_during_an_operation_and_end_with_the_channel(
    caplog: pytest.LogCaptureFixture,
) -> None:
    beats = threading.Semaphore(0)
    left = [3]

    def send() -> None:
        beats.release()
        left[0] -= 1
        if not left[0]:
            raise OSError("gone")

    caplog.set_level(logging.WARNING, "dora_rl")
    with Heartbeat(send, 0.01) as heartbeat, heartbeat.during(60.0):
        for _ in range(3):
            assert beats.acquire(timeout=PATIENCE_S)
        assert not beats.acquire(timeout=0.2), "it went on after the channel had closed"
    assert caplog.messages == ["no more heartbeats: OSError: gone"]


INSTANCE = (0, 0)
STEP_S = 7.0
LIMITS: dict[str, tuple[ms.Message, Callable[[Settings], float]]] = {
    "install": (ms.Perform.of(cm.Install(*INSTANCE, 1, 0)), lambda core: core.install_timeout_s),
    "evict": (ms.Perform.of(cm.Evict(*INSTANCE, 1)), lambda core: core.install_timeout_s),
    "park": (ms.Perform.of(cm.Park(*INSTANCE, ())), lambda core: core.migration_timeout_s),
    "unpark": (ms.Perform.of(cm.Unpark(*INSTANCE, ())), lambda core: core.migration_timeout_s),
    "export": (ms.HandOver(1, ()), lambda core: core.migration_timeout_s),
    "import": (ms.TakeOver(1), lambda core: core.migration_timeout_s),
    "cancel": (ms.Perform.of(cm.Cancel(1, 1, 0)), lambda core: STEP_S),
}


@pytest.mark.parametrize("name", LIMITS)
def test_every_operation_has_an_end(name: str) -> None:
    """As long as the core waits for the answer, where it waits for one."""
    message, expected = LIMITS[name]
    core = Settings()
    assert limit_s(ms.decode(ms.encode(message)), core, STEP_S) == expected(core)


@pytest.mark.slow
def test_messages_of_two_threads_arrive_whole() -> None:
    ours, theirs = socket.socketpair()
    sender, receiver = Channel(theirs), Channel(ours)
    count, size = 40, 3 << 20  # larger than a chunk and than the socket's buffer

    def send(letter: str) -> None:
        for _ in range(count):
            sender.send(ms.Broken(letter * size, user=False))

    threads = [threading.Thread(target=send, args=(letter,), daemon=True) for letter in "ab"]
    for thread in threads:
        thread.start()
    heard: list[str] = []
    while len(heard) < 2 * count:
        assert receiver.wait(PATIENCE_S), f"nothing after {len(heard)} messages"
        for message in receiver.receive():
            assert isinstance(message, ms.Broken)
            assert len(message.reason) == size and len(set(message.reason)) == 1
            heard.append(message.reason[0])
    assert sorted(heard) == ["a"] * count + ["b"] * count
    for thread in threads:
        thread.join()
    sender.close()
    receiver.close()
