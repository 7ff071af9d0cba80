"""Publishing and deleting when the disk, the process or another process comes in between."""

import errno
import inspect
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import tests
from dora_rl.transports.weights.shared_directory import WeightStore
from dora_rl.weights import disk
from dora_rl.weights.errors import WeightsError
from tests.patience import PATIENCE_S
from tests.weights.samples import identical, weights

CALLS = {
    *("open", "read", "write", "fsync", "close", "mkdir", "rename", "unlink", "rmdir"),
    *("lstat", "fstat", "fchmod", "listdir", "scandir"),
}
SHARD = 60  # bytes a file, so that several are written


class Crash(BaseException):
    """The process is dead: from here on, no call of it reaches the disk."""


class FaultyOS:
    """The `os` module, except that the n-th call to the file system goes wrong.

    `early` fails instead of acting, `late` after acting, and `crash` is the last of all calls.
    """

    def __init__(self, fail_at: int = 0, how: str = "early", error: int = errno.ENOSPC) -> None:
        self.fail_at, self.how, self.error = fail_at, how, error
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        return self._counted(name, real) if name in CALLS else real

    def _counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            now = len(self.calls)
            dead = self.how == "crash" and 0 < self.fail_at < now
            if now != self.fail_at and not dead:
                return real(*args, **kwargs)
            if name == "close" or self.how == "late":  # the kernel closes in any case
                with suppress(FileNotFoundError):
                    result = real(*args, **kwargs)
                    if name == "open":
                        os.close(result)
                    elif name == "scandir":
                        result.close()
            if self.how == "crash":
                raise Crash
            raise OSError(self.error, os.strerror(self.error))

        return call


@contextmanager
def faulty(fail_at: int = 0, how: str = "early", error: int = errno.ENOSPC) -> Iterator[FaultyOS]:
    with pytest.MonkeyPatch.context() as patch:
        system = FaultyOS(fail_at, how, error)
        patch.setattr(disk, "os", system)
        yield system


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of files are synced here, and none has to survive a power failure."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def fresh(path: Path) -> WeightStore:
    """A store with one version and a leftover, so that a publication has to sweep."""
    store = WeightStore(path)
    store.publish(1, weights(1))
    (path / ".publishing-dead").mkdir()
    (path / ".publishing-dead" / "model.safetensors").write_bytes(b"half")
    return store


def publish(store: WeightStore) -> None:
    store.publish(2, weights(2), max_file_bytes=SHARD)


def check_sound(store: WeightStore) -> None:
    """All that is visible is whole and right."""
    assert set(store.versions()) <= {1, 2}
    for version in store.versions():
        store.verify(version)
        assert identical(store.load(version).tensors, weights(version))


def check_recovers(store: WeightStore) -> None:
    publish(store)
    assert store.versions() == [1, 2]
    check_sound(store)
    visible = [".lock", "version-00000001", "version-00000002"]
    assert sorted(os.listdir(store.root)) == visible


def count(path: Path, operation: Callable[[WeightStore], None]) -> list[str]:
    store = fresh(path)
    with faulty() as system:
        operation(store)
    return system.calls


def test_a_publication_syncs_all_it_wrote_before_the_rename(tmp_path: Path) -> None:
    calls = count(tmp_path, publish)
    opened = calls.index("mkdir")
    rename = calls.index("rename")
    assert calls.count("rename") == 1
    assert calls[opened:rename].count("fsync") == 5  # three files, the manifest, the directory
    assert "write" not in calls[rename:]
    assert "fsync" in calls[rename:]


def test_every_call_to_the_disk_is_counted(tmp_path: Path) -> None:
    """What the faults below cover: whatever else `disk` calls must be added to `CALLS`."""
    used = set(re.findall(r"\bos\.([a-z_]+)\(", inspect.getsource(disk)))
    assert used == CALLS
    assert {"write", "fsync", "rename", "mkdir"} <= set(count(tmp_path / "a", publish))
    deleting = set(count(tmp_path / "b", lambda store: store.delete(1)))
    assert {"rename", "fsync", "unlink", "rmdir"} <= deleting


ERRORS = {"full": errno.ENOSPC, "broken": errno.EIO}
FIXES = {errno.ENOSPC: "Free space", errno.EIO: "Check this disk"}


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
@pytest.mark.parametrize("how", ["early", "late"])
def test_a_publication_that_fails_anywhere_leaves_nothing(
    tmp_path: Path, how: str, error: int
) -> None:
    total = len(count(tmp_path / "count", publish))
    assert total > 30
    failed = 0
    for fail_at in range(1, total + 1):
        store = fresh(tmp_path / f"store-{fail_at}")
        with faulty(fail_at, how, error) as system:
            try:
                publish(store)
            except WeightsError as told:
                failed += 1
                assert "`" + str(store.root) in str(told)
                assert os.strerror(error) in str(told) and FIXES[error] in str(told)
                assert store.versions() == [1], (fail_at, system.calls[fail_at - 1])
            else:
                # Only closing the lock, which holds nothing, may fail in silence.
                assert system.calls[fail_at - 1] == "close"
                assert store.versions() == [1, 2]
        check_sound(store)
        check_recovers(store)
    assert failed == total - 1


