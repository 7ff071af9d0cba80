"""Runs as processes: parts that die, an interrupt, a driver that dies; nobody is left behind."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from dora_rl.core.audit import audit_journal
from dora_rl.core.history.replay import replay
from dora_rl.core.protocol.commands import Command, Dismiss, Install, Score, Start
from dora_rl.core.protocol.errors import UserError
from dora_rl.core.protocol.events import (
    Event,
    InstanceFailed,
    InstanceJoined,
    InstanceProgressed,
    TrajectoryFinished,
    WeightsPublished,
)
from dora_rl.faultlab.processes import workers_of_driver
from dora_rl.runtime.control import messages as ms
from dora_rl.runtime.control.listeners import Listener
from dora_rl.runtime.errors import RunFailed
from dora_rl.runtime.execution import execute
from dora_rl.runtime.launchers.local.launcher import LocalRuntime
from dora_rl.runtime.prepare.plan import plan_resume
from tests.patience import PATIENCE_S
from tests.runtime.harness import (
    PROMPTS,
    accepted,
    assert_sound,
    children,
    journal,
    records,
    run,
    trained,
)

HARNESS = [sys.executable, "-m", "tests.runtime.harness"]
ROOT = Path(__file__).parents[2]
LOCAL: dict[str, dict[str, Any]] = {
    "runtime": {"kind": "local", "instances": 2, "report_period_s": 0.1},
    "rollout": {"slots": 4, "max_tokens": 40, "stop": ["a"]},
}
ENDING_S = 10.0  # after a run, for actors on a cluster to end
ALONE = {**LOCAL, "runtime": {**LOCAL["runtime"], "instances": 1}}


@pytest.fixture(autouse=True)
def nobody_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("ray"):
        request.getfixturevalue("ray_address")  # the cluster stays
    before = {child.pid for child in children()}
    yield
    deadline = time.monotonic() + ENDING_S
    while not {child.pid for child in children()} <= before:
        assert time.monotonic() < deadline, children()
        time.sleep(0.1)


@pytest.fixture(params=["local", pytest.param("ray", marks=pytest.mark.ray)])
def kind(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What `[runtime]` has for each launcher."""
    if request.param == "local":
        return {"kind": "local"}
    return {"kind": "ray", "ray": {"address": request.getfixturevalue("ray_address")}}


