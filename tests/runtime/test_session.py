"""The files and books of a run: what it says of itself."""

from pathlib import Path

import pytest

from dora_rl.cli._training import introduction
from dora_rl.runtime.train import execute, prepare, read_config
from dora_rl.tasks.workers import kernel
from tests.runtime.harness import PROMPTS, assert_sound, settings


def reward(response: str) -> float:
    return float(len(response))


def test_what_is_not_kept_from_rewards_is_said_once_and_logged(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    config = read_config(settings(model, out, run={"steps": 2, "checkpoint_every": 1}))
    # Not by a name: a fork has the patch as well.
    plan = prepare(config, prompts=PROMPTS, reward=lambda response: reward(response))
    monkeypatch.setattr(kernel, "confine_writes", lambda *_: False)
    assert not any(line.startswith("rewards") for line in introduction(plan))
    plan.task.score_pool().close()
    (said,) = [line for line in introduction(plan) if line.startswith("rewards")]
    assert "files outside the scratch directory" in said
    assert_sound(execute(plan))
    assert (out / "logs" / "rewards.log").read_text().splitlines() == [said.split(maxsplit=1)[1]]


def test_nothing_is_said_where_all_is_kept(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dora_rl.tasks.workers.wire.Isolation.gaps", lambda self: [])
    plan = prepare(
        read_config(settings(model, tmp_path / "run", run={"steps": 1})), prompts=PROMPTS
    )
    execute(plan)
    assert not any(line.startswith("rewards") for line in introduction(plan))
    assert not (tmp_path / "run" / "logs").exists()
