"""A file that is replaced is whole after a power loss, and as it was if that fails."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dora_rl.runtime.records.sample_log import keep_up_to
from dora_rl.store.durable_files import replace_file
from dora_rl.store.rundir import RunDirectory
from dora_rl.store.snapshot_files import SnapshotFiles


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What is asked of the disk, with the name of the file."""
    made: list[tuple[str, str]] = []
    fsync, replace = os.fsync, os.replace

    def record_fsync(fd: int) -> None:
        made.append(("fsync", Path(os.readlink(f"/proc/self/fd/{fd}")).name))
        fsync(fd)

    def record_replace(source: Path, target: Path) -> None:
        made.append(("replace", target.name))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_replace)
    return made


def test_the_data_is_on_the_disk_before_the_name(
    calls: list[tuple[str, str]], tmp_path: Path
) -> None:
    """A file system may write them in any order else, and leave an empty file."""
    run = RunDirectory.create(tmp_path / "run")
    (run.path / "samples.jsonl").write_bytes(b'{"step": 1}\n{"step": 2}\n')
    run.write_config("[run]\n")
    run.write_bytes("metrics.jsonl", b"{}\n")
    keep_up_to(run, 1)
    assert (run.path / "samples.jsonl").read_bytes() == b'{"step": 1}\n'
    assert calls == [
        call
        for name in ("config.toml", "metrics.jsonl", "samples.jsonl")
        for call in (("fsync", f".{name}.partial"), ("replace", name), ("fsync", "run"))
    ]
    calls.clear()
    row = SnapshotFiles(run.path).write(7, b"{}")
    assert calls == [
        ("fsync", f".{row.name}.partial"),
        ("replace", row.name),
        ("fsync", "snapshots"),
        ("fsync", "run"),
    ]


def test_a_file_that_cannot_be_replaced_is_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    replace_file(path, [b"one\n", b"two\n"])

    def cut() -> Iterator[bytes]:
        yield b"three\n"
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        replace_file(path, cut())
    assert path.read_bytes() == b"one\ntwo\n"
    assert [file.name for file in tmp_path.iterdir()] == ["config.toml"]