def by(sections: dict[str, dict[str, Any]], kind: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {**sections, "runtime": {**sections["runtime"], **kind}}


def parts(name: str) -> list[psutil.Process]:
    """The part that writes this log, if it is there."""
    pid = workers_of_driver(os.getpid()).get(name)
    return [] if pid is None else [psutil.Process(pid)]


class Killer(Listener):
    """Kills a part in the middle of the run, or stops it; with `again`, each that follows."""

    def __init__(
        self,
        name: str,
        after: int = 3,
        how: signal.Signals = signal.SIGKILL,
        *,
        again: bool = False,
        counts: Callable[[Event], bool] = lambda event: isinstance(event, TrajectoryFinished),
    ) -> None:
        self.name = name
        self.left = after  # of the events that count
        self.counts = counts
        self.how = how
        self.again = again
        self.killed = 0

    def observed(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        self.left -= self.counts(event)
        if self.left <= 0 and (self.again or not self.killed):
            for found in parts(self.name):
                if found.pid != self.killed:
                    self.killed = found.pid
                    found.send_signal(self.how)


class Plague(Listener):
    """From the middle of the run on, no such part lives long enough to serve."""

    def __init__(self, name: str, after: int) -> None:
        self.name = name
        self.left = after  # of the trajectories that finish
        self.over = threading.Event()
        self.killer = threading.Thread(target=self.kill)

    def observed(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        self.left -= isinstance(event, TrajectoryFinished)
        if self.left <= 0 and self.killer.ident is None:
            self.killer.start()

    def kill(self) -> None:
        while not self.over.wait(0.01):
            for found in parts(self.name):
                with suppress(psutil.NoSuchProcess):
                    found.kill()

    def end(self) -> None:
        self.over.set()
        self.killer.join()


def test_a_run_in_processes(kind: dict[str, Any], model: Path, tmp_path: Path) -> None:
    ended = run(model, tmp_path / "run", **by(LOCAL, kind))
    assert_sound(ended)
    assert len(ended.steps) == 4
    files = {path.name for path in ended.directory.iterdir()}
    assert {"config.toml", "journal.jsonl", "metrics.jsonl", "metrics.json", "logs"} <= files
    assert "exchange" not in files
    joined = [r.event for r in records(ended.directory) if isinstance(r.event, InstanceJoined)]
    assert sorted((event.instance, event.incarnation) for event in joined) == [(0, 0), (1, 0)]
    for log in ("trainer", "rollout-0", "rollout-1"):
        assert (ended.directory / "logs" / f"{log}.log").read_text() == ""


@pytest.mark.slow
def test_a_checkpoint_is_asked_for_once(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last step may be one of those that are saved anyway."""
    asked = []
    to_trainer = LocalRuntime.to_trainer

    def note(runtime: LocalRuntime, message: ms.ToTrainer) -> None:
        if isinstance(message, ms.Save):
            asked.append(message.step)
        to_trainer(runtime, message)

    monkeypatch.setattr(LocalRuntime, "to_trainer", note)
    sections = {**ALONE, "run": {"steps": 4, "checkpoint_every": 2}}
    assert_sound(run(model, tmp_path / "run", **sections))
    assert asked == [2, 4]


@pytest.mark.slow
def test_a_rollout_process_that_is_killed_is_replaced(
    kind: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    """One instance alone, so that the run cannot end without its successor."""
    ended = run(model, tmp_path / "run", Killer("rollout-0"), **by(ALONE, kind))
    assert_sound(ended)
    assert len(ended.steps) == 4
    events = [record.event for record in records(ended.directory)]
    (lost,) = [event for event in events if isinstance(event, InstanceFailed)]
    assert (lost.instance, lost.incarnation) == (0, 0)
    assert "SIGKILL" in lost.reason and "instance 0" in lost.reason
    joined = [event.incarnation for event in events if isinstance(event, InstanceJoined)]
    assert joined == [0, 1]
    assert ended.audit.failed == 0


@pytest.mark.slow
def test_an_instance_that_is_sent_sigterm_hands_its_work_over(model: Path, tmp_path: Path) -> None:
    sections = {**LOCAL, "rollout": {"slots": 8, "max_tokens": 200, "stop": None}}
    killer = Killer("rollout-0", how=signal.SIGTERM)
    ended = run(model, tmp_path / "run", killer, **{**sections, "run": {"steps": 8}})
    assert killer.killed
    assert_sound(ended)
    found = records(ended.directory)
    assert not [r.event for r in found if isinstance(r.event, InstanceFailed)]
    dismissed = [c.instance for r in found for c in r.commands if isinstance(c, Dismiss)]
    assert dismissed == [0]
    starts = [c.trajectory for r in found for c in r.commands if isinstance(c, Start)]
    assert len(starts) == len(set(starts)), "something was written again"


class Vandal(Listener):
    """Kills the instance amid work of an older version, and cuts what its successor must install.

    The newest version, or with `older` one before it.
    """

    def __init__(self, run: Path, *, older: bool) -> None:
        self.weights = run / "weights"
        self.older = older
        self.newest = 0
        self.running: dict[int, int] = {}  # trajectories and their versions
        self.killed = False

    def observed(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        if isinstance(event, WeightsPublished):
            self.newest = event.version
            if not self.killed and any(v < self.newest for v in self.running.values()):
                self.killed = True
                for found in parts("rollout-0"):
                    found.kill()
        elif isinstance(event, TrajectoryFinished):
            self.running.pop(event.trajectory, None)
        for command in commands:
            if isinstance(command, Start):
                self.running[command.trajectory] = command.version
            elif isinstance(command, Install) and self._is_struck(command):
                name = f"version-{command.version:08}"
                os.truncate(self.weights / name / "manifest.json", 100)

    def _is_struck(self, install: Install) -> bool:
        return install.incarnation > 0 and (install.version < self.newest) == self.older


@pytest.mark.faults
@pytest.mark.parametrize("older", [False, True])
def test_a_version_that_nobody_can_install_ends_the_run(
    older: bool, model: Path, tmp_path: Path
) -> None:
    """Rather than one instance after the other, for ever; an older one too, while others serve.

    So many steps that the successor must install the newest, however late it joins.
    """
    out = tmp_path / "run"
    with pytest.raises(RunFailed, match=r"manifest\.json"):
        run(model, out, Vandal(out, older=older), **{**ALONE, "run": {"steps": 100}})


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint_every", [1, None])
def test_a_trainer_that_is_killed_is_replaced(
    checkpoint_every: int | None, model: Path, tmp_path: Path
) -> None:
    """By one that takes the steps since the last checkpoint again, to the same weights."""
    sections = {**ALONE, "run": {"steps": 4, "checkpoint_every": checkpoint_every}}
    killer = Killer("trainer", after=9)
    ended = run(model, tmp_path / "run", killer, **sections)
    assert killer.killed
    assert_sound(ended)
    assert [record.step for record in ended.steps] == [1, 2, 3, 4]


@pytest.mark.faults
def test_a_trainer_that_dies_again_and_again_ends_the_run(model: Path, tmp_path: Path) -> None:
    core = {"groups_per_step": 2, "group_size": 2, "max_train_attempts": 1}
    plague = Plague("trainer", after=5)
    with pytest.raises(RunFailed, match=r"the trainer ended with signal SIGKILL, 4 times"):
        run(model, tmp_path / "run", plague, **{**ALONE, "orchestration": core})
    plague.end()
    assert_sound(execute(plan_resume(tmp_path / "run", prompts=PROMPTS)))


@pytest.mark.faults
def test_a_trainer_that_hangs_is_replaced(model: Path, tmp_path: Path) -> None:
    sections = {**ALONE, "runtime": {**ALONE["runtime"], "train_silence_s": 15.0}}
    killer = Killer("trainer", after=5, how=signal.SIGSTOP)
    assert_sound(run(model, tmp_path / "run", killer, **sections))


def something_is_saved(event: Event) -> bool:
    return isinstance(event, InstanceProgressed) and bool(event.saved)


@pytest.mark.faults
def test_a_rollout_process_that_hangs_is_replaced_and_its_work_goes_on(
    kind: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    sections = {
        **by(ALONE, kind),
        "rollout": {"slots": 8, "max_tokens": 200, "stop": None},
        "orchestration": {"groups_per_step": 2, "group_size": 2, "heartbeat_timeout_s": 15.0},
        "run": {"steps": 2, "save_every_s": 0.02},
    }
    killer = Killer("rollout-0", how=signal.SIGSTOP, counts=something_is_saved)
    ended = run(model, tmp_path / "run", killer, **sections)
    assert_sound(ended)
    found = records(ended.directory)
    joined = [r.event.incarnation for r in found if isinstance(r.event, InstanceJoined)]
    assert joined == [0, 1]
    starts = [c for r in found for c in r.commands if isinstance(c, Start)]
    assert any(start.prefix_tokens > 0 for start in starts), "all was written again"


# A driver in a process of its own


@contextmanager
def driver(
    model: Path,
    out: Path,
    steps: int,
    *,
    again: bool = False,
    kind: dict[str, Any] | None = None,
    **more: int,
) -> Iterator[subprocess.Popen[str]]:
    """With `again`, the run is resumed. However slow we are, it does not end by itself."""
    run = {"steps": steps, "out": str(out), "checkpoint_every": 5, **more}
    sections = "resume" if again else json.dumps({**by(ALONE, kind or {}), "run": run})
    process = subprocess.Popen(
        [*HARNESS, str(model), str(out), sections, str(steps - 2)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.02)


def has_trained(out: Path) -> bool:
    """Whether a version was published after the first, which may be gone by now."""
    return any(path.name != "version-00000000" for path in (out / "weights").glob("version-*"))


def interrupt(process: subprocess.Popen[str], out: Path) -> None:
    """Once it has trained; it saves and says so."""
    wait_for(lambda: has_trained(out), process)
    process.send_signal(signal.SIGINT)
    said, complaints = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, complaints
    assert json.loads(said) == {"ok": False, "interrupted": True}


def goes_on(out: Path, steps: int) -> None:
    """A run that was stopped or killed is resumed, and what it had trained stays."""
    before = trained(out)
    assert 0 < len(before) < steps * 4
    assert_sound(execute(plan_resume(out, prompts=PROMPTS)))
    after = trained(out)
    assert after[: len(before)] == before
    assert [step for step, _, _ in after] == [step for step in range(steps) for _ in range(4)]


@pytest.mark.slow
def test_an_interrupted_run_goes_on(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with driver(model, out, steps=8) as process:
        interrupt(process, out)
    goes_on(out, steps=8)
    with pytest.raises(UserError, match="nothing to resume"):
        plan_resume(out, prompts=PROMPTS)


@pytest.mark.slow
def test_a_killed_run_goes_on(model: Path, tmp_path: Path) -> None:
    """Again and again; what was complete and committed is never generated twice."""
    out = tmp_path / "run"
    complete: set[int] = set()
    with driver(model, out, steps=12) as process:
        wait_for(lambda: has_trained(out), process)
        process.kill()
    for _ in range(2):
        assert audit_journal(journal(out).lines()).ok  # a killed run can be audited
        assert replay(journal(out).lines()).ok
        complete |= accepted(out)
        steps = len(trained(out))
        with driver(model, out, steps=12, again=True) as process:
            wait_for(lambda: len(trained(out)) > steps, process)  # noqa: B023
            process.kill()
    before = trained(out)
    ended = execute(plan_resume(out, prompts=PROMPTS))
    assert_sound(ended)
    after = trained(out)
    assert after[: len(before)] == before
    assert [step for step, _, _ in after] == [step for step in range(12) for _ in range(4)]
    assert [record.step for record in ended.steps] == list(range(1, 13))
    finished: dict[int, int] = {}
    for record in records(out):
        for command in record.commands:
            if isinstance(command, Score):
                finished[command.trajectory] = finished.get(command.trajectory, 0) + 1
            if isinstance(command, Start) and command.trajectory in complete:
                assert command.trajectory not in finished, "generated twice"


def test_no_part_outlives_its_driver(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with driver(model, out, steps=1000) as process:
        wait_for(lambda: has_trained(out), process)
        below = psutil.Process(process.pid).children(recursive=True)
        assert len(below) >= 3  # the trainer, an instance, and who scores
        process.kill()
        process.wait()
        _, alive = psutil.wait_procs(below, timeout=PATIENCE_S)
        assert not alive
