"""Who is taken for dead and is not, and messages that come twice: neither changes a run.

A rollout process that stands still is killed, and its work goes on elsewhere. One that cannot be
killed, as on a machine that is out of reach, wakes up, and what it says is not taken.
"""

import os
import signal
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from dora_rl.chaos.processes import parts_below
from dora_rl.core.commands import Command, Expel, Score, Start, Unpark
from dora_rl.core.events import (
    Event,
    InstanceFailed,
    InstanceProgressed,
    TrajectoryFinished,
    TrajectoryResumed,
)
from dora_rl.core.types import Fence, Placement, TrajectoryId
from dora_rl.runtime import messages as ms
from dora_rl.runtime.base import Runtime
from dora_rl.runtime.driver import Driver
from dora_rl.runtime.listening import Listener
from dora_rl.runtime.local.processes import PartProcess
from dora_rl.runtime.local.runtime import LocalRuntime
from dora_rl.runtime.recording import StepRecord
from dora_rl.runtime.train import Run
from dora_rl.store.ledger import Ledger
from dora_rl.store.rundir import LEDGER
from dora_rl.tasks.workers.sessions import EnvReply
from tests.runtime.harness import REWARDS, Seen, assert_sound, children, records, run, weights

LATER = 10  # messages of the same sender between one and its repetition
SILENCE_S = 15.0  # then an instance is taken for dead; none is that slow
LOCAL: dict[str, dict[str, Any]] = {
    "runtime": {"kind": "local", "instances": 2, "report_period_s": 0.05},
    "rollout": {"slots": 4, "max_tokens": 200, "stop": None},
    "orchestration": {
        "groups_per_step": 2,
        "group_size": 2,
        "heartbeat_timeout_s": SILENCE_S,
    },
    "run": {"steps": 4, "save_every_s": 0.02, "commit_every_s": 0.05},
}


@pytest.fixture(autouse=True)
def nobody_is_left_behind() -> Iterator[None]:
    before = {child.pid for child in children()}
    yield
    assert {child.pid for child in children()} <= before


# One that stands still


