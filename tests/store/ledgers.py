"""What a ledger should say, kept in plain dicts; commits to make; and forks that may die."""

import os
import shutil
import signal
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dora_rl.store.ledger import (
    BatchRow,
    Changes,
    CheckpointRow,
    Ledger,
    Position,
    PrefixRow,
    SnapshotRow,
    VersionRow,
)

NAME = "ledger.sqlite"
FACTS = {"config": {"seed": 1}, "fingerprint": "f00d"}
DIED = 77  # exit code of a fork that ended itself where it was told to
State = dict[str, Any]


class Model:
    """The same promises as the ledger's, without a disk."""

    def __init__(self, facts: dict[str, Any] = FACTS) -> None:
        self.facts = facts
        self.position = Position(0, 0, 0.0)
        self.rows: dict[str, dict[Any, Any]] = {
            name: {} for name in ("batches", "versions", "checkpoints")
        }
        self.snapshot: SnapshotRow | None = None
        self.payloads: dict[int, bytes] = {}
        self.prefixes: dict[tuple[int, int], PrefixRow] = {}

    def commit(self, changes: Changes) -> None:
        self.position = changes.position
        for step in changes.dropped_checkpoints:
            self.rows["checkpoints"].pop(step, None)
        for step in changes.dropped_batches:
            self.rows["batches"].pop(step, None)
        for name, rows in self.rows.items():
            rows.update({row[0]: row for row in getattr(changes, name)})
        self.snapshot = changes.snapshot or self.snapshot
        for trajectory in changes.dropped_payloads:
            self.payloads.pop(trajectory, None)
        self.payloads.update(changes.payloads)
        for key in [key for key in self.prefixes if key[0] in changes.dropped_prefixes]:
            del self.prefixes[key]
        self.prefixes.update({row[:2]: row for row in changes.prefixes})

    def state(self) -> State:
        return {
            "facts": self.facts,
            "position": self.position,
            **{name: [rows[key] for key in sorted(rows)] for name, rows in self.rows.items()},
            "snapshot": self.snapshot,
            "payloads": sorted(self.payloads.items()),
            "prefixes": [self.prefixes[key] for key in sorted(self.prefixes)],
        }


def state_of(ledger: Ledger) -> State:
    """All that a ledger says."""
    payloads = list(ledger.payloads())
    assert all(ledger.payload(trajectory) == content for trajectory, content in payloads)
    return {
        "facts": ledger.facts,
        "position": ledger.position,
        "batches": list(ledger.batches()),
        "versions": list(ledger.versions()),
        "checkpoints": list(ledger.checkpoints()),
        "snapshot": ledger.snapshot(),
        "payloads": payloads,
        "prefixes": list(ledger.prefixes()),
    }


def nth(n: int, size: int = 300) -> Changes:
    """The n-th commit of a run, from 1: it touches every table, and drops what older ones put.

    Every second large batch stays: pages that later commits do not write again.
    """
    members = range(3 * n, 3 * n + 9)
    return Changes(
        Position(10 * n, 1000 * n, n / 8, f"{n:064x}"),
        batches=[
            BatchRow(n, "taken", bytes([n % 256]) * 40),
            BatchRow(n - 1, "trained", b"x" * 5000),
        ],
        versions=[VersionRow(n, f"{n:032x}", "published"), VersionRow(n // 2, "0" * 32, "deleted")],
        checkpoints=[CheckpointRow(n, f"step-{n}")],
        dropped_checkpoints=[n - 2],
        dropped_batches=[n - 5] if n % 2 else [],
        snapshot=SnapshotRow(10 * n, f"{n}.json", f"{n:064x}"),
        payloads={m: bytes([m % 256, n % 256]) * (size // 2) for m in members},
        dropped_payloads=set(range(3 * n - 9, 3 * n)),
        prefixes=[PrefixRow(m, n, bytes([n % 256]) * 30) for m in members],
        dropped_prefixes={3 * n, 3 * n - 5},
    )


def model_after(n: int) -> Model:
    model = Model()
    for i in range(1, n + 1):
        model.commit(nth(i))
    return model


def fork(work: Callable[[], int | None]) -> int:
    """The process id of a child that does the work and ends with what it returns as code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads that the child never needs
        pid = os.fork()
    if pid:
        return pid
    code = 99  # an exception
    try:
        code = work() or 0
    finally:
        os._exit(code)


def outcome(pid: int) -> int:
    """The exit code of a child, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def run(work: Callable[[], int | None]) -> int:
    return outcome(fork(work))


def die_at(ledger: Ledger, statement: int) -> None:
    """End the process when the ledger is about to begin its n-th statement from now."""
    seen = 0

    def count(_: str) -> None:
        nonlocal seen
        seen += 1
        if seen == statement:
            os._exit(DIED)

    ledger._db.set_trace_callback(count)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def copy_files(
    path: Path, directory: Path, other: Mapping[str, bytes] = MappingProxyType({})
) -> Path:
    """A ledger as it stands on the disk now, without what SQLite keeps in memory for it.

    `other` has contents to write instead, by the ending of the file's name.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for ending in ("", "-wal"):
        source = path.with_name(path.name + ending)
        (directory / source.name).unlink(missing_ok=True)
        if ending in other:
            (directory / source.name).write_bytes(other[ending])
        elif source.exists():
            shutil.copyfile(source, directory / source.name)
    (directory / f"{path.name}-shm").unlink(missing_ok=True)
    return directory / path.name
