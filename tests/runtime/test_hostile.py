"""Rewards that misbehave, prompts that do not fit, batches that are rejected, a full disk."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dora_rl.core.commands import Fail
from dora_rl.core.events import BatchFailed, BatchRejected, PublicationFailed
from dora_rl.runtime.errors import RunFailed
from dora_rl.runtime.inline import InlineRuntime
from dora_rl.runtime.session import Session
from dora_rl.runtime.train import prepare, read_config
from dora_rl.trainer.errors import StepRejected, TrainerError
from dora_rl.trainer.trainer import Trainer
from tests.runtime.harness import (
    PROMPTS,
    REWARDS,
    assert_sound,
    children,
    records,
    run,
    settings,
)

# Rewards


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        ("raises_at_times", "`raises_at_times` raised KeyError"),
        ("hangs_at_times", "timeout after 1.0 s"),
        ("nan_at_times", "nan"),
        ("text_at_times", "very good"),
    ],
)
def test_a_reward_that_fails_costs_its_trajectory_alone(
    reward: str, said: str, model: Path, tmp_path: Path
) -> None:
    limit_s = 1.0 if reward == "hangs_at_times" else 120.0
    config = read_config(
        settings(
            model,
            tmp_path / "run",
            task={"reward": f"{REWARDS}:{reward}", "reward_timeout_s": limit_s},
            orchestration={"max_retries": 0},
            run={"steps": 3},
        )
    )
    with Session(prepare(config, prompts=PROMPTS)) as session:
        ending = InlineRuntime(session).run()
        _, audit = session.close(ending, 1.0)
        failures = session.recorder.failures
    assert ending.ok and audit.ok, (ending, audit.summary())
    assert audit.steps == 3
    assert failures == audit.failed_for
    assert 0 < failures.total() == audit.failed < audit.trained
    assert all(r.startswith("reward: ") and said in r for r in failures), failures
    assert audit.issued == audit.trained + audit.failed + audit.filtered + audit.outstanding
    failed = [
        command.trajectory
        for record in records(tmp_path / "run")
        for command in record.commands
        if isinstance(command, Fail)
    ]
    assert len(failed) == len(set(failed)) == audit.failed


def test_a_reward_that_always_fails_trains_nothing(model: Path, tmp_path: Path) -> None:
    ended = run(
        model,
        tmp_path / "run",
        task={"reward": f"{REWARDS}:always_raises", "epochs": 1},
        orchestration={"max_retries": 1},
    )
    assert not ended.steps
    assert "failed" in ended.ending.reason
    assert ended.audit.ok
    assert ended.audit.failed == ended.audit.issued == len(PROMPTS) * 2


@pytest.mark.parametrize("fault", ["reward", "prompt"])
def test_an_endless_stream_of_failures_ends(fault: str, model: Path, tmp_path: Path) -> None:
    reward = "always_raises" if fault == "reward" else "vowels"
    prompts = PROMPTS if fault == "reward" else [{"prompt": "x y z " * 150}]
    ended = run(
        model,
        tmp_path / "run",
        prompts=prompts,
        task={"reward": f"{REWARDS}:{reward}"},
        orchestration={"max_retries": 0, "max_wasted_batches": 3},
    )
    assert not ended.ok and not ended.steps
    assert "6 groups in a row" in ended.ending.reason
    assert ("no such thing" if fault == "reward" else "context") in ended.ending.reason
    assert ended.audit.ok


def test_a_prompt_that_does_not_fit_fails_alone(model: Path, tmp_path: Path) -> None:
    prompts = [*PROMPTS, {"prompt": "x y z " * 150, "turns": 1}]
    ended = run(model, tmp_path / "run", prompts=prompts, task={"epochs": 1}, run={"steps": 9})
    assert_sound(ended)
    assert ended.audit.failed == 2
    assert all("context" in reason and "256" in reason for reason in ended.audit.failed_for)
    assert ended.audit.trained == len(PROMPTS) * 2


# The trainer


class Faults:
    """Makes a method of the trainer fail the first `times` calls; -1 is always."""

    def __init__(self, patch: pytest.MonkeyPatch, name: str, error: Exception, times: int) -> None:
        self.left = times
        real = getattr(Trainer, name)

        def faulty(trainer: Trainer, *args: Any, **options: Any) -> Any:
            if self.left:
                self.left -= 1
                raise error
            return real(trainer, *args, **options)

        patch.setattr(Trainer, name, faulty)


def seen(directory: Path, kind: type) -> list[Any]:
    return [record.event for record in records(directory) if isinstance(record.event, kind)]


def test_a_rejected_batch_is_recorded_and_the_run_goes_on(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Faults(monkeypatch, "train", StepRejected("the loss is no number", [0, 1]), 1)
    ended = run(model, tmp_path / "run")
    assert_sound(ended)
    assert len(ended.steps) == 4
    (rejected,) = seen(ended.directory, BatchRejected)
    assert rejected.step == 0
    assert ended.audit.failed_for == {"the loss is no number": 4}


def test_batches_that_are_always_rejected_end_the_run(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Faults(monkeypatch, "train", StepRejected("the loss is no number", [0, 1]), -1)
    ended = run(model, tmp_path / "run")
    assert not ended.ok and not ended.ending.interrupted
    assert "3 batches" in ended.ending.reason
    assert "the loss is no number" in ended.ending.reason
    assert ended.audit.ok
    assert ended.checkpoint is None


@pytest.mark.parametrize(
    ("method", "event", "error"),
    [
        ("train", BatchFailed, TrainerError("not now: `train`. Try again.")),
        ("train", BatchFailed, MemoryError("not now")),
        ("publish", PublicationFailed, OSError(28, "not now")),
    ],
)
def test_what_fails_once_is_done_again(
    method: str,
    event: type,
    error: Exception,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Faults(monkeypatch, method, error, 1)
    ended = run(model, tmp_path / "run", run={"steps": 2})
    assert_sound(ended)
    assert [("not now" in failed.reason) for failed in seen(ended.directory, event)] == [True]


@pytest.mark.parametrize(("method", "tries"), [("train", 3), ("publish", 5)])
def test_what_always_fails_ends_the_run(
    method: str, tries: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Faults(monkeypatch, method, TrainerError("broken"), -1)
    ended = run(model, tmp_path / "run")
    assert not ended.ok
    assert f"{tries} times: broken" in ended.ending.reason


def test_a_checkpoint_that_cannot_be_written_is_no_success(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Faults(monkeypatch, "begin_save", OSError(28, "No space left on device"), -1)
    with pytest.raises(RunFailed, match=r"step-1`.*No space left"):
        run(model, tmp_path / "run", run={"steps": 1})


# The disk


@pytest.fixture(params=["8k", "256k", "600k"])
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={request.param}", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a small disk")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_full_disk_is_told(small_disk: Path, model: Path) -> None:
    before = {child.pid for child in children()}
    try:
        ended = run(model, small_disk / "run", run={"steps": 20, "checkpoint_every": 1})
    except RunFailed as error:
        said = str(error)
    else:
        assert not ended.ok
        said = ended.ending.reason
    assert "No space left" in said and str(small_disk / "run") in said
    assert {child.pid for child in children()} == before
