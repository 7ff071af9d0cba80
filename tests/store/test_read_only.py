"""A killed run where nothing can be written: all that its -wal file holds is read, nothing made."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dora_rl.store import database
from dora_rl.store.ledger import Ledger, LedgerError
from tests.store.ledgers import FACTS, NAME, model_after, nth, run, state_of

NOBODY = 65534
COMMITS = 5


@pytest.fixture
def outside() -> Iterator[Path]:
    """A directory that every user can reach."""
    with tempfile.TemporaryDirectory(prefix="dora-rl-") as name:
        os.chmod(name, 0o755)
        yield Path(name)


@pytest.fixture
def killed(outside: Path) -> Path:
    """The ledger of a run that was killed: its last commits are in the -wal file alone."""
    path = outside / "run" / NAME
    path.parent.mkdir()

    def work() -> None:
        ledger = Ledger.create(path, FACTS)
        ledger._db.execute("PRAGMA wal_autocheckpoint=0")
        for n in range(1, COMMITS + 1):
            ledger.commit(nth(n))
            if n == 2:
                ledger._db.execute("PRAGMA wal_checkpoint")
        os._exit(0)

    assert run(work) == 0
    assert database.beside(path, "-wal").stat().st_size
    return path


def as_ordinary_user(work: Callable[[], None]) -> None:
    """In a child: the permissions of a directory mean nothing to root."""

    def drop() -> int:
        if os.getuid() == 0:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        work()
        return 0

    assert run(drop) == 0


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("shm", [True, False])
def test_a_directory_that_may_not_be_written(shm: bool, killed: Path) -> None:
    """A copy of a run has no -shm file, as often as not."""
    if not shm:
        database.beside(killed, "-shm").unlink()
    before = content(killed.parent)
    for file in killed.parent.iterdir():
        file.chmod(0o444)
    killed.parent.chmod(0o555)

    def read() -> None:
        with pytest.raises(PermissionError):
            (killed.parent / "probe").touch()
        with Ledger.read(killed) as ledger:
            assert state_of(ledger) == model_after(COMMITS).state()
            assert ledger.path == killed

    try:
        as_ordinary_user(read)
    finally:
        killed.parent.chmod(0o755)
    assert content(killed.parent) == before


READ = """
import sys
from dora_rl.store.ledger import Ledger
try:
    open(sys.argv[1] + "-shm", "w")
    sys.exit("it can be written")
except OSError:
    pass
with Ledger.read(sys.argv[1]) as ledger:
    print(ledger.position.records)
"""


def test_a_medium_that_cannot_be_written(killed: Path, outside: Path) -> None:
    database.beside(killed, "-shm").unlink()
    before = content(killed.parent)
    mounted = outside / "mounted"
    mounted.mkdir()
    script = (
        f"mount --bind {killed.parent} {mounted} && mount -o remount,bind,ro {mounted} || exit 77; "
        f'exec {sys.executable} -c "$0" {mounted / NAME}'
    )
    try:
        done = subprocess.run(
            ["unshare", "--map-root-user", "--mount", "sh", "-c", script, READ],
            capture_output=True,
            text=True,
        )
    except FileNotFoundError:
        pytest.skip("there is no unshare")
    if done.returncode == 77 or "unshare:" in done.stderr:
        pytest.skip(f"no mounts here: {done.stderr.strip()}")
    assert done.stdout.split() == [str(nth(COMMITS).position.records)], done.stderr
    assert content(killed.parent) == before


def test_what_changes_while_it_is_copied_is_copied_again(
    killed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = iter([True, False])
    copied = disturbed(killed, monkeypatch, lambda: next(changes, False))
    with database.copied(killed) as copy, Ledger.read(copy) as ledger:
        assert state_of(ledger) == model_after(COMMITS).state()
    assert len(copied) == 4


def test_what_never_stands_still_is_refused(killed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disturbed(killed, monkeypatch, lambda: True)
    with (
        pytest.raises(LedgerError, match=f"cannot read `{killed}`: it changes"),
        database.copied(killed),
    ):
        pytest.fail("of two moments")


def disturbed(path: Path, patch: pytest.MonkeyPatch, again: Callable[[], bool]) -> list[Path]:
    """A file changes after it was copied; the files that were."""
    copied: list[Path] = []
    copyfile = shutil.copyfile

    def copy(source: Path, target: Path) -> None:
        copyfile(source, target)
        copied.append(source)
        if source == path and again():
            os.utime(source, ns=(0, len(copied)))

    patch.setattr(shutil, "copyfile", copy)
    return copied


def test_no_room_for_a_copy(killed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    said = f"cannot read `{killed}`: no copy of it in `.*`, No space left on device. .* TMPDIR"
    with pytest.raises(LedgerError, match=said), database.copied(killed):
        pytest.fail("half a copy")
