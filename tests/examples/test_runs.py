"""Every example runs, and its run keeps the promises. Small sizes, on the logical clock."""

import importlib
import io
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch

from dora_rl import cli
from dora_rl.cli._training import quickstart_config
from dora_rl.runtime.prepare.plan import read_config

EXAMPLES = Path(__file__).parents[2] / "examples"
CONFIGS = sorted(EXAMPLES.rglob("*.toml"))
SMALL = (
    *("runtime.kind=inline", "rollout.slots=8", "task.reward_workers=1"),
    *("orchestration.groups_per_step=2", "orchestration.group_size=2"),
)


@pytest.fixture
def inside(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An example's directory as the working one, as its header says."""
    path: Path = EXAMPLES / request.param
    monkeypatch.chdir(path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(path)])
    before, threads = set(sys.modules), torch.get_num_threads()
    torch.set_num_threads(1)
    yield path
    torch.set_num_threads(threads)
    for name in set(sys.modules) - before:  # two examples may have modules of one name
        if str(path) in str(getattr(sys.modules[name], "__file__", None)):
            del sys.modules[name]


def train(config: str, out: Path, *overrides: str, steps: int = 2) -> dict[str, object]:
    args = ["train", config, "--steps", str(steps), "--out", str(out), "--json"]
    for override in (*SMALL, *overrides):
        args += ["--set", override]
    said, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(said), redirect_stderr(errors):
        code = cli.main(args)
    assert code == 0, errors.getvalue()
    result: dict[str, object] = json.loads(said.getvalue())
    return result


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.name)
def test_configurations_are_valid_and_say_how_to_run_them(config: Path) -> None:
    assert read_config(config).warnings() == []
    header = config.read_text().partition("[model]")[0]
    assert f"dora-rl train {config.relative_to(EXAMPLES.parent)}" in header


def test_quickstart_is_the_packaged_one() -> None:
    own = tomllib.loads((EXAMPLES / "quickstart.toml").read_text())
    assert own == tomllib.loads(quickstart_config().read_text())


@pytest.mark.parametrize("inside", ["."], indirect=True)
def test_quickstart_runs(inside: Path, tmp_path: Path) -> None:
    small = ("rollout.max_tokens=24", "task.eval_size=2")
    assert train("quickstart.toml", tmp_path / "run", *small)["ok"]


@pytest.mark.parametrize("inside", ["custom_reward"], indirect=True)
def test_the_custom_reward_is_recorded_part_by_part(inside: Path, tmp_path: Path) -> None:
    result = train("custom_reward.toml", tmp_path / "run")
    assert result["ok"] and result["steps"] == 2
    parts = [line["reward_parts"] for line in lines(tmp_path / "run" / "metrics.jsonl")]
    assert [sorted(part) for part in parts] == [["reward.right", "reward.short"]] * 2  # type: ignore[call-overload]


@pytest.mark.parametrize("inside", ["custom_reward"], indirect=True)
def test_the_custom_reward_prefers_short_right_answers(inside: Path) -> None:
    reward = importlib.import_module("short_sums").reward
    right, longer, wrong = (reward(text, "07") for text in ("02:00=07", "0" * 30 + "=07", "=08"))
    assert sum(right.values()) > sum(longer.values()) > 1
    assert sum(wrong.values()) == 0
    rows = lines(inside / "sums.jsonl")
    assert len({row["prompt"] for row in rows}) == len(rows) == 12


@pytest.mark.parametrize("inside", ["custom_reward"], indirect=True)
def test_the_python_script_trains(inside: Path, tmp_path: Path) -> None:
    script = importlib.import_module("train")
    said = io.StringIO()
    with redirect_stdout(said):
        run = script.main(1, str(tmp_path / "run"), "inline")
    assert run.ok and run.checkpoint is not None
    assert "promises kept: True" in said.getvalue()


@pytest.mark.parametrize("inside", ["multi_turn"], indirect=True)
def test_the_exam_asks_its_questions_in_order(inside: Path) -> None:
    exam = importlib.import_module("exam")
    example = exam.row(5, seed=1)
    assert example == exam.row(5, seed=1) != exam.row(6, seed=1)
    session = exam.Exam()
    assert session.reset(example) is None
    first = session.step(exam.chains.solution(example["prompt"]))
    second = session.step("no sum")
    third = session.step(exam.chains.solution(example["more"][1]))
    assert [first.observation, second.observation, third.observation] == [*example["more"], ""]
    assert [first.reward, second.reward, third.reward] == [1 / 3, 0, 1 / 3]
    assert [first.done, second.done, third.done] == [False, False, True]


@pytest.mark.parametrize("inside", ["multi_turn"], indirect=True)
def test_multi_turn_runs(inside: Path, tmp_path: Path) -> None:
    assert train("multi_turn.toml", tmp_path / "run", "rollout.max_tokens=64")["ok"]
    parts = [line["reward_parts"] for line in lines(tmp_path / "run" / "metrics.jsonl")]
    assert [list(part) for part in parts] == [["environment"]] * 2  # type: ignore[call-overload]


@pytest.mark.slow
@pytest.mark.parametrize("config", ["custom_reward", "multi_turn"])
def test_an_example_runs_from_the_root_of_the_repository(config: str, tmp_path: Path) -> None:
    """What its TOML file names lies beside it. A process, which has no test's search path."""
    out = str(tmp_path / "run")
    # As the console script: the working directory is on no search path.
    code = "import sys; from dora_rl.cli import main; sys.exit(main())"
    command = [sys.executable, "-P", "-c", code, "train", f"examples/{config}/{config}.toml"]
    for override in (*SMALL, "rollout.max_tokens=16"):
        command += ["--set", override]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [*command, "--steps", "1", "--out", out],
        cwd=EXAMPLES.parent,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert read_config(tmp_path / "run" / "config.toml").task.import_path == (f"examples/{config}",)


@pytest.mark.smollm2
@pytest.mark.parametrize("inside", ["."], indirect=True)
def test_smollm2_trains_a_step(inside: Path, tmp_path: Path) -> None:
    small = ("rollout.max_tokens=8", "rollout.slots=4", "task.eval_size=2", "train.dtype=auto")
    assert train("smollm2_reasoning_gym.toml", tmp_path / "run", *small, steps=1)["ok"]


@pytest.mark.slow
@pytest.mark.parametrize("inside", ["coding"], indirect=True)
def test_the_coding_reward_runs_what_the_model_wrote(
    inside: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a run, and on programs that are right, wrong, and clever."""
    overrides = ("task.reward_timeout_s=120", "rollout.max_tokens=16")
    result = train("coding.toml", tmp_path / "run", *overrides, steps=1)
    assert result["ok"]
    rewards = {line["reward_mean"] for line in lines(tmp_path / "run" / "metrics.jsonl")}
    assert rewards <= {n / 8 for n in range(9)}

    tests_pass = importlib.import_module("tests_pass")
    row = lines(inside / "programs.jsonl")[0]
    assert row["prompt"] == "33+02*02="
    for response, share in {
        "35:01,37:00=37": 1.0,
        "35:01,37:00=38": 0.0,
        "35:01,37:00": 0.0,
        '=0"\nprint(37); raise SystemExit\n"': 0.5,  # right for one input alone
        '"\nimport os; os._exit(0)\n"': 0.0,
        '"\nwhile True: pass\n"': 0.0,
        "```python\n=37```": 1.0,
    }.items():
        monkeypatch.setattr(tests_pass, "TIMEOUT_S", 2.0 if "while" in response else 120.0)
        assert tests_pass.reward(response, row) == share, response
