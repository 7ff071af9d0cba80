"""Workers that cannot start: told at once, with what they died of."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime.harness import WORKERS

SMALL = ("--steps", "2", "--plain", "--set", "orchestration.groups_per_step=2")
# Only in rollout processes: the trainer has no engine.
BROKEN = """
import sys
if {workers} & set(sys.orig_argv):
    from dora_rl.engines.embedded.engine import EmbeddedEngine
    def for_model(cls, *given, **more):
        {fault}
    EmbeddedEngine.for_model = classmethod(for_model)
"""


def train(tmp_path: Path, fault: str) -> tuple[subprocess.CompletedProcess[str], str]:
    """A run whose engines have this fault, and the log of its rollout process."""
    (tmp_path / "sitecustomize.py").write_text(BROKEN.format(workers=WORKERS, fault=fault))
    done = subprocess.run(
        [sys.executable, "-m", "dora_rl", "train", *SMALL, "--out", str(tmp_path / "run")],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    return done, (tmp_path / "run/logs/rollout-0.log").read_text()


@pytest.mark.slow
def test_the_same_error_twice_ends_the_run(tmp_path: Path) -> None:
    fault = "import os; raise RuntimeError(f'this processor cannot, says {os.getpid()}')"
    done, log = train(tmp_path, fault)
    assert done.returncode == 1
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error")]
    assert "RuntimeError: this processor cannot" in error
    assert "twice in a row before it served" in error and "`dora-rl doctor`" in error
    assert log.count("(most recent call last)") == 2


@pytest.mark.slow
def test_a_fault_of_the_processor_ends_the_run_as_well(tmp_path: Path) -> None:
    fault = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
    done, _ = train(tmp_path, fault)
    assert done.returncode == 1
    assert "signal SIGILL, twice in a row before it served" in done.stderr


@pytest.mark.slow
def test_errors_that_differ_are_tried_four_times(tmp_path: Path) -> None:
    fault = (
        "from pathlib import Path; log = Path(__file__).parent / 'run/logs/rollout-0.log'; "
        "raise RuntimeError('another error' + '!' * log.read_text().count('Traceback'))"
    )
    done, log = train(tmp_path, fault)
    assert done.returncode == 1
    assert log.count("(most recent call last)") == 4 and "4 times" in done.stderr
