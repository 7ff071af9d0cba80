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

from dora_rl.core.protocol.commands import Command, Expel, Score, Start, Unpark
from dora_rl.core.protocol.events import (
    Event,
    InstanceFailed,
    InstanceProgressed,
    TrajectoryFinished,
    TrajectoryResumed,
)
from dora_rl.core.protocol.settings import Settings
from dora_rl.core.protocol.types import Fence, Placement, TrajectoryId
from dora_rl.faultlab.processes import workers_of_driver
from dora_rl.runtime.control import messages as ms
from dora_rl.runtime.control.driver import Driver
from dora_rl.runtime.control.listeners import Listener
from dora_rl.runtime.execution import Run
from dora_rl.runtime.launchers.base import Runtime
from dora_rl.runtime.launchers.local.launcher import LocalRuntime, Receive
from dora_rl.runtime.launchers.local.processes import WorkerProcess
from dora_rl.runtime.launchers.registry import using
from dora_rl.runtime.records.run_files import RunFiles
from dora_rl.runtime.records.step_metrics import StepRecord
from dora_rl.samples import Trajectory, pack, pack_tokens
from dora_rl.store.ledger import Ledger
from dora_rl.store.rundir import LEDGER, TRAJECTORIES
from dora_rl.tasks.environment_pool import EnvReply
from dora_rl.transports.samples.shared_directory import SampleWriter
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
    return workers_of_driver(os.getpid())[f"rollout-{instance}"]


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

    out = tmp_path / "run"
    waker, seen = Waker(), Seen(out)
    sink = SampleWriter(out / TRAJECTORIES, 999, 0)
    kill = WorkerProcess.kill
    spared: list[int] = []
    said: Counter[str] = Counter()

    def kill_but_not_it(process: WorkerProcess) -> None:
        if process.pid == waker.pid:
            spared.append(process.pid)
        else:
            kill(process)

    def around(receive: Receive) -> Receive:
        def listen(process: WorkerProcess, message: Any) -> None:
            if process.pid == waker.pid and waker.successor is not None:
                said[type(message).__name__] += 1
                message = with_tokens(message, forged, sink)
            receive(process, message)
            if said["Finished"] == 1 and waker.successor is not None:
                os.kill(waker.successor, signal.SIGCONT)

        return listen

    monkeypatch.setattr(WorkerProcess, "kill", kill_but_not_it)
    sections = {**LOCAL, "run": {**LOCAL["run"], "steps": 8}}
    with using("local", lambda files: LocalRuntime(files, around_receive=around)):
        ended = run(model, out, waker, seen, **sections)
    sink.close()
    assert len(spared) > 1, "the core goes on asking for its end"
    assert said.keys() >= {"Finished", "Prefixes", "Reported"}
    assert_sound(ended)
    assert ended.audit.failed == 0
    found = story(ended)
    assert_taken_over(found)
    assert 1 <= len(found.late) <= said["Finished"]
    texts = {sample.trajectory.id: sample.trajectory.tokens for sample in seen.samples}
    assert len(texts) == len(seen.samples) == ended.audit.trained
    for name in found.owned:
        assert set(texts[name]) != {forged}, "its text was taken"


