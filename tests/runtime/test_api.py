"""The Python API: a run from objects, how it is shown, and how it goes on."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dora_rl
from dora_rl import cli
from dora_rl.core.protocol.errors import UserError
from dora_rl.runtime.records.step_metrics import StepRecord
from dora_rl.store.ledger import Ledger
from dora_rl.store.rundir import LEDGER
from tests.runtime.harness import PROMPTS, assert_sound, settings

STEPS = 3


def counted() -> Callable[[str], float]:
    """A reward that has no import path."""
    return lambda response: len(response) % 5 / 4


def interrupt(record: StepRecord) -> None:
    if record.step == 1:
        os.kill(os.getpid(), signal.SIGINT)


def train(model: Path, out: Path, *, task: dict[str, Any] | None = None, **more: Any) -> Any:
    config = settings(model, out, task=task or {"reward": None}, run={"steps": STEPS})
    given = {"prompts": PROMPTS, "reward": counted(), **more}
    return dora_rl.train(str(model), config=config, **given)


def test_a_run_of_objects_goes_on_with_them(model: Path, tmp_path: Path) -> None:
    stopped = train(model, tmp_path / "run", watch=[interrupt])
    assert stopped.ending.interrupted and not stopped.ok and len(stopped.steps) == 1
    told: list[int] = []
    ended = dora_rl.resume(
        tmp_path / "run",
        prompts=PROMPTS,
        reward=counted(),
        watch=[lambda record: told.append(record.step)],
    )
    assert ended.ok and isinstance(ended, dora_rl.Run)
    assert_sound(ended)
    assert told == [2, 3] and [record.step for record in ended.steps] == [1, 2, 3]
    assert ended.steps_before == 1


@pytest.mark.parametrize("older", [False, True])
def test_whoever_resumes_it_without_its_objects_is_told_how(
    older: bool, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    train(model, out, watch=[interrupt], progress=False)
    if older:  # dora-rl did not write down what it was given
        with Ledger.open(out / LEDGER) as ledger:
            facts = {key: value for key, value in ledger.facts.items() if key != "given"}
            ledger.set_facts(facts)
    before = (out / "journal.jsonl").read_bytes()
    how = f'dora_rl.resume("{out}", prompts=…, reward=…)'
    assert cli.main(["train", "--resume", str(out)]) == 2
    said = capsys.readouterr().err
    assert "started from Python" in said and "(prompts, reward)" in said and how in said
    assert said.count("\n") == 1
    with pytest.raises(UserError) as refused:
        dora_rl.resume(out, prompts=PROMPTS)
    assert how in str(refused.value)
    assert (out / "journal.jsonl").read_bytes() == before


def test_names_are_kept_so_that_the_command_line_resumes_it(model: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    stopped = train(
        model,
        tmp_path / "run",
        prompts=rows,
        reward="tests.runtime.rewards:vowels",
        watch=[interrupt],
        progress=False,
    )
    assert stopped.ending.interrupted
    assert cli.main(["train", "--resume", str(tmp_path / "run")]) == 0


def test_progress_is_shown_on_stderr_unless_it_is_not_wanted(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(model, tmp_path / "shown")
    said = capsys.readouterr()
    assert said.out == ""
    lines = [line for line in said.err.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in lines] == ["1/3", "2/3", "3/3"]
    train(model, tmp_path / "quiet", progress=False)
    assert capsys.readouterr() == ("", "")


def test_a_run_is_printed_on_one_screen(model: Path, tmp_path: Path) -> None:
    run = train(model, tmp_path / "run", progress=False)
    for text in (str(run), repr(run)):
        lines = text.splitlines()
        assert lines[0].startswith("3 steps in ") and "3 steps trained" in lines[0]
        assert len(lines) <= 10 and max(map(len, lines)) <= 80 + len(str(tmp_path))
        rows = dict(line.split(maxsplit=1) for line in lines[1:])
        assert rows["run"] == str(run.directory)
        assert rows["checkpoint"] == str(run.checkpoint)
        assert rows["audit"].startswith("multi_version: clean")
        assert " -> " in rows["reward"]


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        (
            {"group_size": 4},
            'unknown keyword: `group_size`. Write orchestration={"group_size": 4}.',
        ),
        (
            {"group_sise": 4},
            'unknown keyword: `group_sise`. Write orchestration={"group_size": 4}.',
        ),
        ({"learning_rate": 1e-5}, 'Write train={"learning_rate": 1e-05}.'),
        ({"durable": False}, 'Write run={"durable": False}.'),
        ({"preset": "dapo"}, 'Write algorithm={"preset": "dapo"}.'),
        ({"step_s": 0.5}, 'Write runtime={"inline": {"step_s": 0.5}}.'),
        ({"rewrad": len}, "unknown keyword: `rewrad`. Write reward=…."),
        ({"options": 1}, "unknown keyword: `options`. Write "),
        ({"zzz": 1}, 'Give a key inside its section, section={"key": value}: `model`, `task`'),
        ({"rollout": 4}, 'rollout must be a section with its keys: `4`. Write rollout={"key"'),
        ({"rolout": {"slots": 4}}, "unknown key: `rolout`. Did you mean `rollout`?"),
    ],
)
def test_an_unknown_keyword_is_told_where_it_belongs(
    keywords: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as refused:
        dora_rl.train("quickstart", out=tmp_path / "run", **keywords)
    assert words in str(refused.value) and "\n" not in str(refused.value)
    assert not list(tmp_path.iterdir())
