"""A bench that is interrupted or fails: what it shows, and what it leaves behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dora_rl import cli
from dora_rl.benchmarks.contestants import roster
from dora_rl.cli._benching import INCOMPLETE
from tests.benchmarks import stubs
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.slow
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
# The first sequence is answered at once; the second writes its pid and takes for ever.
BLOCKING = """
import os, time

class Stub:
    def about(self):
        return {"version": "1", "notes": []}

    def generate(self, prompts, new_tokens, versions=1):
        if len(prompts) == FROM_BATCH:
            with open(PID, "w") as file:
                file.write(f"{os.getpid()} ")
            time.sleep(PATIENCE_S)
        tokens = len(prompts) * new_tokens
        return {"seconds": float(new_tokens), "tokens": tokens, "logprobs": tokens}


def load(**settings):
    return Stub()
"""
BENCH = """
import pathlib, sys
from dora_rl import cli
from dora_rl.benchmarks.contestants import roster
from tests.benchmarks import stubs

folder = pathlib.Path(sys.argv[1])
roster.ours = lambda *given: stubs.start(folder, "ours", (folder / "blocking").read_text())
roster.machine = lambda threads: stubs.start(folder, "machine")
sys.exit(cli.main(["bench", *sys.argv[2:]]))
"""


@contextmanager
def started(folder: Path, *args: str) -> Iterator["subprocess.Popen[str]"]:
    """A bench in a process of its own, with a directory for its temporary files."""
    (folder / "temporary").mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", BENCH, str(folder), *args],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TMPDIR": str(folder / "temporary")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as bench:
        try:
            yield bench
        finally:
            bench.kill()


def blocked(bench: "subprocess.Popen[str]", pid: Path) -> int:
    """The process that takes for ever."""
    deadline = time.monotonic() + PATIENCE_S
    while not (pid.exists() and pid.read_text().endswith(" ")):
        assert bench.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    return int(pid.read_text())


def engine_bench(folder: Path, from_batch: int) -> tuple[str, ...]:
    pid = folder / "pid"
    names = f"PID, FROM_BATCH, PATIENCE_S = {str(pid)!r}, {from_batch}, {PATIENCE_S}\n"
    (folder / "blocking").write_text(names + BLOCKING)
    return ("engine", "--model", "tiny", "--batches", "1,2", "--repeats", "1", "--json")


@pytest.mark.parametrize("number", SIGNALS)
def test_what_is_measured_is_shown_and_no_child_or_file_is_left(
    number: signal.Signals, tmp_path: Path
) -> None:
    with started(tmp_path, *engine_bench(tmp_path, from_batch=2)) as bench:
        child = blocked(bench, tmp_path / "pid")
        assert list((tmp_path / "temporary").iterdir()) != []
        bench.send_signal(number)
        out, err = bench.communicate(timeout=PATIENCE_S)
    assert (bench.returncode, err.splitlines()[-1]) == (130, "error: interrupted")
    report = json.loads(out)
    assert report["complete"] is False and list(report["batches"]) == ["1"]
    assert list((tmp_path / "temporary").iterdir()) == []
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_without_a_measurement_there_is_nothing_to_show(tmp_path: Path) -> None:
    with started(tmp_path, *engine_bench(tmp_path, from_batch=1)) as bench:
        child = blocked(bench, tmp_path / "pid")
        bench.send_signal(signal.SIGINT)
        out, err = bench.communicate(timeout=PATIENCE_S)
    assert (bench.returncode, out, err.splitlines()[-1]) == (130, "", "error: interrupted")
    assert list((tmp_path / "temporary").iterdir()) == []
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_a_table_that_is_incomplete_says_so(tmp_path: Path) -> None:
    args = ("orchestrator", "--instances", "4,8", "--events", "1000000000")
    with started(tmp_path, *args) as bench:
        assert bench.stderr is not None
        # Written after some events: how much of them is done would else not be known.
        assert any("% done" in line for line in bench.stderr)
        bench.send_signal(signal.SIGINT)
        out, err = bench.communicate(timeout=PATIENCE_S)
    first, head, *rows, _ = out.splitlines()
    assert (bench.returncode, first) == (130, INCOMPLETE)
    assert "events/s" in head and [row.split()[0] for row in rows] == ["4", "8"]
    assert err.splitlines()[-1] == "error: interrupted"


def test_what_was_measured_before_a_failure_is_shown_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dying = stubs.STUB.replace(
        "        tokens = ",
        "        if len(prompts) == 2: raise ValueError('two')\n        tokens = ",
    )
    monkeypatch.setattr(roster, "ours", lambda *given: stubs.start(tmp_path, "ours", dying))
    monkeypatch.setattr(roster, "machine", lambda *given: stubs.start(tmp_path, "machine"))
    assert cli.main(["bench", "engine", "--model", "tiny", "--batches", "1,2"]) == 1
    out, err = capsys.readouterr()
    assert out.splitlines()[0] == INCOMPLETE
    assert err.splitlines()[-1].endswith("ValueError: two")


def test_an_interrupted_convergence_is_written_to_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from dora_rl.benchmarks import convergence
    from dora_rl.benchmarks.convergence import Outcome

    def run(data: object, out: Path, reporter: stubs.Reporter) -> str:
        if "in_flight" in out.name:
            raise KeyboardInterrupt
        return out.name

    monkeypatch.setattr(convergence, "train_once", run)
    outcome = Outcome(0, [0.1], [0.0], 0.5, 0.0, "clean")
    monkeypatch.setattr(Outcome, "of", lambda run, seed: outcome)
    file = tmp_path / "convergence.json"
    assert cli.main(["bench", "convergence", "--out", str(file), "--json"]) == 130
    written, shown = json.loads(file.read_text()), json.loads(capsys.readouterr().out)
    assert written == shown and written["complete"] is False
    assert list(written["ways"]) == [way.label for way in convergence.WAYS[:3]]