def with_tokens(message: Any, token: int, sink: SampleWriter) -> Any:
    """The same message of a process that has written nothing but this token."""
    change = msgspec.structs.replace
    match message:
        case ms.Finished():
            ref = message.trajectory
            whole = Trajectory(
                id=ref.id,
                group=ref.group,
                version=ref.version,
                prompt=(token,) * ref.num_prompt,
                tokens=(token,) * ref.num_tokens,
                logprobs=(-1.0,) * ref.num_tokens,
                segments=ref.segments,
                truncated=ref.truncated,
            )
            return change(message, trajectory=whole.by_reference(sink.put(pack(whole))))
        case ms.Prefixes():
            prefixes = []
            for prefix in message.prefixes:
                (piece,) = prefix.pieces
                many = piece.num_tokens
                content = sink.put(pack_tokens((token,) * many, (-1.0,) * many))
                prefixes.append(change(prefix, pieces=(piece._replace(content=content),)))
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
    once = Seen(tmp_path / "once")
    plain = run(model, tmp_path / "once", once, **INLINE[name])
    assert plain.ok and once.batches
    for later in (0, LATER):
        twice = Seen(tmp_path / f"twice-{later}")
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
    workers, environments = Mock(), Mock()
    encoder = Mock(decode=lambda _: "text", observation=lambda _: [2, 3])
    stream = Mock(read=lambda *_: [Mock()])
    task = Mock(encoder=encoder, stream=stream, settings=Mock(max_turns=9), has_environment=True)
    task.encode_opening = lambda *_: (1,)
    core = Mock(settings=Settings(group_size=2), handle=lambda *_: [])
    driver = Driver(
        core,
        task,
        Mock(),
        clock=Mock(),
        timer=Mock(),
        workers=workers,
        scorer=Mock(),
        environments=environments,
        weights=Mock(),
        samples=Mock(),
        kv=Mock(),
    )
    resumed = ms.Reported.of(TrajectoryResumed(0, 1, turn=1))

    driver.perform(Start(0, 1, 0, 0))
    reply = environments.open.call_args.args[-1]
    reply(EnvReply(ticket=1))
    for turn in range(2):
        for _ in range(2):
            driver.from_rollout(0, ms.TurnEnded(0, 1, turn, (7,), room=50))
        reply(EnvReply(ticket=1))
        driver.from_rollout(0, resumed)  # the second time it is no news
    assert environments.open.return_value.step.call_count == 2
    workers.to_rollout.reset_mock()
    driver.perform(Unpark(0, 0, (Placement(0, 1),)))
    assert workers.to_rollout.call_args.args == (0, ms.Continue(0, 1, 1, (2, 3)))


@pytest.mark.faults
@pytest.mark.parametrize("later", [0, LATER])
def test_what_processes_say_twice_changes_nothing(later: int, model: Path, tmp_path: Path) -> None:
    """One of them dies, so that what it had saved is needed."""
    echo = Echo(later)
    launched: list[LocalRuntime] = []

    def launch(files: RunFiles) -> Runtime:
        def around(receive: Receive) -> Receive:
            twice = echo.around(lambda _, *said: receive(*said))
            return lambda process, message: twice(receive, process, message)

        launched.append(LocalRuntime(files, around_receive=around))
        return launched[-1]

    killer, seen = Stopper(signal.SIGKILL), Seen(tmp_path / "run")
    often = {"steps": 6, "checkpoint_every": 1, "keep_checkpoints": 1}
    sections = {**LOCAL, "run": {**LOCAL["run"], **often}}
    with using("local", launch):
        ended = run(model, tmp_path / "run", killer, seen, **sections)
    assert killer.pid is not None
    assert ended.ok, (ended.ending, ended.audit.summary())
    assert (ended.audit.failed, ended.audit.outstanding) == (0, 0)
    kinds = {"Reported", "Finished", "Prefixes", "TrainerReady", "Trained", "Published", "Saved"}
    assert echo.kinds.keys() >= kinds
    assert not launched[-1].supervisor.trainer_awaited, (
        "the trainer is waited for, and has answered"
    )
    assert [record.step for record in ended.steps] == list(range(1, 7))
    names = [sample.trajectory.id for sample in seen.samples]
    assert len(names) == len(set(names)) == ended.audit.trained
    with Ledger.read(ended.directory / LEDGER) as ledger:
        assert not list(ledger.batches()) and not list(ledger.payloads())  # a checkpoint has all
        kept = [row.name for row in ledger.checkpoints()]
    assert kept == [path.name for path in (ended.directory / "checkpoints").iterdir()]
