"""`dora-rl chaos` from the outside, and its faults on processes of their own."""

import errno
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from click.testing import CliRunner

from dora_rl import extras
from dora_rl.cli import cli, main
from dora_rl.cli._training import quickstart_config
from dora_rl.config import load_toml
from dora_rl.core.audit import AuditReport
from dora_rl.core.protocol.errors import UserError
from dora_rl.faultlab import faults, storm
from dora_rl.faultlab.damage import DamagedFiles
from dora_rl.faultlab.disk import Disk
from dora_rl.faultlab.driver_process import DriverProcess
from dora_rl.faultlab.faults import FAULTS, Target
from dora_rl.faultlab.processes import (
    descendants,
    sandbox_processes,
    workers_of_driver,
    workers_of_run,
)
from dora_rl.faultlab.storm import StormResult, StormSettings
from dora_rl.machine.fast_paths import PORTABLE, Trial, Unavailable
from dora_rl.runtime.errors import RunFailed
from dora_rl.sandbox import linux
from dora_rl.sandbox.linux import call_watch
from tests.faultlab.test_damage import Aim, content, make_run
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="chaos needs /proc")
SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture(autouse=True)
def on_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    """The portable way has no chaos: see `test_without_proc_it_is_refused`."""
    monkeypatch.delenv(PORTABLE, raising=False)


@pytest.fixture
def sleeping(tmp_path: Path) -> "list[subprocess.Popen[bytes]]":
    """A driver without an output, and a worker that writes a log."""
    (tmp_path / "logs").mkdir()
    with open(tmp_path / "logs" / "rollout-0.log", "wb") as log:
        worker = subprocess.Popen(SLEEP, stdout=log)
    driver = subprocess.Popen(SLEEP)
    yield [driver, worker]
    for process in (driver, worker):
        process.kill()
        process.wait()


def target(run: Path, driver: int, **driver_has: Any) -> Target:
    process = SimpleNamespace(pid=driver, **driver_has)
    damaged = DamagedFiles(run, run.with_name("damaged"))
    return Target(run, process, damaged, random.Random(0))  # type: ignore[arg-type]


