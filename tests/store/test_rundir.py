"""The run directory: nothing is overwritten, and what is missing is said in one line."""

import json
import os
from pathlib import Path

import pytest

from dora_rl.core.protocol.errors import UserError
from dora_rl.store.rundir import JournalFile, RunDirectory, check_free, find_journals


def test_a_run_writes_its_files(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "runs" / "first")
    run.write_config("[run]\nseed = 1\n")
    run.write_metrics({"steps": 3})
    with run.journal() as write:
        write("one\n")
        write("two\n")
    files = sorted(p.name for p in run.path.iterdir())
    assert files == ["config.toml", "journal.jsonl", "metrics.json"]
    assert (run.path / "config.toml").read_text() == "[run]\nseed = 1\n"
    assert json.loads((run.path / "metrics.json").read_text()) == {"steps": 3}
    assert (run.path / "journal.jsonl").read_bytes() == b"one\ntwo\n"


def test_an_empty_directory_may_be_used(tmp_path: Path) -> None:
    assert RunDirectory.create(tmp_path).path == tmp_path


@pytest.mark.parametrize("there", [False, True])
def test_other_users_are_kept_out_unless_it_is_shared(there: bool, tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        for name, shared, mode in (("own", False, 0o700), ("shared", True, 0o755)):
            path = tmp_path / "runs" / name
            if there:
                path.mkdir(parents=True)
            run = RunDirectory.create(path, shared=shared)
            assert run.path.stat().st_mode & 0o777 == mode
            assert run.section("sync").path.stat().st_mode & 0o777 == 0o755
            assert path.parent.stat().st_mode & 0o777 == 0o755
    finally:
        os.umask(before)


def test_a_directory_of_another_user_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o770)
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    RunDirectory.create(tmp_path)
    assert tmp_path.stat().st_mode & 0o777 == 0o770


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"not empty: `.*`. Name a new directory"):
        RunDirectory.create(tmp_path)
    with pytest.raises(UserError, match="not a directory"):
        RunDirectory.create(tmp_path / "notes.txt")
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_checking_writes_nothing(tmp_path: Path) -> None:
    check_free(tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_a_second_journal_is_refused(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run")
    with run.journal() as write:
        write("one\n")
    with pytest.raises(UserError, match=f"not empty: `{run.path}`"), run.journal():
        pass
    assert (run.path / "journal.jsonl").read_text() == "one\n"


def test_the_journal_is_streamed(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run")
    with run.journal() as write:
        for _ in range(3000):
            write("x" * 1023 + "\n")
        assert (run.path / "journal.jsonl").stat().st_size >= 1 << 20


def test_journals_are_found_in_order_of_name(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run")
    for name in ("sync", "multi_version"):
        with run.section(name).journal() as write:
            write(f"{name}\n")
    (run.path / "empty").mkdir()
    found = find_journals(run.path)
    assert [journal.name for journal in found] == ["multi_version", "sync"]
    assert list(found[1].lines()) == ["sync\n"]
    (alone,) = find_journals(run.path / "sync")
    assert alone == found[1]
    assert find_journals(alone.path)[0].path == alone.path


def test_lines_are_the_bytes_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b"a\r\nb\x85\xff\x0c\nc")
    journal = JournalFile("x", path)
    assert list(journal.lines()) == ["a\r\n", "b\x85\xff\x0c\n", "c"]
    assert journal.size == 9


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no such run: `.*nowhere`. Give a directory"):
        find_journals(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"no journal.jsonl in `.*`. Give the directory"):
        find_journals(tmp_path)
