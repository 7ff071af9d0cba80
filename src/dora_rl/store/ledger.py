"""The ledger of a run, `ledger.sqlite`: what a resume needs, as of its last commit.

A commit is one transaction, on the disk when it returns. The caller has the journal on the disk
before, so that after a crash the ledger's position says how much of the journal counts. With it
are the bytes that a resume needs; what they mean is not known here. What SQLite does not do is
done here: every row is sealed, and so is each table as a whole, so that damage is refused by name.
"""

import ctypes
import json
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet

from dora_rl.store import database, schema
from dora_rl.store.errors import NO_ENTRY, LedgerError, damaged, explained
from dora_rl.store.lock import RunLock
from dora_rl.store.schema import (
    BatchRow,
    Changes,
    CheckpointRow,
    Position,
    PrefixRow,
    Row,
    SnapshotRow,
    Stored,
    Table,
    Total,
    VersionRow,
)

__all__ = [
    "BatchRow",
    "Changes",
    "CheckpointRow",
    "Ledger",
    "LedgerError",
    "Position",
    "PrefixRow",
    "SnapshotRow",
    "VersionRow",
]

_Totals = dict[str, Total]
# One table's part of a commit: the keys that go, then the rows that come.
_Edit = tuple[Table[Any], Iterable[int], Iterable[Sequence[Any]]]


