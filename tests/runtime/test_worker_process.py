"""A worker's process, and what it is said to have died of: the end of its own log."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from dora_rl.runtime.control import messages as ms
from dora_rl.runtime.launchers.local.processes import WorkerProcess
from dora_rl.runtime.launchers.local.site import Site

# Instead of a worker: prints lines to its log, and ends.
PRINTS = """
import os, sys
if "dora_rl.runtime.launchers.local.worker" in sys.orig_argv:
    for line in {lines!r}:
        os.write(2, line.encode() + b"\\n")
    os._exit(3)
"""
TEXT = "2026-01-02T03:04:05.678Z INFO dora_rl.engines role=rollout: "
JSON = '{"time": "2026-01-02T03:04:05.678Z", "message": "'


def death(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: Sequence[str]) -> str:
    """What a process is said to have died of that printed these lines."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "sitecustomize.py").write_text(PRINTS.format(lines=list(lines)))
    setup = ms.Setup(role="rollout", config={}, threads=1)
    process = WorkerProcess("the worker", setup, Site("", "", 0), tmp_path / "worker.log")
    said = process.death()
    process.end()
    assert process.failed
    return said


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], ""),
        (["Traceback", "  RuntimeError: no such device  ", ""], ": RuntimeError: no such device"),
        (["RuntimeError: early", f"{TEXT}ended"], ": RuntimeError: early"),
        ([f"{TEXT}{'x' * 3000}", f"{JSON}{'x' * 3000}"], ""),
        ([f"{TEXT}{'x' * 100_000}"], ""),
        ([f"{TEXT}{'x' * 100_000}", "RuntimeError: late"], ": RuntimeError: late"),
        (["y" * 5000], f": {'y' * 2000}"),
    ],
)
def test_the_last_line_that_is_no_log_record_is_told(
    lines: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert death(tmp_path, monkeypatch, lines) == f"the worker ended with exit code 3{words}"


def test_the_words_of_an_earlier_incarnation_are_not_told_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = death(tmp_path, monkeypatch, ["RuntimeError: no such device"])
    assert first == "the worker ended with exit code 3: RuntimeError: no such device"
    assert death(tmp_path, monkeypatch, []) == "the worker ended with exit code 3"
    log = (tmp_path / "worker.log").read_text()
    assert log == "RuntimeError: no such device\n", "it is kept"
