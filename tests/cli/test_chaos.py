"""`dora-rl chaos` from the outside, and its faults on processes of their own."""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from dora_rl.chaos import faults
from dora_rl.chaos.faults import FAULTS, Target
from dora_rl.chaos.processes import below, parts, workers
from dora_rl.chaos.storm import Plan
from dora_rl.cli import cli
from dora_rl.core.errors import UserError

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture
def sleeping(tmp_path: Path) -> "list[subprocess.Popen[bytes]]":
    """A driver without an output, and a part that writes a log."""
    (tmp_path / "logs").mkdir()
    with open(tmp_path / "logs" / "rollout-0.log", "wb") as log:
        part = subprocess.Popen(SLEEP, stdout=log)
    driver = subprocess.Popen(SLEEP)
    yield [driver, part]
    for process in (driver, part):
        process.kill()
        process.wait()


def target(run: Path, driver: int) -> Target:
    return Target(run, driver, random.Random(0))


def test_parts_are_found_by_what_they_write(
    sleeping: "list[subprocess.Popen[bytes]]", tmp_path: Path
) -> None:
    assert parts(tmp_path) == {"rollout-0": sleeping[1].pid}
    assert parts(tmp_path / "elsewhere") == {}


def test_children_are_found_down_to_the_last(tmp_path: Path) -> None:
    nest = f"import subprocess; subprocess.run({SLEEP!r})"
    process = subprocess.Popen([sys.executable, "-c", nest], start_new_session=True)
    try:
        deadline = time.monotonic() + 30
        while not below(process.pid):
            assert time.monotonic() < deadline
        assert workers(process.pid, tmp_path) == below(process.pid)
    finally:
        for pid in below(process.pid):
            faults.signal_to(pid, signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize("name", ["kill-rollout", "stop-rollout"])
def test_a_fault_strikes_its_part(
    name: str, sleeping: "list[subprocess.Popen[bytes]]", tmp_path: Path
) -> None:
    said = FAULTS[name][0](target(tmp_path, sleeping[0].pid))
    assert said is not None and said.startswith("rollout-0")
    if name == "kill-rollout":
        assert sleeping[1].wait(10) == -signal.SIGKILL
    assert sleeping[0].poll() is None


@pytest.mark.parametrize(("name", "code"), [("kill-driver", -9), ("end-driver", -15)])
def test_a_fault_strikes_the_driver(
    name: str, code: int, sleeping: "list[subprocess.Popen[bytes]]", tmp_path: Path
) -> None:
    assert FAULTS[name][0](target(tmp_path, sleeping[0].pid)) is not None
    assert sleeping[0].wait(10) == code
    assert sleeping[1].poll() is None


def test_nothing_is_struck_where_there_is_nothing(tmp_path: Path) -> None:
    assert FAULTS["kill-trainer"][0](target(tmp_path, 2**22 + 1)) is None
    assert FAULTS["stop-trainer"][0](target(tmp_path, 2**22 + 1)) is None


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ({"faults": ("rain",)}, "`rain`"),
        ({"faults": ()}, "--faults"),
        ({"minutes": 0.0}, "--minutes"),
        ({"every_s": -1.0}, "--every"),
    ],
)
def test_bad_storms_are_refused(bad: dict[str, object], named: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=named):
        Plan(config={}, out=tmp_path / "run", **bad)  # type: ignore[arg-type]


def test_the_faults_are_listed() -> None:
    done = CliRunner().invoke(cli, ["chaos", "--list"])
    assert done.exit_code == 0
    assert [line.split()[0] for line in done.output.splitlines()] == list(FAULTS)


@pytest.mark.faults
def test_a_short_storm(tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-m", "dora_rl", "chaos", "--minutes", "0.5", "--every", "4"]
    command += ["--faults", "kill-driver,kill-rollout,kill-trainer", "--out", str(out), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["ok"] and report["steps"] > 0
    assert sum(report["faults"].values()) > 0
    assert report["audit"]["lost"] == 0