class Ledger:
    """One open ledger, for one thread at a time; made by `create`, `open` or `read`."""

    def __init__(self, path: Path, db: sqlite3.Connection, lock: RunLock | None) -> None:
        self.path = path
        self._db, self._lock = db, lock
        self._commits = 0
        self._pages_checked = False
        self.position, self._totals = self._head()
        self.facts: dict[str, Any] = self._facts()
        _OPEN.add(self)

    @classmethod
    def create(cls, path: Path, facts: Mapping[str, Any]) -> "Ledger":
        """A new ledger, to write to; `facts` is JSON data that a resume will want to know."""
        path = Path(path)
        text = _dumps(facts)
        lock = RunLock(database.lock_of(path))
        try:
            for there in (path, database.beside(path, "-wal")):
                if os.path.lexists(there):
                    raise LedgerError(f"`{there}` exists. Resume its run, or name a new directory.")
            database.make(path, text)
            return cls._locked(path, lock)
        except BaseException:
            lock.release()
            raise

    @classmethod
    def open(cls, path: Path) -> "Ledger":
        """To resume a run: checked in full, and for one process at a time."""
        path = Path(path)
        database.check_file(path)
        lock = RunLock(database.lock_of(path))
        try:
            return cls._locked(path, lock)
        except BaseException:
            lock.release()
            raise

    @classmethod
    def read(cls, path: Path) -> "Ledger":
        """The last commit as of now, beside a run or after it; to see a later one, read again.

        While it is open the run's -wal file only grows: close it soon.
        """
        path = Path(path)
        database.check_file(path)
        try:
            return cls._reading(path)
        except LedgerError as error:
            code = getattr(error.__cause__, "sqlite_errorcode", 0) & 0xFF
            if code not in NO_ENTRY or not os.access(path, os.R_OK):
                raise
        # We may not make the files that a reader shares with a writer.
        wal = database.beside(path, "-wal")
        if wal.exists() and wal.stat().st_size:
            with database.copied(path) as copy:  # open files outlast their names
                return cls._reading(path, copy=copy)
        return cls._reading(path, alone=True)  # there is no writer

    @classmethod
    def _locked(cls, path: Path, lock: RunLock) -> "Ledger":
        with database.connected(path, database.WRITE) as db:
            database.identify(path, db)
            db.execute("PRAGMA synchronous=FULL")
            db.execute("PRAGMA secure_delete=OFF")
            ledger = cls(path, db, lock)
            ledger._check()
            database.check_writable(path, db)
            return ledger

    @classmethod
    def _reading(cls, path: Path, *, alone: bool = False, copy: Path | None = None) -> "Ledger":
        mode = database.READ_ALONE if alone else database.READ
        with database.connected(path, mode, copy) as db:
            db.execute("BEGIN")  # all that is read until it is closed is of one commit
            database.identify(path, db, alone)
            return cls(path, db, None)

    def close(self) -> None:
        if self not in _OPEN:  # closed before, or by a fork, which must leave it to its parent
            return
        _OPEN.discard(self)
        self._db.close()
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> "Ledger":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Writing

    def commit(self, changes: Changes) -> None:
        """All of it, on the disk; if that fails, nothing of it happened and it may be tried again.

        One exception: if the disk fails while it makes sure of a commit that it has taken, a
        later `open` may find it.
        """
        edits: list[_Edit] = [
            (schema.BATCHES, changes.dropped_batches, changes.batches),
            (schema.VERSIONS, (), changes.versions),
            (schema.CHECKPOINTS, changes.dropped_checkpoints, changes.checkpoints),
            (schema.PAYLOADS, changes.dropped_payloads, changes.payloads.items()),
            (schema.PREFIXES, changes.dropped_prefixes, changes.prefixes),
        ]
        if changes.snapshot is not None:
            before = [row.records for row in self._rows(schema.SNAPSHOTS)]
            edits.append((schema.SNAPSHOTS, before, [changes.snapshot]))
        self._write(edits, changes.position)

    def set_facts(self, facts: Mapping[str, Any]) -> None:
        """Replace the facts, on the disk."""
        text = _dumps(facts)
        self._write([(schema.FACTS, (), [(0, text)])], self.position)
        self.facts = json.loads(text)

    def _write(self, edits: list[_Edit], position: Position) -> None:
        if self._lock is None:
            raise LedgerError(f"`{self.path}` was opened to read. Use Ledger.open to write.")
        ready = [
            (table, sorted(set(drops)), {row[: table.keys]: row for row in map(table.sealed, puts)})
            for table, drops, puts in edits
        ]
        try:
            self._db.execute("BEGIN IMMEDIATE")
            # Not what we remember: a signal may have struck between a commit and the noting of it.
            _, totals = self._head()
            for table, drops, puts in ready:
                totals[table.name] = self._edit(table, drops, puts, totals[table.name])
            database.put_head(self._db, position, totals)
            self._db.execute("COMMIT")
        except BaseException as error:
            self._undo()
            if isinstance(error, sqlite3.Error) and not isinstance(error, sqlite3.ProgrammingError):
                raise explained(self.path, error, "write") from error
            raise
        self.position, self._totals = position, totals
        self._commits += 1

    def _edit(
        self, table: Table[Any], drops: list[int], puts: Mapping[Stored, Stored], total: Total
    ) -> Total:
        for key in drops:
            for (seal,) in self._db.execute(table.seals_dropped, (key,)):
                total = total.minus(seal)
        self._db.executemany(table.drop, [(key,) for key in drops])
        for keys, row in puts.items():
            for (seal,) in self._db.execute(table.seal_replaced, keys):
                total = total.minus(seal)
            total = total.plus(row[-1])
        self._db.executemany(table.put, puts.values())
        return total

    def _undo(self) -> None:
        with suppress(sqlite3.Error, LedgerError):
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            self.position, self._totals = self._head()

    # Reading

    def batches(self, after: int = -1) -> Iterator[BatchRow]:
        """Those of the steps after this one; the first step is 0."""
        return self._rows(schema.BATCHES, None if after < 0 else after)

    def versions(self) -> Iterator[VersionRow]:
        return self._rows(schema.VERSIONS)

    def checkpoints(self) -> Iterator[CheckpointRow]:
        return self._rows(schema.CHECKPOINTS)

    def payload(self, trajectory: int) -> bytes | None:
        self._check_pages()
        found = self._get(schema.PAYLOADS, trajectory)
        return None if found is None else found.content

    def payloads(self) -> Iterator[tuple[int, bytes]]:
        return ((row.trajectory, row.content) for row in self._rows(schema.PAYLOADS))

    def prefixes(self) -> Iterator[PrefixRow]:
        return self._rows(schema.PREFIXES)

    def snapshot(self) -> SnapshotRow | None:
        """The snapshot that counts, if there is one."""
        return next(iter(list(self._rows(schema.SNAPSHOTS))), None)

    def _rows(self, table: Table[Row], after: int | None = None) -> Iterator[Row]:
        """In the order of their keys, each checked; at the end of a table, the table as a whole."""
        commits, total, last = self._commits, Total(), None
        query, values = (table.all, ()) if after is None else (table.after, (after,))
        if after is not None:
            self._check_pages()
        with database.explaining(self.path):
            for stored in self._db.execute(query, values):
                key = stored[: table.keys]
                if not table.is_whole(stored) or (last is not None and key <= last):
                    raise damaged(self.path, f"a row of {table.name} is not as it was written")
                total, last = total.plus(stored[-1]), key
                yield table.row(*stored[:-1])
                if commits != self._commits:
                    raise RuntimeError("the ledger changed while it was read")
        if after is None and total != self._totals[table.name]:
            raise damaged(self.path, f"rows of {table.name} are lost or out of date")

    def _get(self, table: Table[Row], key: int) -> Row | None:
        with database.explaining(self.path):
            stored = self._db.execute(table.get, (key,)).fetchone()
        if stored is None:
            return None
        if not table.is_whole(stored):
            raise damaged(self.path, f"a row of {table.name} is not as it was written")
        return table.row(*stored[:-1])

    def _head(self) -> tuple[Position, _Totals]:
        head = self._get(schema.HEAD, 0)
        if head is None:
            raise damaged(self.path, "its head is lost")
        totals = {name: Total(*total) for name, total in json.loads(head.totals).items()}
        return Position(*head[1:5]), totals

    def _facts(self) -> dict[str, Any]:
        (row,) = self._rows(schema.FACTS)
        return dict(json.loads(row.content))

    def _check_pages(self) -> None:
        """Once, before rows are looked up by key: a damaged page may lead past them."""
        if self._pages_checked:
            return
        with database.explaining(self.path):
            (said,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
        if said != "ok":
            raise damaged(self.path, " ".join(str(said).split()))
        self._pages_checked = True

    def _check(self) -> None:
        """Every page and every row."""
        self._check_pages()
        for table in schema.TABLES:
            for _ in self._rows(table):
                pass

    def _abandon(self) -> None:
        """In a fork: the connection is the parent's. To close it could remove a later -wal file.

        Python closes what it frees, at its end too: one reference more, and it never does.
        """
        _OPEN.discard(self)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._db))
        if self._lock is not None:
            self._lock.release()
            self._lock = None


_OPEN: WeakSet[Ledger] = WeakSet()


def _abandon_all() -> None:
    for ledger in list(_OPEN):
        ledger._abandon()


os.register_at_fork(after_in_child=_abandon_all)


def _dumps(facts: Mapping[str, Any]) -> str:
    try:
        return json.dumps(dict(facts), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise LedgerError(f"facts must be JSON data: {error}. Give plain values.") from error
