"""Log lines: where they go, how they look, and that nothing is said unless it is asked for."""

import io
import json
import logging
import os
import subprocess
import sys

import pytest

import dora_rl
from dora_rl import cli, logs
from dora_rl.core.protocol.errors import UserError
from dora_rl.machine import fast_paths

LOGGER = logging.getLogger("dora_rl.some.module")


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(logs.LEVEL, raising=False)
    monkeypatch.delenv(logs.FORMAT, raising=False)


def say_all() -> None:
    for level in logs.LEVELS:
        LOGGER.log(getattr(logging, level.upper()), "of level %s", level)


@pytest.mark.parametrize("level", logs.LEVELS)
def test_a_level_and_those_above_it_are_written(
    level: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with logs.to_stderr(level):
        say_all()
    lines = capsys.readouterr().err.splitlines()
    expected = logs.LEVELS[logs.LEVELS.index(level) :]
    assert [line.rpartition(" ")[2] for line in lines] == list(expected)
    assert all("dora_rl.some.module role=driver: of level" in line for line in lines)
    assert all(map(logs.is_line, lines))


def test_nothing_is_written_unless_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    say_all()
    with logs.to_stderr(None):
        say_all()
    with logs.to_stderr("debug"):
        pass
    say_all()
    assert capsys.readouterr() == ("", "")


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("kind", [io.StringIO, _Terminal])
def test_only_a_terminal_is_left_to_the_display(
    kind: type[io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    stderr, display = kind(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    with logs.to_stderr("info"):
        monkeypatch.setattr(sys, "stderr", display)
        LOGGER.info("here")
    written, other = (display, stderr) if stderr.isatty() else (stderr, display)
    assert written.getvalue().endswith(": here\n")
    assert other.getvalue() == ""


def test_processes_inside_have_the_same_level() -> None:
    with logs.to_stderr("debug"):
        assert os.environ[logs.LEVEL] == "debug"
        with logs.to_stderr("error"):
            assert os.environ[logs.LEVEL] == "error"
        assert os.environ[logs.LEVEL] == "debug"
    assert logs.LEVEL not in os.environ
    assert logging.getLogger("dora_rl").level == logging.NOTSET


def test_the_package_leaves_logging_to_its_user() -> None:
    code = (
        "import logging, dora_rl; logging.getLogger('dora_rl.x').error('unheard');"
        "logging.basicConfig(format='%(message)s'); logging.getLogger('dora_rl.x').error('heard')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr == "heard\n"
    handlers = logging.getLogger("dora_rl").handlers
    assert any(isinstance(handler, logging.NullHandler) for handler in handlers)
    assert dora_rl.__version__


@pytest.mark.parametrize("said", ["two\nlines", "\x1b[31mred", 'a "quote"', "\u2028"])
def test_a_record_is_one_line_whatever_is_said(
    said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with logs.to_stderr("info"):
        LOGGER.info("%s", said)
    monkeypatch.setenv(logs.FORMAT, "json")
    with logs.to_stderr("info"):
        LOGGER.info("%s", said)
    text, line = capsys.readouterr().err.splitlines()
    assert text.isprintable()
    assert json.loads(line)["message"] == said


def test_json_lines_have_the_fields(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(logs.FORMAT, "json")
    with logs.to_stderr("info"):
        try:
            raise ValueError("why")
        except ValueError:
            LOGGER.exception("it failed")
    line = capsys.readouterr().err
    assert logs.is_line(line)
    found = json.loads(line)
    assert found.pop("exception").endswith("ValueError: why")
    assert found.pop("time").endswith("Z")
    assert found == {
        "level": "error",
        "logger": "dora_rl.some.module",
        "role": "driver",
        "message": "it failed",
    }


@pytest.mark.parametrize("format_", logs.FORMATS)
def test_a_worker_names_itself_in_every_line(format_: str) -> None:
    code = (
        "import logging; from dora_rl import logs; logs.start_worker('rollout', 3, 2);"
        "log = logging.getLogger('dora_rl.x'); log.info('nothing'); log.warning('it is so')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, logs.FORMAT: format_},
        capture_output=True,
        text=True,
    )
    (line,) = done.stderr.splitlines()  # info is not asked for
    if format_ == "json":
        found = json.loads(line)
        assert (found["role"], found["instance"], found["incarnation"]) == ("rollout", 3, 2)
    else:
        assert line.endswith("dora_rl.x role=rollout instance=3 incarnation=2: it is so")


@pytest.mark.parametrize(
    "line", ["RuntimeError: no", "", "2026-11-17 it is late", '{"kind": "step"}', "INFO dora_rl"]
)
def test_what_code_prints_is_no_log_line(line: str) -> None:
    assert not logs.is_line(line)


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (
            ["--log-level", "loud"],
            {},
            "--log-level must be one of debug, info, warning, error: `loud`.",
        ),
        (
            [],
            {logs.LEVEL: "loud"},
            "DORA_RL_LOG must be one of debug, info, warning, error: `loud`.",
        ),
        ([], {logs.FORMAT: "xml"}, "DORA_RL_LOG_FORMAT must be one of text, json: `xml`."),
    ],
)
@pytest.mark.parametrize("command", ["train", "check", "chaos", "bench versions"])
def test_a_bad_level_or_format_is_refused(
    command: str,
    arguments: list[str],
    environment: dict[str, str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cli.main([*command.split(), *arguments]) == 2
    assert capsys.readouterr() == ("", f"error: {message}\n")


def test_levels_may_be_written_in_capitals() -> None:
    assert logs.check_level("DEBUG") == "debug"
    with pytest.raises(UserError):
        logs.check_level("")


def test_a_fast_path_that_fell_back_is_told_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(fast_paths.PORTABLE, "1")

    @fast_paths.fast_path("landlock")
    def guard() -> tuple[str, int]:
        raise AssertionError("switched off")

    @fast_paths.fast_path("fork")
    def fast() -> tuple[str, int]:
        raise AssertionError("switched off")

    with logs.to_stderr("info"):
        assert [guard().in_force, guard().in_force, fast().in_force] == [False] * 3
    first, second = capsys.readouterr().err.splitlines()
    assert "WARNING" in first and "landlock is not in force: switched off by" in first
    assert "INFO" in second and fast_paths.FAST_PATHS["fork"].otherwise in second


def test_every_command_that_runs_something_has_the_option(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def has_it(*names: str) -> bool:
        assert cli.main([*names, "--help"]) == 0
        return "--log-level" in capsys.readouterr().out

    assert {name for name in cli.COMMANDS if has_it(name)} == {"train", "check", "chaos"}
    assert has_it("bench", "modes")
