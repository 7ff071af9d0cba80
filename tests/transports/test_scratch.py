"""Directories of a node: removed by their process, or by who comes after it was killed."""

import multiprocessing
import os
import signal
import stat
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from dora_rl.transports.objects.scratch import Scratch
from tests.patience import PATIENCE_S


def hold(parent: str, line: Connection) -> None:
    scratch = Scratch(Path(parent))
    (scratch.path / "copy").write_bytes(b"weights")
    line.send(str(scratch.path))
    line.recv()


def test_one_that_is_closed_leaves_nothing(tmp_path: Path) -> None:
    scratch = Scratch(tmp_path / "all")
    assert stat.S_IMODE(scratch.path.stat().st_mode) == 0o700
    (scratch.path / "deep").mkdir()
    (scratch.path / "deep" / "copy").write_bytes(b"weights")
    scratch.close()
    scratch.close()
    assert [path.name for path in (tmp_path / "all").iterdir()] == [".lock"]


def test_what_a_killed_process_left_is_swept_and_that_of_a_live_one_stays(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=hold, args=(str(tmp_path), theirs), daemon=True)
    process.start()
    assert ours.poll(PATIENCE_S)
    left = Path(ours.recv())
    beside = Scratch(tmp_path)
    assert (left / "copy").exists() and beside.path.exists()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(PATIENCE_S)
    Scratch(tmp_path).close()
    assert not left.exists() and beside.path.exists()
    beside.close()


def test_a_directory_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    with pytest.raises(PermissionError, match=r"is another user's. Set TMPDIR"):
        Scratch(tmp_path)
