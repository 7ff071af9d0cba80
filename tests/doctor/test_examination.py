"""The examination of this machine, and of machines that lack something."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from dora_rl import extras
from dora_rl.doctor import examination
from dora_rl.doctor.examination import examine
from dora_rl.doctor.report import Finding, Report, Status
from dora_rl.engines.vllm import environment
from dora_rl.machine.fast_paths import FAST_PATHS, Trial
from dora_rl.runtime.control import memory


def quiet(line: str) -> None:
    """Nobody watches."""


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the children, which take seconds."""
    monkeypatch.setattr(
        examination, "in_child", lambda names: {n: Trial(True, "well") for n in names}
    )
    monkeypatch.setattr(examination, "python", lambda *args, **options: ("torch 2", ""))


def found(report: Report, name: str) -> Finding:
    (finding,) = [one for one in report.findings if one.name == name]
    return finding


@pytest.mark.slow
def test_this_machine(tmp_path: Path) -> None:
    told: list[str] = []
    report = examine(tmp_path, told.append, run=False)
    assert report.ok
    assert {finding.name for finding in report.findings} >= {*FAST_PATHS, "processor", "torch"}
    assert found(report, "torch").text.startswith("torch 2")
    assert told and list(tmp_path.iterdir()) == []
    for finding in report.findings:
        # Two fast paths are chosen by what is faster here: there is nothing to mend.
        nothing_to_mend = finding.name in FAST_PATHS and not FAST_PATHS[finding.name].fix
        assert finding.text
        assert finding.status is Status.OK or finding.fix or nothing_to_mend, finding


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("absent", "status"), [("torch", Status.FAILS), ("matplotlib", Status.MISSING)]
)
def test_what_is_not_installed_is_named_with_the_command(
    absent: str, status: Status, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = extras._present
    monkeypatch.setattr(extras, "_present", lambda name: name != absent and there(name))
    report = examine(tmp_path, quiet)
    (finding,) = [one for one in report.findings if absent in one.text]
    assert finding.status is status and finding.fix == f"pip install 'dora-rl[{finding.name}]'"
    assert report.ok == (status is not Status.FAILS)
    assert ("training" in {one.name for one in report.findings}) == report.ok


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("script", "status"),
    [(None, Status.MISSING), ("echo 0.11", Status.MISSING), ("echo 0.32.0", Status.OK)],
)
def test_vllm_is_looked_for_in_its_own_environment(
    script: str | None, status: Status, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    if script is not None:
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
    monkeypatch.setenv(environment.PYTHON, str(python))
    report = examine(tmp_path, quiet, run=False)
    finding = found(report, "vllm")
    assert finding.status is status and str(python) in finding.text
    assert status is Status.OK or finding.fix == "make venv-vllm"
    assert report.ok


@pytest.mark.usefixtures("quick")
def test_a_torch_that_dies_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "python", lambda *args, **options: ("", "it died of SIGILL"))
    report = examine(tmp_path, quiet, run=False)
    finding = found(report, "torch")
    assert finding.status is Status.FAILS and finding.text == "it died of SIGILL" and finding.fix
    assert not report.ok and "would fail here: torch" in report.lines()[-1]


@pytest.mark.usefixtures("quick")
def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    report = examine(tmp_path / "nowhere", quiet)
    finding = found(report, "run directory")
    assert (
        finding.status is Status.FAILS and str(tmp_path) in finding.text and "--out" in finding.fix
    )
    assert not report.ok


@pytest.mark.usefixtures("quick")
def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 20))
    report = examine(tmp_path, quiet)
    assert found(report, "run directory").status is Status.FAILS
    assert found(report, "temporary files").status is Status.FAILS


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("mb", "ok"), [(255, False), (256, True)])
def test_little_memory(mb: int, ok: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "memory_watch", lambda: Trial(True, "told"))
    monkeypatch.setattr(memory, "left", lambda: memory.Left(mb << 20, "on this machine"))
    report = examine(tmp_path, quiet)
    assert report.ok == ok and f"{mb} MB" in found(report, "memory").text


def test_a_run_that_fails_is_told_in_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examination, "_SMALL_RUN", ("--set", "model.path=no-such-model"))
    (finding,) = examination._short_run(tmp_path)
    assert finding.status is Status.FAILS and "no-such-model" in finding.text
    assert list(tmp_path.iterdir()) == []


def test_the_words_fit_and_name_the_fix() -> None:
    finding = Finding("fast paths", "amx", Status.FALLS_BACK, "words " * 60, "another processor")
    lines = Report((finding, Finding("disk", "room", Status.OK, "plenty"))).lines()
    assert all(len(line) <= 100 for line in lines)
    assert any("fix: another processor" in line for line in lines)
    assert lines[-1] == "dora-rl train works here; 1 fast paths fall back"
