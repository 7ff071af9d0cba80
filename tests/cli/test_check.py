"""`dora-rl check`: what it shows, and that it refuses what `train` would."""

import json
from pathlib import Path

import pytest

from dora_rl import cli

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_reward" / "custom_reward.toml"


def test_the_first_prompt_its_tokens_and_its_reward_are_shown(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["check", str(EXAMPLE), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = [json.loads(line) for line in (EXAMPLE.parent / "sums.jsonl").read_text().splitlines()]
    (row,) = [row for row in rows if row["prompt"] in found["prompt"]]
    assert found["response"] == row["answer"]
    assert found["reward"] == pytest.approx(sum(found["reward_parts"].values()))
    assert set(found["reward_parts"]) == {"reward.right", "reward.short"}
    assert 0 < found["prompt_tokens"] < found["context_tokens"]
    assert cli.main(["check", str(EXAMPLE)]) == 0
    shown = capsys.readouterr().out
    assert f"  | {found['prompt']}\n" in shown
    assert f"prompt {found['prompt_tokens']}, response up to 64" in shown
    assert f"{found['reward']:g} for the response {row['answer']!r}" in shown
    assert shown.endswith("ok       dora-rl train would start\n")
    assert list(tmp_path.iterdir()) == []


def test_what_train_refuses_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "unfinished.py").write_text("def reward(response): pass\n")
    assert cli.main(["check", "--set", "task.reward=unfinished:reward"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert "task.reward fails on the first prompt: reward `reward` returned no number" in said.err
