"""A run that was killed is not resumed with other code, wherever that code lies. Real processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

# As the console script: neither the working directory nor a test's is on the search path.
DORA = [sys.executable, "-P", "-c", "import sys; from dora_rl.cli import main; sys.exit(main())"]
STEPS = 20  # enough to be killed before the last

FILES = {
    "mine.py": "from helper import SCALE\n"
    "def reward(response):\n    return SCALE * len(response)\n",
    "helper.py": "SCALE = 0.01\n",
    "rows.py": "def row(position, seed):\n    return {'prompt': f'{position % 7}+1='}\n",
    "room.py": "class Room:\n"
    "    def reset(self, example):\n        return None\n"
    "    def step(self, text):\n        return '', 0.01 * len(text), True\n",
}
CONFIG = """
[model]
path = "quickstart"
[task]
prompts = "rows:row"
reward = "mine:reward"
environment = "room:Room"
reward_workers = 1
[rollout]
slots = 4
max_tokens = 8
[orchestration]
groups_per_step = 2
group_size = 2
[runtime]
kind = "inline"
[run]
steps = {steps}
"""


def dora(*args: str, cwd: Path) -> subprocess.Popen[str]:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.Popen(
        [*DORA, *args],
        cwd=cwd,
        env=environment | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def killed_run(cwd: Path, config: Path) -> None:
    """A run in `cwd / "run"` that has trained a step or two, and was killed."""
    process = dora("train", str(config), "--out", "run", cwd=cwd)
    metrics, deadline = cwd / "run" / "metrics.jsonl", time.monotonic() + PATIENCE_S
    while not (metrics.exists() and metrics.read_text().count("\n") >= 1):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()


def resumed(cwd: Path, *args: str) -> tuple[int, str]:
    process = dora("train", "--resume", "run", *args, cwd=cwd)
    _, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, err


def write(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    (folder / "run.toml").write_text(CONFIG.format(steps=STEPS))
    return folder / "run.toml"


@pytest.mark.parametrize(
    ("place", "edits"),
    [
        (
            "",
            [
                ("reward", "mine.py", "SCALE *", "2 * SCALE *"),
                ("reward", "helper.py", "0.01", "0.02"),  # that the reward imports
            ],
        ),
        pytest.param(
            "project",
            [
                ("environment", "room.py", "0.01", "0.02"),
                ("prompts", "rows.py", "position % 7", "position % 7 if position < 99 else 0"),
            ],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["in the working directory", "beside the TOML file"],
)
@pytest.mark.slow
def test_a_killed_run_is_not_resumed_with_other_code(
    place: str, edits: list[tuple[str, str, str, str]], tmp_path: Path
) -> None:
    folder = tmp_path / place
    killed_run(tmp_path, write(folder).relative_to(tmp_path))
    for what, file, old, new in edits:
        assert old in FILES[file]
        (folder / file).write_text(FILES[file].replace(old, new))
        code, err = resumed(tmp_path)
        assert code == 2, err
        assert f"{what}: the {what} changed" in err and f"--accept-changed {what}" in err
        (folder / file).write_text(FILES[file])
    code, err = resumed(tmp_path)
    assert code == 0, err
