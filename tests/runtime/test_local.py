"""Runs as processes: parts that die, an interrupt, a driver that dies; nobody is left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from dora_rl.core.commands import Command
from dora_rl.core.events import Event, InstanceFailed, InstanceJoined, TrajectoryFinished
from dora_rl.runtime.errors import RunFailed
from dora_rl.runtime.leftover import RESUME_FILE
from dora_rl.runtime.listening import Listener
from dora_rl.runtime.train import execute, resume
from tests.runtime.harness import PROMPTS, assert_sound, children, records, run, trained

ROOT = Path(__file__).parents[2]
PATIENCE_S = 120.0  # the machine may be busy with others' tests
LOCAL: dict[str, dict[str, Any]] = {
    "runtime": {"kind": "local", "instances": 2, "report_period_s": 0.1},
    "rollout": {"slots": 4, "max_tokens": 40, "stop": ["a"]},
}
ALONE = {**LOCAL, "runtime": {**LOCAL["runtime"], "instances": 1}}

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def nobody_is_left_behind() -> Iterator[None]:
    before = {child.pid for child in children()}
    yield
    assert {child.pid for child in children()} <= before


def part(name: str) -> psutil.Process:
    """The part that writes this log."""
    (found,) = [
        child
        for child in children()
        if os.readlink(f"/proc/{child.pid}/fd/1").endswith(f"/{name}.log")
    ]
    return found


class Killer(Listener):
    """Kills a part in the middle of the run."""

    def __init__(self, name: str, after: int = 3) -> None:
        self.name = name
        self.left = after

    def observed(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        if isinstance(event, TrajectoryFinished):
            self.left -= 1
            if self.left == 0:
                part(self.name).kill()


def test_a_run_in_processes(model: Path, tmp_path: Path) -> None:
    ended = run(model, tmp_path / "run", **LOCAL)
    assert_sound(ended)
    assert len(ended.steps) == 4
    files = {path.name for path in ended.directory.iterdir()}
    assert {"config.toml", "journal.jsonl", "metrics.jsonl", "metrics.json", "logs"} <= files
    assert "exchange" not in files
    joined = [r.event for r in records(ended.directory) if isinstance(r.event, InstanceJoined)]
    assert sorted((event.instance, event.incarnation) for event in joined) == [(0, 0), (1, 0)]
    for log in ("trainer", "rollout-0", "rollout-1"):
        assert (ended.directory / "logs" / f"{log}.log").read_text() == ""


def test_a_rollout_process_that_is_killed_is_replaced(model: Path, tmp_path: Path) -> None:
    """One instance alone, so that the run cannot end without its successor."""
    ended = run(model, tmp_path / "run", Killer("rollout-0"), **ALONE)
    assert_sound(ended)
    assert len(ended.steps) == 4
    events = [record.event for record in records(ended.directory)]
    (lost,) = [event for event in events if isinstance(event, InstanceFailed)]
    assert (lost.instance, lost.incarnation) == (0, 0)
    assert "SIGKILL" in lost.reason and "instance 0" in lost.reason
    joined = [event.incarnation for event in events if isinstance(event, InstanceJoined)]
    assert joined == [0, 1]
    assert ended.audit.failed == 0


def test_a_trainer_that_is_killed_ends_the_run(model: Path, tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"the trainer ended with signal SIGKILL.*trainer\.log"):
        run(model, tmp_path / "run", Killer("trainer"), **ALONE)
    assert "SIGKILL" in (tmp_path / "run" / "journal.jsonl").read_text().splitlines()[-1]


# A driver in a process of its own


@contextmanager
def driver(model: Path, out: Path, steps: int) -> Iterator[subprocess.Popen[str]]:
    sections = json.dumps({**ALONE, "run": {"steps": steps, "out": str(out)}})
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.runtime.harness", str(model), str(out), sections],
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


def test_an_interrupted_run_goes_on(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with driver(model, out, steps=8) as process:
        wait_for(lambda: has_trained(out), process)
        process.send_signal(signal.SIGINT)
        said, complaints = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, complaints
    assert json.loads(said) == {"ok": True, "interrupted": True}
    assert (out / RESUME_FILE).is_file()
    before = trained(out)
    assert 0 < len(before) < 8 * 4
    ended = execute(resume(out, prompts=PROMPTS))
    assert_sound(ended)
    after = trained(out)
    assert after[: len(before)] == before
    assert [step for step, _, _ in after] == [step for step in range(8) for _ in range(4)]
    assert not (out / RESUME_FILE).exists()


def test_no_part_outlives_its_driver(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with driver(model, out, steps=1000) as process:
        wait_for(lambda: has_trained(out), process)
        below = psutil.Process(process.pid).children(recursive=True)
        assert len(below) >= 3  # the trainer, an instance, and who scores
        process.kill()
        process.wait()
        _, alive = psutil.wait_procs(below, timeout=10.0)
        assert not alive