class Stopper(Listener):
    """Stops the first process of instance 0 as soon as it has saved something."""

    def __init__(self, how: signal.Signals = signal.SIGSTOP) -> None:
        self.how = how
        self.pid: int | None = None
        self.taken_over = False

    def observed(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        match event:
            case InstanceProgressed(instance=0, incarnation=0) if self.pid is None and event.saved:
                self.pid = process_of(0)
                os.kill(self.pid, self.how)
        self.taken_over |= any(isinstance(command, Expel) for command in commands)


def process_of(instance: int) -> int:
    return parts_below(os.getpid())[f"rollout-{instance}"]


@dataclass
class Story:
    """What the journal tells of the work of instance 0 when it was taken for dead."""

    owned: dict[TrajectoryId, Fence] = field(default_factory=dict)
    again: dict[TrajectoryId, Start] = field(default_factory=dict)
    accepted: dict[TrajectoryId, Fence] = field(default_factory=dict)
    late: list[TrajectoryFinished] = field(default_factory=list)  # by their old fences


def story(ended: Run) -> Story:
    found = Story()
    running: dict[TrajectoryId, Start] = {}
    lost = False
    for record in records(ended.directory):
        if isinstance(record.event, TrajectoryFinished):
            running.pop(record.event.trajectory, None)
            if found.owned.get(record.event.trajectory) == record.event.fence:
                found.late.append(record.event)
                assert not any(isinstance(c, Score) for c in record.commands), "it was taken"
        for command in record.commands:
            match command:
                case Expel() if not lost:
                    lost = True
                    assert (command.instance, command.incarnation) == (0, 0)
                    here = [start for start in running.values() if start.instance == 0]
                    found.owned = {start.trajectory: start.fence for start in here}
                case Start():
                    running[command.trajectory] = command
                    if lost and command.trajectory in found.owned:
                        found.again.setdefault(command.trajectory, command)
                case Score():
                    found.accepted[command.trajectory] = command.fence
    return found


def assert_taken_over(found: Story) -> None:
    """Whatever it had went on elsewhere, by higher fences, and nothing of it was lost."""
    assert found.owned
    assert found.again.keys() == found.owned.keys()
    for name, fence in found.owned.items():
        assert found.again[name].fence > fence
        assert found.accepted[name] > fence
    assert any(start.prefix_tokens for start in found.again.values()), "all was written again"


@pytest.mark.faults
def test_one_that_stands_still_is_killed_for_good(model: Path, tmp_path: Path) -> None:
    class Waker(Stopper):
        """Tries to wake it up when it has been taken for dead."""

        called = False

        def observed(self, now: float, event: Event, commands: Sequence[Command]) -> None:
            super().observed(now, event, commands)
            if isinstance(event, InstanceFailed) and not self.called:
                self.called = True
                assert self.pid is not None
                with pytest.raises(ProcessLookupError):
                    os.kill(self.pid, signal.SIGCONT)

    waker = Waker()
    ended = run(model, tmp_path / "run", waker, **LOCAL)
    assert waker.called
    assert_sound(ended)
    assert ended.audit.failed == 0
    found = story(ended)
    assert_taken_over(found)
    assert not found.late


@pytest.mark.faults
def test_one_that_cannot_be_killed_cannot_commit(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It wakes up when another has its work, is the first to be done, and says what it wrote."""
    forged = 1

    class Waker(Stopper):
        successor: int | None = None  # stands still until the other has said something

        def observed(self, now: float, event: Event, commands: Sequence[Command]) -> None:
            super().observed(now, event, commands)
            if self.taken_over and self.successor is None and isinstance(event, InstanceProgressed):
                assert self.pid is not None
                self.successor = process_of(1)
                os.kill(self.successor, signal.SIGSTOP)
                os.kill(self.pid, signal.SIGCONT)

    waker, seen = Waker(), Seen()
    kill, take = PartProcess.kill, LocalRuntime._take
    spared: list[int] = []
    said: Counter[str] = Counter()

    def kill_but_not_it(process: PartProcess) -> None:
        if process.pid == waker.pid:
            spared.append(process.pid)
        else:
            kill(process)

    def listen(runtime: LocalRuntime, process: PartProcess, message: Any) -> None:
        if process.pid == waker.pid and waker.successor is not None:
            said[type(message).__name__] += 1
            message = with_tokens(message, forged)
        take(runtime, process, message)
        if said["Finished"] == 1 and waker.successor is not None:
            os.kill(waker.successor, signal.SIGCONT)

    monkeypatch.setattr(PartProcess, "kill", kill_but_not_it)
    monkeypatch.setattr(LocalRuntime, "_take", listen)
    sections = {**LOCAL, "run": {**LOCAL["run"], "steps": 8}}
    ended = run(model, tmp_path / "run", waker, seen, **sections)
    assert len(spared) > 1, "the core goes on asking for its end"
    assert said.keys() >= {"Finished", "Prefixes", "Reported"}
    assert_sound(ended)
    assert ended.audit.failed == 0
    found = story(ended)
    assert_taken_over(found)
    assert 1 <= len(found.late) <= said["Finished"]
    texts = {sample.trajectory.trajectory: sample.trajectory.tokens for sample in seen.samples}
    assert len(texts) == len(seen.samples) == ended.audit.trained
    for name in found.owned:
        assert set(texts[name]) != {forged}, "its text was taken"


def with_tokens(message: Any, token: int) -> Any:
    """The same message of a process that has written nothing but this token."""
    change = msgspec.structs.replace
    match message:
        case ms.Finished():
            whole = message.trajectory
            return change(message, trajectory=change(whole, tokens=(token,) * len(whole.tokens)))
        case ms.Prefixes():
            prefixes = [change(p, tokens=(token,) * len(p.tokens)) for p in message.prefixes]
            return change(message, prefixes=tuple(prefixes))
    return message


# Messages that come twice


class Echo:
    """Delivers every message twice: at once, or after some others of the same sender."""

    def __init__(self, later: int) -> None:
        self.kinds: Counter[str] = Counter()
        self.runtime: Any = None
        self._later = later
        self._waiting: defaultdict[Any, deque[Any]] = defaultdict(deque)

    def around(self, deliver: Callable[..., None]) -> Callable[..., None]:
        def twice(runtime: Any, *said: Any) -> None:
            if self.runtime is not runtime:  # the run goes on anew: nobody hears the old one
                self.runtime = runtime
                self._waiting.clear()
            *sender, message = said
            self.kinds[type(message).__name__] += 1
            deliver(runtime, *sender, message)
            waiting = self._waiting[tuple(sender)]
            waiting.append(message)
            if len(waiting) > self._later:
                deliver(runtime, *sender, waiting.popleft())

        return twice


def echoing(patch: pytest.MonkeyPatch, later: int) -> Echo:
    """All that rollout and the trainer say in one process is said twice."""
    echo = Echo(later)
    for name in ("_from_rollout", "_from_trainer"):
        patch.setattr(Runtime, name, echo.around(getattr(Runtime, name)))
    return echo


INLINE: dict[str, dict[str, dict[str, Any]]] = {
    "moves": {
        "rollout": {"slots": 4, "max_tokens": 40, "stop": ["a"], "version_slots": 1},
        "orchestration": {"max_staleness": 3, "rebalance_period_s": 0.05},
        "runtime": {"instances": 2},
        "run": {"steps": 6},
    },
    "episodes": {
        "task": {"reward": None, "environment": f"{REWARDS}:Counting"},
        "rollout": {"slots": 4, "max_tokens": 60},
        "runtime": {"instances": 2},
    },
}
KINDS = {
    "moves": {"Reported", "Finished", "HandedOver", "Used", "Trained", "Published"},
    "episodes": {"Reported", "TurnEnded", "Finished", "Used", "Trained", "Published"},
}


def checkpoint(ended: Run) -> bytes:
    assert ended.checkpoint is not None
    return weights(ended.checkpoint)


def timeless(record: StepRecord) -> StepRecord:
    """But for the one time that is not of the logical clock."""
    return msgspec.structs.replace(record, train_s=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", INLINE)
def test_what_is_said_twice_changes_nothing(
    name: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one process, where a run is a function of its seed: to the bit."""
    once = Seen()
    plain = run(model, tmp_path / "once", once, **INLINE[name])
    assert plain.ok and once.batches
    for later in (0, LATER):
        twice = Seen()
        with monkeypatch.context() as patch:
            echo = echoing(patch, later)
            ended = run(model, tmp_path / f"twice-{later}", twice, **INLINE[name])
        assert ended.ok, (ended.ending, ended.audit.summary())
        assert echo.kinds.keys() >= KINDS[name]
        assert twice.batches == once.batches
        assert [timeless(record) for record in ended.steps] == [timeless(r) for r in plain.steps]
        assert checkpoint(ended) == checkpoint(plain)


def test_an_answer_is_kept_though_an_older_one_is_confirmed_again(tmp_path: Path) -> None:
    """What an environment says to a parked trajectory is said again when it is back."""
    outside = Mock()
    encoder = Mock(encode=lambda *_: [1], decode=lambda _: "text", observation=lambda _: [2, 3])
    stream = Mock(read=lambda *_: [Mock()])
    task = Mock(encoder=encoder, stream=stream, settings=Mock(max_turns=9), has_environment=True)
    core = Mock(settings=Mock(group_size=2), handle=lambda *_: [])
    driver = Driver(core, task, Mock(), outside, tmp_path)
    resumed = ms.Reported.of(TrajectoryResumed(0, 1, turn=1))

    driver.perform(Start(0, 1, 0, 0))
    driver.answered(EnvReply(ticket=1))
    for turn in range(2):
        for _ in range(2):
            driver.from_rollout(0, ms.TurnEnded(0, 1, turn, (7,), room=50))
        driver.answered(EnvReply(ticket=1))
        driver.from_rollout(0, resumed)  # the second time it is no news
    assert outside.step_episode.call_count == 2
    outside.to_rollout.reset_mock()
    driver.perform(Unpark(0, 0, (Placement(0, 1),)))
    assert outside.to_rollout.call_args.args == (0, ms.Continue(0, 1, 1, (2, 3)))


@pytest.mark.faults
@pytest.mark.parametrize("later", [0, LATER])
def test_what_processes_say_twice_changes_nothing(
    later: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them dies, so that what it had saved is needed."""
    echo = Echo(later)
    monkeypatch.setattr(LocalRuntime, "_take", echo.around(LocalRuntime._take))
    killer, seen = Stopper(signal.SIGKILL), Seen()
    often = {"steps": 6, "checkpoint_every": 1, "keep_checkpoints": 1}
    sections = {**LOCAL, "run": {**LOCAL["run"], **often}}
    ended = run(model, tmp_path / "run", killer, seen, **sections)
    assert killer.pid is not None
    assert ended.ok, (ended.ending, ended.audit.summary())
    assert (ended.audit.failed, ended.audit.outstanding) == (0, 0)
    kinds = {"Reported", "Finished", "Prefixes", "TrainerReady", "Trained", "Published", "Saved"}
    assert echo.kinds.keys() >= kinds
    assert not echo.runtime._trainer_asked, "the trainer is waited for, and has answered"
    assert [record.step for record in ended.steps] == list(range(6))
    names = [sample.trajectory.trajectory for sample in seen.samples]
    assert len(names) == len(set(names)) == ended.audit.trained
    with Ledger.read(ended.directory / LEDGER) as ledger:
        assert ledger.counts()["trained"] == len(names)
        assert [row.step for row in ledger.batches()] == list(range(6))
        kept = [row.name for row in ledger.checkpoints()]
    assert kept == [path.name for path in (ended.directory / "checkpoints").iterdir()]
