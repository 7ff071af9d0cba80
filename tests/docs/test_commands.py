"""What cannot be run is reported, with file and line, before anything is run."""

from pathlib import Path

import pytest

from tests.docs import commands
from tests.docs.commands import check, check_blocks, check_mentions, check_run_by_ci
from tests.docs.pages import Shown, read_page


def problems_of(text: str, *, whole: bool = True) -> list[str]:
    return check([Shown(text, "a.md", 7, whole)])


@pytest.mark.parametrize(
    "text",
    [
        "dora-rl train --steps 10 --out runs/first",
        "dora-rl train my.toml --plain > train.log",
        ".venv/bin/dora-rl train examples/quickstart.toml --set rollout.slots=128",
        "dora-rl simulate default --json | python -m json.tool",
        "DORA_RL_PORTABLE=1 dora-rl plan --help",
        "make soak SEEDS=10000",
        "HYPOTHESIS_PROFILE=search make test",
        "pip install '.[engine,train]'",
        "cd examples/custom_reward && python train.py",
    ],
)
def test_what_can_be_run_passes(text: str) -> None:
    assert problems_of(text) == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("dora-rl trian", "no such command: trian"),
        ("dora-rl bench nothing", "no such command: nothing"),
        ("dora-rl train --stepps 3", "No such option"),
        ("dora-rl train --steps many", "not a valid integer"),
        ("dora-rl audit", "incomplete: Missing argument"),
        ("dora-rl audit runs/first more", "unexpected extra argument"),
        ("dora-rl train --set rollout.slot=3", "Did you mean `rollout.slots`?"),
        ("dora-rl train --set rollout.slots=-3", "rollout.slots must be"),
        ("dora-rl train --set algorithm.preset=none", "algorithm.preset must be"),
        ("dora-rl train --set rollout.slot=…", "no such key"),
        ("dora-rl train examples/none.toml", "no such file: examples/none.toml"),
        ("dora-rl simulate nowhere", "nowhere"),
        ("dora-rl simulate default --paradigms nobody", "nobody"),
        ("dora-rl simulate default --set cluster.device_count=3", "cluster.device_count"),
        ("bin/dora-rl train", "neither on the PATH nor in .venv/bin"),
        ("make tset", "no target tset"),
        ("make soak SEDES=3", "no variable SEDES"),
        ("pip install '.[enigne]'", "no extra enigne"),
        ("python nowhere.py", "no such file: nowhere.py"),
        ("python -m nowhere", "no such module: nowhere"),
        ("cd nowhere", "no such directory: nowhere"),
        ("dora-rl audit x && docker run y", "docker is not one of"),
    ],
)
def test_what_cannot_be_run_is_reported(text: str, reason: str) -> None:
    (found,) = problems_of(text)
    assert found.startswith(f"a.md:7: {text}: ")
    assert reason in found


def test_a_directory_is_that_of_the_commands_after_it() -> None:
    follow = [Shown(text, "a.md", 7) for text in ("cd examples/custom_reward", "python train.py")]
    assert check(follow) == []
    assert "no such file" in check(follow[1:])[0]


MENTIONS = """`dora-rl`, `dora-rl audit`, `dora-rl bench`, `--trace`,
`--set orchestration.paradigm=…`,
`dora-rl[tasks]`, `make test`, `make`, `python`, `pip`, `(a / b`, `it's`, `step-N`, `-m faults`.

`dora-rl adit`, `--tarce`, `--set orchestration.paradgm=…`, `dora-rl[taks]`, `make tset`,
`dora-rl train --stepps 3`.
"""


def test_a_mention_may_be_incomplete_but_not_wrong() -> None:
    found = check_mentions(read_page("a.md", MENTIONS))
    assert [problem[:7] for problem in found] == ["a.md:5:"] * 5 + ["a.md:6:"]


def test_blocks_are_checked_by_their_language() -> None:
    page = read_page(
        "a.md",
        "```sh\ndora-rl train\nmake soak\n```\n\n"
        "```toml\n[rollout]\nslot = 3\n```\n\n"
        "```toml\nslots\n```\n\n"
        "```python\nx = 1\ny =\n```\n",
    )
    sh, toml, broken, python = check_blocks(page)
    assert sh == "a.md:3: make soak: not in RUN_BY_CI"
    assert toml.startswith("a.md:7: ") and "rollout.slot" in toml
    assert broken.startswith("a.md:12: ")
    assert python.startswith("a.md:17: ")


def test_python_keeps_the_lines_of_the_page() -> None:
    page = read_page("a.md", "\n```python\nx = 1\n```\n\n```python\ny = x\n```\n")
    assert commands.python_of(page) == "\n\nx = 1\n\n\n\ny = x\n"


def test_the_table_of_what_ci_runs_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci" / "run").write_text("make test &\nmake gone\n# make lint\n")
    (tmp_path / "Makefile").write_text("test: x\n\t$(BIN)/pytest\n\nlint:\n\truff\n")
    table = {"make test": "make test &", "make lint": "make lint", "pytest": "make test &"}
    monkeypatch.setattr(commands, "RUN_BY_CI", table)
    assert check_run_by_ci(tmp_path) == [".ci/run has no line `make lint`"]
    monkeypatch.setattr(commands, "RUN_BY_CI", {"ruff": "make test &", "make gone": "make gone"})
    assert check_run_by_ci(tmp_path) == [
        "`make test &` does not run `ruff`",
        "the Makefile has no target for `make gone`",
    ]
