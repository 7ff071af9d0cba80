"""Blocks are run as they are written, and what fails is shown."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.docs import run
from tests.docs.pages import DOWNLOADS, ROOT, Page, examples, read_page
from tests.docs.run import Outcome, copy_of, repeated, run_page
from tests.patience import PATIENCE_S
from tests.tasks.processes import eventually


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A directory with an environment."""
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to(sys.executable)
    return tmp_path


def outcomes(copy: Path, text: str, limit_s: float = 600) -> list[Outcome]:
    return list(run_page(read_page("a.md", text), copy, limit_s))


def test_a_block_is_one_shell_in_the_copy(copy: Path) -> None:
    first = "mkdir new && cd new\nNAME=x\necho $NAME >'a b'"
    found = outcomes(copy, f"```sh\n{first}\n```\n\n```sh\ntest -f 'new/a b'\n```\n")
    assert [(outcome.shown.line, outcome.failure) for outcome in found] == [
        (2, ""),
        (3, ""),
        (4, ""),
        (8, ""),
    ]
    assert (copy / "new" / "a b").read_text() == "x\n"


def test_what_fails_is_shown_with_its_output_and_ends_its_block(copy: Path) -> None:
    block = "echo first\necho why >&2 && (exit 3) && true\ntouch later"
    text = f"```sh\n{block}\n```\n\n```sh\ntrue\n```\n"
    first, failed, other = outcomes(copy, text)
    assert not first.failure and not other.failure
    assert failed.shown.place == "a.md:3"
    assert failed.failure == "exit code 3\n    | first\n    | why"
    assert not (copy / "later").exists()


def test_what_hangs_is_killed(copy: Path) -> None:
    (found,) = outcomes(copy, "```sh\necho begun; sleep 3600\n```\n", limit_s=2)
    assert found.failure.startswith("not ended after 2 s")


def test_what_ci_runs_by_itself_is_left_out(copy: Path) -> None:
    assert outcomes(copy, "```sh\nmake test\ndora-rl train   # as make quickstart\n```\n") == []


def test_what_stands_by_itself_and_was_shown_is_left_out(copy: Path) -> None:
    block = "cd .\n{}dora-rl doctor\ndora-rl audit runs/first --json"
    shown = [
        read_page(f"{name}.md", f"```sh\n{block.format(path)}\n```\n")
        for name, path in [("a", ".venv/bin/"), ("b", "")]
    ]
    assert repeated(shown) == {"b.md:3"}
    (first, other) = run_page(
        read_page("c.md", "```sh\ntrue\nfalse\ntrue\n```\n"), copy, left_out={"c.md:3"}
    )
    assert [outcome.shown.line for outcome in (first, other)] == [2, 4]


def test_the_python_of_a_page_is_one_program(copy: Path) -> None:
    text = "```python\nx = 1\n```\n\n```python\nassert x == 1\nassert x == 2\n```\n"
    (found,) = outcomes(copy, text)
    assert found.failure.startswith("exit code 1") and "line 7" in found.failure
    (found,) = outcomes(copy, text.replace("x == 2", "x"))
    assert found.failure == ""


def test_the_copy_has_uncommitted_changes_and_nothing_that_is_ignored(tmp_path: Path) -> None:
    root, target = tmp_path / "root", tmp_path / "copy"
    (root / "docs").mkdir(parents=True)
    target.mkdir()
    subprocess.run(["git", "init", "--quiet", str(root)], check=True)
    (root / ".gitignore").write_text(".venv/\nruns/\n")
    for name in ("docs/new.md", ".venv/x", "runs/x", "gone"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(name)
    subprocess.run(["git", "-C", str(root), "add", "gone"], check=True)
    (root / "gone").unlink()
    copy_of(root, target)
    assert sorted(path.name for path in target.iterdir()) == [".gitignore", ".venv", "docs"]
    assert (target / "docs" / "new.md").read_text() == "docs/new.md"
    assert (target / ".venv").resolve() == root / ".venv"


@pytest.mark.parametrize(("command", "code"), [("true", 0), ("exit 3", 1)])
def test_the_exit_code_tells(
    command: str,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    page: Page = read_page("a.md", f"```sh\n{command}\n```\n")
    monkeypatch.setattr(run, "pages", lambda: [page])
    monkeypatch.setattr(run, "examples", lambda: [])
    monkeypatch.setattr(run, "copy_of", lambda root, target: target)
    assert run.main([]) == code
    said = capsys.readouterr().out
    assert f"a.md:2: {command}" in said and said.endswith(f", {code} failed\n")


STOPPED = """
from pathlib import Path
from tests.docs import run
from tests.docs.pages import read_page

pages = [read_page(f"{n}.md", f"```sh\\ntouch {n}; exec sleep 600\\n```\\n") for n in range(3)]
run.pages, run.examples = lambda: pages, lambda: []
run.copy_of = lambda root, target: Path.cwd()
run.main(["--jobs", "2"])
"""


def test_whoever_is_stopped_leaves_no_command_behind(tmp_path: Path) -> None:
    process = psutil.Popen(
        [sys.executable, "-c", STOPPED], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert eventually(lambda: len(list(tmp_path.iterdir())) == 2)
    below = process.children(recursive=True)
    assert below
    process.terminate()
    assert process.wait(PATIENCE_S) == 128 + signal.SIGTERM
    assert eventually(lambda: not any(child.is_running() for child in below))
    assert len(list(tmp_path.iterdir())) == 2, "the third was not begun"


def test_the_commands_of_examples_are_run_too() -> None:
    shown = [line for page in examples() for block in page.blocks for line in block.lines]
    for name in ("custom_reward/custom_reward", "multi_turn/multi_turn", "quickstart"):
        assert any(line.startswith(f"dora-rl train examples/{name}.toml") for line in shown)
    assert not any("cd " in command and ".toml" in command for command in shown)
    for file in DOWNLOADS:
        assert (ROOT / file).is_file()
