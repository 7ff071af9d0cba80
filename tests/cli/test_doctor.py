"""`dora-rl doctor` as a user runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dora_rl.machine.fast_paths import FAST_PATHS, PORTABLE


def doctor(cwd: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dora_rl", "doctor", *arguments],
        env={**os.environ, **variables},
        cwd=cwd,
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_where_nothing_is_fast(tmp_path: Path) -> None:
    done = doctor(tmp_path, "--json", "--no-run", **{PORTABLE: "1"})
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["ok"]
    status = {finding["name"]: finding["status"] for finding in report["findings"]}
    assert {status[name] for name in FAST_PATHS} == {"falls back"}
    assert "fast paths" in done.stderr  # progress


@pytest.mark.slow
def test_the_whole_of_it(tmp_path: Path) -> None:
    done = doctor(tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "one step of the quickstart" in done.stdout
    assert "dora-rl train works here" in done.stdout.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_where_train_would_fail(tmp_path: Path) -> None:
    done = doctor(
        tmp_path, "--no-run", TMPDIR=str(tmp_path), PATH="", PYTHONPATH=without_torch(tmp_path)
    )
    assert done.returncode == 1, done.stderr
    assert "pip install 'dora-rl[engine]'" in done.stdout
    assert "dora-rl train would fail here: engine" in done.stdout.splitlines()[-1]


def without_torch(tmp_path: Path) -> str:
    """A directory whose sitecustomize hides torch from every process."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'torch':\n"
        "            raise ModuleNotFoundError(name, name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
    )
    return str(tmp_path)
