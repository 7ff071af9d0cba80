"""What every command shares: help, exit codes, one-line errors, a fast start."""

import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import click
import pytest

import dora_rl
from dora_rl import cli
from dora_rl.core.protocol.errors import SettingsError, UserError

Run = Callable[..., int]


@pytest.fixture
def run_as(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `dora-rl bench` with a body of the test's own."""

    def run(body: Callable[[], object], *args: str) -> int:
        module = types.ModuleType("dora_rl.cli.bench")
        command = click.command("bench")(click.option("--size", type=int)(lambda size: body()))
        module.command = command  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "dora_rl.cli.bench", module)
        return cli.main(["bench", *args])

    return run


def raiser(error: BaseException) -> Callable[[], object]:
    def body() -> object:
        raise error

    return body


def test_every_listed_command_exists_and_every_file_is_listed() -> None:
    files = {p.stem for p in Path(cli.__file__).parent.glob("*.py") if not p.stem.startswith("_")}
    assert files == {name.replace("-", "_") for name in cli.COMMANDS}


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name, "--help"]) == 0
    assert f"Usage: dora-rl {name}" in capsys.readouterr().out


def test_help_lists_the_commands_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    for name in cli.COMMANDS:
        assert f"\n  {name} " in out
    assert "\n    dora-rl simulate default\n" in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"dora-rl, version {dora_rl.__version__}\n"


def test_no_command_shows_the_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("Usage: dora-rl")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["simulat"], "no such command: `simulat`. Did you mean `simulate`?"),
        (["zzz"], f"no such command: `zzz`. Use one of: {', '.join(cli.COMMANDS)}."),
    ],
)
def test_unknown_commands(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(args) == 2
    assert capsys.readouterr().err == f"error: {message}\n"


@pytest.mark.parametrize("args", [["--size", "x"], ["--sise", "1"], ["extra"]])
def test_usage_errors_are_one_line(
    run_as: Run, args: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_as(lambda: None, *args) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.endswith(". Try dora-rl bench --help.\n")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code", "shown"),
    [
        (UserError("bad\nthing: `1`. Fix it."), 2, "error: bad thing: `1`. Fix it.\n"),
        (SettingsError("k must be >= 0: `-1`."), 2, "error: k must be >= 0: `-1`.\n"),
        (click.ClickException("broken"), 1, "error: broken\n"),
        (click.FileError("f", "gone"), 2, "error: Could not open file 'f': gone\n"),
        (PermissionError(13, "Permission denied", "x"), 2, "error: Permission denied: `x`."),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
        (click.Abort(), 130, "error: interrupted\n"),
    ],
)
def test_errors_become_one_line_and_an_exit_code(
    run_as: Run, error: BaseException, code: int, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_as(raiser(error)) == code
    captured = capsys.readouterr()
    assert captured.err.lstrip("\n").startswith(shown)
    assert captured.out == ""


def test_a_bug_is_not_hidden(run_as: Run) -> None:
    with pytest.raises(ZeroDivisionError):
        run_as(raiser(ZeroDivisionError()))
    with pytest.raises(OSError, match="no file named"):
        run_as(raiser(OSError(5, "no file named")))


def test_a_command_succeeds_or_names_its_exit_code(run_as: Run) -> None:
    assert run_as(lambda: None) == 0
    assert run_as(lambda: "a result") == 0
    assert run_as(lambda: click.get_current_context().exit(1)) == 1


def test_a_module_without_a_command_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("dora_rl.cli.bench")
    module.command = print  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "dora_rl.cli.bench", module)
    with pytest.raises(TypeError, match=r"not a click\.Command"):
        cli.main(["bench"])


def test_a_reader_that_leaves_early_gets_no_traceback() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys, dora_rl.cli as c; sys.exit(c.main(['--help']))"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    with process.stderr:
        assert process.stderr.read() == b""
    assert process.wait() == 1


def test_the_module_is_the_command() -> None:
    command = [sys.executable, "-m", "dora_rl", "audit", "nowhere"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "nowhere" in done.stderr


def test_help_starts_fast_for_it_imports_nothing_heavy() -> None:
    code = (
        "import sys, dora_rl.cli as c; code = c.main(['--help']);"
        "heavy = {'pydantic', 'rich', 'torch', 'ray', 'asyncio', 'dora_rl.simulator'};"
        "many = f'{len(sys.modules)} modules' if len(sys.modules) > 150 else '';"  # 111 of late
        "sys.exit(code or ', '.join(sorted(heavy & set(sys.modules))) or many or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
