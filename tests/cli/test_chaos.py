"""`dora-rl chaos` from the outside, and its faults on processes of their own."""

import errno
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from dora_rl.chaos import faults
from dora_rl.chaos.disk import Disk
from dora_rl.chaos.faults import FAULTS, Target
from dora_rl.chaos.processes import below, parts, workers
from dora_rl.chaos.storm import Plan
from dora_rl.chaos.wounds import Wounds
from dora_rl.cli import cli
from dora_rl.core.errors import UserError
from dora_rl.tasks.workers.kernel import can_watch_calls

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
    life = SimpleNamespace(pid=driver)
    wounds = Wounds(run, run.with_name("damaged"))
    return Target(run, life, wounds, random.Random(0))  # type: ignore[arg-type]


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


# A child whose syncs and writes are answered for: does what it is told, and says how it went.
SYNCER = """
import os, socket, sys
from dora_rl.tasks.workers import kernel
line = socket.socket(fileno=int(sys.argv[1]))
listener = kernel.watch_disk_calls()
socket.send_fds(line, [b"."], [listener])
os.close(listener)
fd = os.open(sys.argv[2], os.O_RDWR | os.O_CREAT)
for order in sys.stdin:
    try:
        os.pwrite(fd, b"x", 0) if order.strip() == "write" else os.fsync(fd)
        print("done", flush=True)
    except OSError as error:
        print(error.strerror, flush=True)
"""


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

    yield disk, order
    child.communicate()
    disk.join(30)
    assert not disk.is_alive()
    ours.close()


@pytest.mark.skipif(not can_watch_calls(), reason="needs seccomp notifications")
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
    disk.be_full(0)
    assert order(what) == "done"


def damaged_run(run: Path) -> dict[str, bytes]:
    """A run's files, of made-up content."""
    files = {
        "config.toml": b"[run]",
        "journal.jsonl": b"1\n2\n3\n",
        "ledger.sqlite": b"pages",
        "ledger.sqlite-wal": b"frames",
        "checkpoints/step-10/model.safetensors": b"weights",
        "weights/version-00000003/manifest.json": b"{}",
    }
    for name, content in files.items():
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_bytes(content)
    return files


def content(run: Path, names: Iterable[str]) -> dict[str, bytes]:
    return {name: (run / name).read_bytes() for name in names}


@given(seed=st.integers(0, 2**32))
def test_one_file_is_damaged_and_healed(seed: int) -> None:
    with tempfile.TemporaryDirectory() as place:
        run = Path(place, "run")
        before = damaged_run(run)
        wounds = Wounds(run, Path(place, "damaged"))
        said = wounds.inflict(random.Random(seed))
        assert said is not None
        name = said.split()[0]
        assert {n for n, data in content(run, before).items() if data != before[n]} == {name}
        assert wounds.heal_those_named("error: something else is wrong") == []
        refused = f"error: `{run / name.removesuffix('-wal')}` is damaged"
        assert wounds.heal_those_named(refused) == [run / name]
        assert content(run, before) == before and not wounds.open


def test_a_database_is_healed_with_all_of_its_files(tmp_path: Path) -> None:
    before = damaged_run(tmp_path / "run")
    wounds = Wounds(tmp_path / "run", tmp_path / "damaged")
    for other in set(before) - {"ledger.sqlite"}:
        (tmp_path / "run" / other).unlink()
    rng = random.Random(0)
    while wounds.inflict(rng) is None:
        pass
    (tmp_path / "run" / "ledger.sqlite-wal").write_bytes(b"of a life that was refused")
    assert wounds.heal_those_named("ledger.sqlite")
    assert not (tmp_path / "run" / "ledger.sqlite-wal").exists()


def test_what_a_run_outlived_is_not_put_back(tmp_path: Path) -> None:
    """But for files that never change, and whose damage may be found later."""
    run = tmp_path / "run"
    damaged_run(run)
    wounds = Wounds(run, tmp_path / "damaged")
    rng = random.Random(1)
    for _ in range(50):
        wounds.inflict(rng)
    assert sum(not wound.lasting for wound in wounds.open) == 1
    wounds.outlived()
    assert {wound.path.parent.name for wound in wounds.open} == {"step-10", "version-00000003"}
    shutil.rmtree(run / "checkpoints" / "step-10")
    assert wounds.heal_those_named("`step-10` is damaged")
    assert not (run / "checkpoints" / "step-10").exists()


@pytest.mark.faults
def test_a_short_storm(tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-m", "dora_rl", "chaos", "--minutes", "1", "--every", "4"]
    command += ["--faults", "kill-driver,kill-rollout,kill-trainer,full-disk,damage-file"]
    command += ["--out", str(out), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["ok"] and report["steps"] > 0
    assert sum(report["faults"].values()) > 0
    assert report["audit"]["lost"] == 0
