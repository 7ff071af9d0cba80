"""One process at a time goes on with a run: who is refused leaves everything as it was."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dora_rl.core.protocol.errors import UserError
from dora_rl.runtime.launchers.inline import InlineRuntime
from dora_rl.runtime.prepare.plan import Plan, plan_resume
from dora_rl.runtime.records.run_files import RunFiles
from dora_rl.store.ledger import LedgerError
from dora_rl.store.lock import RunLock
from tests.patience import PATIENCE_S
from tests.runtime.harness import PROMPTS, assert_sound
from tests.runtime.test_local import HARNESS, ROOT, driver, has_trained, wait_for
from tests.runtime.test_resume import go_on, plan_of, published, stopped


def names(run: Path) -> set[str]:
    return {path.name for path in run.iterdir()}


@pytest.fixture
def left(model: Path, tmp_path: Path) -> Path:
    out = tmp_path / "run"
    stopped(plan_of(model, out), published(1))
    return out


def refuse(plan: Plan) -> None:
    with pytest.raises(LedgerError, match=f"going on in process {os.getpid()}"), RunFiles(plan):
        pytest.fail("two at once")


def test_a_refused_resume_leaves_the_other_resume_alone(left: Path) -> None:
    winner, loser = plan_resume(left, prompts=PROMPTS), plan_resume(left, prompts=PROMPTS)
    with RunFiles(winner) as files:
        before = names(left)
        assert "exchange" in before
        refuse(loser)
        assert names(left) == before
        ending = InlineRuntime(files).run()
        files.close(ending, 1.0)
    assert ending.ok


def test_a_refused_resume_leaves_a_live_run_alone(model: Path, tmp_path: Path) -> None:
    plan = plan_of(model, tmp_path / "run")
    with RunFiles(plan) as files:
        loser = plan_resume(plan.out, prompts=PROMPTS)
        (files.exchange / "migration-0").mkdir()
        refuse(loser)
        assert (files.exchange / "migration-0").is_dir()
        assert InlineRuntime(files).run().ok


@pytest.mark.slow
def test_a_resume_from_another_process_leaves_a_run_in_processes_alone(
    model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    with driver(model, out, steps=1000) as process:
        wait_for(lambda: has_trained(out), process)
        kept = (out / "exchange").stat().st_ino
        refused = subprocess.run(
            [sys.executable, *HARNESS[1:], str(model), str(out), "resume"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert f"going on in process {process.pid}" in refused.stderr
        assert (out / "exchange").stat().st_ino == kept
        assert process.poll() is None


def test_a_new_run_that_comes_second_leaves_the_first_alone(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both found the directory empty."""
    first, second = (plan_of(model, tmp_path / "run") for _ in range(2))
    monkeypatch.setattr("dora_rl.store.rundir.check_free", lambda path: None)
    with RunFiles(first) as files:
        before = {path: path.read_bytes() for path in first.out.iterdir() if path.is_file()}
        with pytest.raises(UserError, match=r"not empty: `.*run`"), RunFiles(second):
            pytest.fail("two at once")
        assert {path: path.read_bytes() for path in before} == before
        assert files.exchange.is_dir()
        assert InlineRuntime(files).run().ok


class Released:
    """What was in the run directory whenever its lock was released."""

    def __init__(self, run: Path, patch: pytest.MonkeyPatch) -> None:
        self.found: list[set[str]] = []
        release = RunLock.release

        def note(lock: RunLock) -> None:
            self.found.append(names(run))
            release(lock)

        patch.setattr(RunLock, "release", note)


def test_nothing_is_removed_after_the_lock_is_released(
    left: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By then it may be another's."""
    released = Released(left, monkeypatch)
    with RunFiles(plan_resume(left, prompts=PROMPTS)):
        pass  # it came to nothing
    assert released.found == [names(left)]
    assert not names(left) & {"exchange"}
    assert_sound(go_on(left))
    assert released.found[-1] == names(left)