def test_a_process_that_dies_anywhere_leaves_nothing_half(tmp_path: Path) -> None:
    calls = count(tmp_path / "count", publish)
    renamed = calls.index("rename") + 1
    for fail_at in range(1, len(calls) + 1):
        store = fresh(tmp_path / f"store-{fail_at}")
        with faulty(fail_at, "crash"), pytest.raises(Crash):
            publish(store)
        assert store.versions() == ([1] if fail_at <= renamed else [1, 2]), fail_at
        check_sound(store)
        check_recovers(store)


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
def test_publishing_again_changes_nothing_wherever_it_fails(tmp_path: Path, error: int) -> None:
    def again(store: WeightStore) -> None:
        store.publish(1, weights(1))

    total = len(count(tmp_path / "count", again))
    store = fresh(tmp_path / "store")
    before = (store.path(1) / "manifest.json").read_bytes()
    for fail_at in range(1, total + 1):
        with faulty(fail_at, error=error):
            try:
                again(store)
            except WeightsError as told:
                assert FIXES[error] in str(told)
        check_sound(store)
        assert (store.path(1) / "manifest.json").read_bytes() == before
    assert store.versions() == [1]
    check_recovers(store)


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
@pytest.mark.parametrize("how", ["early", "late", "crash"])
def test_a_deletion_that_fails_anywhere_leaves_nothing_half(
    tmp_path: Path, how: str, error: int
) -> None:
    total = len(count(tmp_path / "count", lambda store: store.delete(1)))
    assert total > 8
    for fail_at in range(1, total + 1):
        store = fresh(tmp_path / f"store-{fail_at}")
        publish(store)
        with faulty(fail_at, how, error) as system:
            try:
                store.delete(1)
            except Crash:
                pass
            except WeightsError as told:
                assert os.strerror(error) in str(told) and FIXES[error] in str(told)
            else:  # it was renamed in spite of the error: another process might have done it
                assert (how, system.calls[fail_at - 1]) == ("late", "rename")
                assert store.versions() == [2]
        check_sound(store)
        assert 2 in store.versions()
        store.delete(1)
        assert store.versions() == [2]
        assert sorted(os.listdir(store.root)) == [".lock", "version-00000002"]


def test_what_cannot_be_cleaned_up_stays_hidden(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    store.publish(1, weights(1))

    def broken(*_: Any) -> None:
        raise OSError(errno.EIO, "broken")

    with faulty() as system:
        vars(system).update(rename=broken, unlink=broken)
        with pytest.raises(WeightsError, match=r"cannot rename to `.*version-00000002`: broken"):
            publish(store)
    assert [name for name in os.listdir(tmp_path) if name.startswith(".publishing-")]
    assert store.versions() == [1]
    check_recovers(store)


def test_short_writes_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = WeightStore(tmp_path)
    system = FaultyOS()
    vars(system)["write"] = lambda fd, data: os.write(fd, data[:7])
    monkeypatch.setattr(disk, "os", system)
    store.publish(2, weights(2), max_file_bytes=SHARD)
    check_sound(store)


def test_a_write_that_takes_nothing_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = WeightStore(tmp_path)
    system = FaultyOS()
    vars(system)["write"] = lambda fd, data: 0
    monkeypatch.setattr(disk, "os", system)
    with pytest.raises(WeightsError, match=r"cannot write `.*model-00001.*`: no byte was taken"):
        store.publish(2, weights(2), max_file_bytes=SHARD)
    assert store.versions() == []


@contextmanager
def publisher(root: Path, kill: int = 0) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.weights.publisher", str(root), str(kill)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(tests.__file__).parent.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def ask(process: subprocess.Popen[str], version: int, seed: int) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{version} {seed}\n")
    process.stdin.flush()


def answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_of_two_processes_one_wins_and_both_agree(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    digests = [store.publish(seed, weights(seed)).digest for seed in (0, 1)]
    with publisher(tmp_path) as first, publisher(tmp_path) as second:
        assert [answer(first), answer(second)] == ["ready", "ready"]
        for version in range(2, 12):
            seeds = (0, version % 2)  # the same weights, and others, in turn
            ask(first, version, seeds[0])
            ask(second, version, seeds[1])
            answers = [answer(first), answer(second)]
            winner = store.load(version)
            assert winner.digest in (digests[seed] for seed in seeds)
            for seed, said in zip(seeds, answers, strict=True):
                if winner.digest == digests[seed]:
                    assert said == digests[seed]
                else:
                    assert said.startswith(f"refused version {version} is published with other")
            assert identical(winner.tensors, weights(digests.index(winner.digest)))
    assert store.versions() == list(range(12))
    assert not [name for name in os.listdir(tmp_path) if name.startswith((".pub", ".del"))]


def test_a_killed_process_frees_the_store(tmp_path: Path) -> None:
    store = WeightStore(tmp_path, lock_timeout_s=60.0)
    store.publish(1, weights(1))
    with publisher(tmp_path, kill=4) as process:
        assert answer(process) == "ready"
        ask(process, 2, 2)
        assert process.wait(timeout=PATIENCE_S) == -signal.SIGKILL
    assert store.versions() == [1]
    assert [name for name in os.listdir(tmp_path) if name.startswith(".publishing-")]
    check_recovers(store)