def test_a_missing_extra_is_named_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(extras, "_present", lambda name: name != "torch")
    assert main(["chaos", "--out", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err == (
        "error: torch is not installed: `dora-rl chaos` needs it. "
        "Run: pip install 'dora-rl[engine]'\n"
    )
    assert not list(tmp_path.iterdir())


def test_workers_are_found_by_what_they_write(
    sleeping: "list[subprocess.Popen[bytes]]", tmp_path: Path
) -> None:
    assert workers_of_run(tmp_path) == {"rollout-0": sleeping[1].pid}
    assert workers_of_run(tmp_path / "elsewhere") == {}
    assert workers_of_driver(os.getpid()) == {"rollout-0": sleeping[1].pid}
    others = sandbox_processes(os.getpid())
    assert sleeping[0].pid in others and sleeping[1].pid not in others


def test_children_are_found_down_to_the_last(tmp_path: Path) -> None:
    nest = f"import subprocess; subprocess.run({SLEEP!r})"
    process = subprocess.Popen([sys.executable, "-c", nest], start_new_session=True)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not descendants(process.pid):
            assert time.monotonic() < deadline
        assert sandbox_processes(process.pid) == descendants(process.pid)
    finally:
        for pid in descendants(process.pid):
            faults.signal_to(pid, signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize("name", ["kill-rollout", "stop-rollout"])
def test_a_fault_strikes_its_worker(
    name: str, sleeping: "list[subprocess.Popen[bytes]]", tmp_path: Path
) -> None:
    said = FAULTS[name][0](target(tmp_path, sleeping[0].pid))
    assert said is not None and said.startswith("rollout-0")
    if name == "kill-rollout":
        assert sleeping[1].wait(PATIENCE_S) == -signal.SIGKILL
    assert sleeping[0].poll() is None


@pytest.mark.parametrize(("name", "code"), [("kill-driver", -9), ("end-driver", -15)])
def test_a_fault_strikes_the_driver(
    name: str, code: int, sleeping: "list[subprocess.Popen[bytes]]", tmp_path: Path
) -> None:
    assert FAULTS[name][0](target(tmp_path, sleeping[0].pid)) is not None
    assert sleeping[0].wait(PATIENCE_S) == code
    assert sleeping[1].poll() is None


def test_nothing_is_struck_where_there_is_nothing(tmp_path: Path) -> None:
    assert FAULTS["kill-trainer"][0](target(tmp_path, 2**22 + 1)) is None
    assert FAULTS["stop-trainer"][0](target(tmp_path, 2**22 + 1)) is None


@pytest.mark.parametrize("there", [True, False])
def test_a_fault_that_did_not_happen_is_none(there: bool, tmp_path: Path) -> None:
    """A disk that nobody asks us about, a driver that is gone, a run without files."""
    disk, process = Mock(watching=there), {"ended": False, "kill": Mock()}
    heard = Mock(return_value=there)
    run = target(tmp_path / "run", 0, disk=disk, repeat_messages=heard, **process)
    if there:
        make_run(tmp_path / "run")
    for name in ("slow-disk", "full-disk", "repeat-messages", "damage-file"):
        assert (FAULTS[name][0](run) is not None) == there
    assert disk.be_full.called == disk.be_slow.called == there
    assert process["kill"].called == there, "killed in vain"
    assert heard.called


def test_a_run_that_has_ended_is_not_damaged(tmp_path: Path) -> None:
    """Its error message has not been read yet."""
    before = make_run(tmp_path / "run")
    run = target(tmp_path / "run", 0, ended=True, kill=Mock())
    assert FAULTS["damage-file"][0](run) is None
    assert content(tmp_path / "run", before) == before


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
        StormSettings(config={}, out=tmp_path / "run", **bad)  # type: ignore[arg-type]


def test_the_faults_are_listed() -> None:
    done = CliRunner().invoke(cli, ["chaos", "--list"])
    assert done.exit_code == 0
    assert [line.split()[0] for line in done.output.splitlines()] == list(FAULTS)


def test_a_run_that_does_not_end_well_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(storm, "run_storm", Mock(side_effect=RunFailed("it ended: see run.log")))
    assert main(["chaos", "--out", str(tmp_path / "run")]) == 1
    assert capsys.readouterr().err == "error: it ended: see run.log\n"


# A child whose syncs and writes are answered for: does what it is told, and says how it went.
SYNCER = """
import os, socket, sys
from dora_rl.faultlab.disk import hand_over
hand_over(socket.socket(fileno=int(sys.argv[1])))
fd = os.open(sys.argv[2], os.O_RDWR | os.O_CREAT)
for order in sys.stdin:
    try:
        os.pwrite(fd, b"x", 0) if order.strip() == "write" else os.fsync(fd)
        print("done", flush=True)
    except OSError as error:
        print(error.strerror, flush=True)
"""


def open_files() -> int:
    return len(os.listdir("/dev/fd"))


@pytest.fixture
def syncer(tmp_path: Path) -> Iterator[tuple[Disk, Callable[[str], str]]]:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-c", SYNCER, str(theirs.fileno()), str(tmp_path / "file")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    child = subprocess.Popen(command, pass_fds=(theirs.fileno(),), **pipes)  # type: ignore[call-overload]
    theirs.close()
    disk = Disk(ours)

    def order(what: str) -> str:
        child.stdin.write(f"{what}\n")
        child.stdin.flush()
        return str(child.stdout.readline().strip())

    before = open_files()
    yield disk, order
    assert disk.watching and open_files() == before + 1
    child.communicate()
    disk.join(PATIENCE_S)
    assert not disk.is_alive() and not disk.watching
    assert open_files() == before - 2  # the pipes of the child
    ours.close()


@pytest.mark.skipif(not call_watch().in_force, reason="needs seccomp notifications")
@pytest.mark.parametrize("what", ["write", "sync"])
def test_a_disk_is_healthy_full_and_slow(
    what: str, syncer: tuple[Disk, Callable[[str], str]]
) -> None:
    disk, order = syncer
    assert order(what) == "done"
    disk.be_full(600)
    assert order(what) == os.strerror(errno.ENOSPC)
    disk.be_slow(0.3, 600)
    begin = time.monotonic()
    assert order(what) == "done"
    assert time.monotonic() - begin >= 0.3
    disk.be_full(600)
    disk.be_healthy()
    assert order(what) == "done"


@pytest.mark.skipif(not call_watch().in_force, reason="needs seccomp notifications")
@pytest.mark.parametrize(
    ("release", "can"), [("5.4.0", False), ("5.5.0-rc1", True), ("4.20", False), ("10.0", True)]
)
def test_an_old_kernel_has_no_disk_to_answer_for(
    release: str, can: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    uname = SimpleNamespace(release=release, machine=os.uname().machine)
    monkeypatch.setattr(linux.os, "uname", lambda: uname)
    with nullcontext() if can else pytest.raises(Unavailable):
        call_watch.__wrapped__()


# The driver process


@pytest.mark.parametrize("code", [130, 0, 1])
def test_a_run_ends_as_after_an_interrupt(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program"
    program.write_text(
        f"#!/bin/sh\ntrap 'echo error: late; exit {code}' TERM\necho error: early\n"
        "while :; do sleep 0.05; done\n"
    )
    program.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(program))
        process = DriverProcess([], tmp_path / "log", seed=0)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while process.error_message != "early\n":
            assert time.monotonic() < deadline
        assert not process.ended and process.repeat_messages(0.0)
        assert process.stop(PATIENCE_S) == code
        assert process.ended and process.failed == (code == 1) and not process.refused_input
        assert process.error_message == "late\n"
        assert not process.repeat_messages(0.0) and not process.disk.watching
    finally:
        process.kill(tmp_path)


@pytest.mark.parametrize("codes", [[130], [1, 130], [1, 0, 1]])
def test_the_last_incarnation_has_to_exit_well(
    codes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that the storm had struck may end as it did; the next was not struck."""
    process = Mock()
    process.stop.side_effect = codes
    looks: list[str] = []
    monkeypatch.setattr(storm._Storm, "_start", lambda _: process)
    monkeypatch.setattr(storm._Storm, "_await_step", lambda _: looks.append("step"))
    monkeypatch.setattr(storm._Storm, "_poll", lambda _: looks.append("resumed"))
    running = storm._Storm(StormSettings(config={}, out=tmp_path / "run"), lambda _: None)
    if codes[-1] == 130:
        running._stop()
        assert looks == ["step", *["resumed", "step"] * (len(codes) - 1)]
    else:
        with pytest.raises(RunFailed, match=f"stopped 3 times.*`1`.*{tmp_path}"):
            running._stop()


def test_a_driver_says_what_it_refuses(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("error: of an earlier incarnation\n")
    process = DriverProcess(["train", "--resume", str(tmp_path / "none")], tmp_path / "log", seed=0)
    assert not process.error_message
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not process.ended:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert process.failed and process.refused_input
        assert process.error_message.startswith(f"not a run: `{tmp_path / 'none'}`")
    finally:
        process.kill(tmp_path)


# Storms


@pytest.mark.parametrize("begun", [False, True])
def test_only_a_driver_started_after_the_damage_names_it(
    begun: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that ended just before reports something else."""
    words = Mock(failed=True, refused_input=True, error_message="`config.toml` is damaged")
    monkeypatch.setattr(storm, "DriverProcess", lambda *_: words)
    run = tmp_path / "run"
    running = storm._Storm(
        StormSettings(config=load_toml(quickstart_config()), out=run), lambda _: None
    )
    make_run(run)
    assert running._damaged.damage_one(Aim("config.toml")) is not None
    if begun:
        running._launch()
    running._check_exit()
    assert running._result.refused == begun
    assert running._failures == (not begun)
    assert bool(running._damaged.remaining) != begun


def test_the_summary_says_how_often_it_was_resumed(tmp_path: Path) -> None:
    audit = Mock(AuditReport, summary=lambda: ["clean"])
    result = StormResult(Mock(), resumed=7, refused=2, steps=9, audit=audit)
    said = "9 steps; resumed 7 times; refused a damaged file by its name 2 times"
    assert said in result.summary()


SHORT = ("kill-driver", "kill-rollout", "kill-trainer", "full-disk", "damage-file")


@pytest.mark.faults
def test_a_short_storm(tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-m", "dora_rl", "chaos", "--minutes", "1", "--every", "4"]
    # With this seed they strike first, before a fault whose draws depend on what it finds.
    command += ["--seed", "53", "--faults", ",".join(SHORT)]
    command += ["--out", str(out), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["ok"] and report["steps"] > 0
    assert report["faults"]["full-disk"] > 0 and report["faults"]["damage-file"] > 0
    assert report["audit"]["lost"] == 0


def test_what_this_machine_cannot_have_is_left_out_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "call_watch", lambda: Trial(False, "an old kernel"))
    assert set(faults.of_runtime("local")) - set(faults.available()) == {"slow-disk", "full-disk"}
    asked: list[StormSettings] = []

    def run_storm(settings: StormSettings, tell: object) -> StormResult:
        asked.append(settings)
        raise RunFailed("far enough")

    monkeypatch.setattr(storm, "run_storm", run_storm)
    done = CliRunner().invoke(cli, ["chaos", "--out", str(tmp_path / "run")])
    assert "left out, not supported on this machine: slow-disk, full-disk" in done.stderr
    assert asked[0].faults == tuple(faults.available())


def test_without_proc_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PORTABLE, "1")
    with pytest.raises(UserError, match="needs Linux"):
        StormSettings(config={}, out=tmp_path / "run", faults=("kill-driver",))


# On Ray


@pytest.mark.ray
def test_a_storm_on_ray_kills_a_node_and_leaves_nobody_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One node is killed, with whatever it runs, and one is added: the run goes on."""
    monkeypatch.setattr(storm, "_NODES", 2)
    settings = StormSettings(
        config=tiny_quickstart(),
        out=tmp_path / "storm",
        faults=("kill-node",),
        minutes=0.25,
        every_s=2.0,
        runtime="ray",
    )
    told: list[str] = []
    result = storm.run_storm(settings, told.append)
    assert result.ok, result.summary()
    assert result.faults["kill-node"] >= 1 and any("added" in line for line in told)
    assert result.steps >= 2
    left = [path for path in Path("/proc").glob("[0-9]*/cmdline") if b"dora-ray-" in read(path)]
    assert not left


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def tiny_quickstart() -> dict[str, Any]:
    data = load_toml(quickstart_config())
    small = {"groups_per_step": 2, "group_size": 2}
    task = {key: value for key, value in data["task"].items() if not key.startswith("eval")}
    return {
        **data,
        "task": task,
        "orchestration": {**data["orchestration"], **small},
        "rollout": {**data["rollout"], "slots": 4, "max_tokens": 32},
    }


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--runtime", "ray", "--faults", "slow-disk"], "`slow-disk` is no fault of --runtime ray"),
        (["--faults", "kill-node"], "`kill-node` is no fault of --runtime local"),
    ],
)
def test_faults_of_another_runtime_are_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chaos", *arguments]) == 2
    assert words in capsys.readouterr().err
