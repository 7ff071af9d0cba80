"""The file of a ledger: how it is found, made and opened, before anything in it is believed.

It knows SQLite and the schema, not what the rows mean.
"""

import json
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from dora_rl.store import schema
from dora_rl.store.durable_files import sync_directory
from dora_rl.store.errors import LedgerError, damaged, explained
from dora_rl.store.schema import Position, Total

_BUSY_S = 10.0  # a closing or recovering process holds the file for moments only
_COPIES = 3  # of files that changed meanwhile
READ, READ_ALONE, WRITE, MAKE = "mode=ro", "immutable=1", "mode=rw", "mode=rwc"


def beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)


def lock_of(path: Path) -> Path:
    return path.with_name(f".{path.stem}.lock")


def check_file(path: Path) -> None:
    """Before SQLite sees it, by its name alone.

    To open and close the file here would drop the locks that SQLite has on it in this process.
    """
    try:
        if path.is_dir():
            what = "is a directory"
        elif not path.exists():
            what = "does not exist"
        elif not path.is_file():
            what = "is not a file"
        elif path.stat().st_size == 0:
            what = "is empty"
        else:
            return
    except OSError as error:
        what = f"cannot be reached ({error.strerror})"
    raise LedgerError(f"`{path}` {what}. Give the ledger.sqlite of a run.")


@contextmanager
def explaining(path: Path, doing: str = "read") -> Iterator[None]:
    try:
        yield
    except sqlite3.ProgrammingError:
        raise  # closed, say: a mistake of the caller's
    except sqlite3.Error as error:
        raise explained(path, error, doing) from error
    except UnicodeDecodeError as error:  # in a message of SQLite's that quotes the file
        raise damaged(path, "it has text that is none") from error


@contextmanager
def copied(path: Path) -> Iterator[Path]:
    """The file and its -wal file where we may write, as both were at one moment.

    SQLite reads a -wal file only where it can make another file beside it.
    """
    with tempfile.TemporaryDirectory(prefix="dora-rl-") as directory:
        copy = Path(directory) / path.name
        try:
            for _ in range(_COPIES):
                before = _moment(path)
                for ending in before:
                    shutil.copyfile(beside(path, ending), beside(copy, ending))
                if _moment(path) == before:
                    break
            else:
                raise LedgerError(
                    f"cannot read `{path}`: it changes while it is copied. "
                    "Wait for the end of its run, or read it as the user who started that."
                )
        except OSError as error:
            raise LedgerError(
                f"cannot read `{path}`: no copy of it in `{directory}`, {error.strerror}. "
                "Check its permissions, and set TMPDIR to a directory with room."
            ) from error
        yield copy


def _moment(path: Path) -> dict[str, tuple[int, int, int]]:
    """What is there, by its ending, and what tells that it has changed."""
    there = [ending for ending in ("", "-wal") if beside(path, ending).exists()]
    stats = {ending: beside(path, ending).stat() for ending in there}
    return {ending: (s.st_ino, s.st_size, s.st_mtime_ns) for ending, s in stats.items()}


@contextmanager
def connected(path: Path, mode: str, copy: Path | None = None) -> Iterator[sqlite3.Connection]:
    """A connection, to a copy if there is one, that is closed if what is done here fails."""
    with explaining(path, "write" if mode == MAKE else "read"):
        db = sqlite3.connect(
            f"{(copy or path).absolute().as_uri()}?{mode}",
            uri=True,
            timeout=_BUSY_S,
            isolation_level=None,
            check_same_thread=False,
        )
        try:
            db.execute("PRAGMA cell_size_check=ON")
            db.execute("PRAGMA trusted_schema=OFF")
            yield db
        except BaseException:
            db.close()
            raise


def identify(path: Path, db: sqlite3.Connection, alone: bool = False) -> None:
    """Refuse what is no ledger, or not one that we can read; `alone` is without a -wal file."""
    try:
        (application,) = db.execute("PRAGMA application_id").fetchone()
    except sqlite3.DatabaseError as error:
        if getattr(error, "sqlite_errorcode", None) != sqlite3.SQLITE_NOTADB:
            raise
        application = None
    if application != schema.APPLICATION:
        raise LedgerError(f"`{path}` is no ledger. Give the ledger.sqlite of a run.")
    (found,) = db.execute("PRAGMA user_version").fetchone()
    if found != schema.FORMAT:
        raise LedgerError(
            f"`{path}` has the format `{found}`: this dora-rl knows format {schema.FORMAT}. "
            f"Use a dora-rl that knows format {found}, or start a new run from its checkpoint: "
            "set model.path to it."
        )
    (mode,) = db.execute("PRAGMA journal_mode").fetchone()
    tables = dict(db.execute("SELECT name, sql FROM sqlite_master"))
    if (mode != "wal" and not alone) or tables != schema.SCHEMA:
        raise damaged(path, "its tables are not those of a ledger")


def check_writable(path: Path, db: sqlite3.Connection) -> None:
    """By a write of nothing: a BEGIN alone is granted for a file that can only be read."""
    with explaining(path, "write"):
        db.execute("BEGIN IMMEDIATE")
        db.execute(f'DELETE FROM "{schema.HEAD.name}" WHERE 0')
        db.execute("ROLLBACK")


def put_head(db: sqlite3.Connection, position: Position, totals: Mapping[str, Total]) -> None:
    row = (0, *position, json.dumps(totals))
    db.execute(schema.HEAD.put, schema.HEAD.sealed(row))


def make(path: Path, facts: str) -> None:
    """The file, with no commit yet: under another name first, so that it is whole or not there."""
    partial = beside(path.with_name(f".{path.name}"), ".partial")
    row = schema.FACTS.sealed((0, facts))
    try:
        for ending in ("", "-journal", "-wal", "-shm"):
            beside(partial, ending).unlink(missing_ok=True)
        with connected(partial, MAKE) as db:
            db.execute("PRAGMA synchronous=FULL")
            db.execute("BEGIN")
            db.execute(f"PRAGMA application_id={schema.APPLICATION}")
            db.execute(f"PRAGMA user_version={schema.FORMAT}")
            for statement in schema.SCHEMA.values():
                db.execute(statement)
            db.execute(schema.FACTS.put, row)
            totals = {table.name: Total() for table in schema.TABLES}
            totals[schema.FACTS.name] = Total().plus(row[-1])
            put_head(db, Position(0, 0, 0.0), totals)
            db.execute("COMMIT")
            db.execute("PRAGMA journal_mode=WAL")
            db.close()
        os.rename(partial, path)
        sync_directory(path.parent)
    except OSError as error:
        raise LedgerError(
            f"cannot make `{path}`: {error.strerror}. Check the disk and the permissions."
        ) from error
