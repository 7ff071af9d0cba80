"""Rewards that misbehave, prompts that do not fit, batches that are rejected, a full disk."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dora_rl.core.protocol.commands import Fail
from dora_rl.core.protocol.errors import UserError
from dora_rl.core.protocol.events import (
    BatchFailed,
    BatchRejected,
    PublicationFailed,
    TrajectoryRefused,
)
from dora_rl.machine.fast_paths import on_linux
from dora_rl.runtime.errors import RunFailed
from dora_rl.runtime.execution import execute
from dora_rl.runtime.launchers.inline import InlineRuntime
from dora_rl.runtime.prepare.plan import prepare, read_config
from dora_rl.runtime.records.run_files import RunFiles
from dora_rl.sandbox.trial import sandbox
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
    with RunFiles(prepare(config, prompts=PROMPTS)) as files:
        ending = InlineRuntime(files).run()
        _, audit = files.close(ending, 1.0)
        failures = files.recorder.failures
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


@pytest.mark.skipif(not on_linux(), reason="what Linux alone can keep away")
def test_a_reward_cannot_stop_the_run_that_it_scores_for(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    hidden = sandbox().private == "hidden"
    prompts = [{**row, "run": str(out), "hidden": hidden} for row in PROMPTS]
    plan = prepare(
        read_config(
            settings(
                model,
                out,
                task={"reward": f"{REWARDS}:vandal"},
                run={"steps": 3, "checkpoint_every": 1, "commit_every_s": 0.0},
            )
        ),
        prompts=prompts,
    )
    ended = execute(plan)
    assert ended.ok and len(ended.steps) == 3, ended.ending
    assert_sound(ended)
    assert out.stat().st_mode & 0o777 == 0o700
    assert (out / "weights").stat().st_mode & 0o200
    # What the system cannot keep from it is in the run's own list.
    assert hidden != any("run directory" in gap for gap in plan.task.gaps)


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


KV = 256  # tokens: less than the prompt and a response to it may need
BEYOND_KV = {"prompt": "x y z " * 40, "turns": 1}
MADE = {"environment": f"{REWARDS}:Counting", "long_prompts": "skip"}  # not known before the run


@pytest.mark.parametrize("fault", ["reward", "prompt"])
def test_an_endless_stream_of_failures_ends(fault: str, model: Path, tmp_path: Path) -> None:
    task = {"reward": f"{REWARDS}:always_raises"} if fault == "reward" else MADE
    prompts = PROMPTS if fault == "reward" else [BEYOND_KV]
    ended = run(
        model,
        tmp_path / "run",
        prompts=prompts,
        task=task,
        rollout={"kv_budget_tokens": KV},
        orchestration={"max_retries": 0, "max_wasted_batches": 3},
    )
    assert not ended.ok and not ended.steps
    assert "6 consecutive groups failed or were filtered" in ended.ending.reason
    assert ("no such thing" if fault == "reward" else "of KV") in ended.ending.reason
    assert ended.audit.ok


def test_a_prompt_that_does_not_fit_fails_alone_and_at_once(model: Path, tmp_path: Path) -> None:
    ended = run(
        model,
        tmp_path / "run",
        prompts=[*PROMPTS, BEYOND_KV],
        task={"epochs": 1, **MADE},
        rollout={"kv_budget_tokens": KV},
        run={"steps": 9},
    )
    assert_sound(ended)
    events = [record.event for record in records(tmp_path / "run")]
    refused = [event.trajectory for event in events if isinstance(event, TrajectoryRefused)]
    assert len(refused) == len(set(refused)) == 2, "each is tried once"
    assert ended.audit.failed == 2
    assert all("of KV" in reason and f"`{KV}`" in reason for reason in ended.audit.failed_for)
    assert ended.audit.trained == len(PROMPTS) * 2


def test_a_prompt_of_an_environment_that_is_too_long_ends_the_run(
    model: Path, tmp_path: Path
) -> None:
    long = {"prompt": "x y z " * 150, "turns": 1}
    with pytest.raises(UserError, match=r"environment of prompt \d+ has a prompt of .* context"):
        run(
            model,
            tmp_path / "run",
            prompts=[*PROMPTS, long],
            task={"environment": MADE["environment"], "epochs": 1},
            run={"steps": 9},
        )


def test_a_prompt_beyond_the_context_is_never_tried(model: Path, tmp_path: Path) -> None:
    prompts = [*PROMPTS[1:], {"prompt": "x y z " * 150, "turns": 1}]
    ended = run(
        model,
        tmp_path / "run",
        prompts=prompts,
        task={"epochs": 1, "long_prompts": "skip"},
        run={"steps": 9},
    )
    assert_sound(ended)
    assert ended.audit.failed == 0
    assert ended.audit.trained == len(prompts) * 2


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
