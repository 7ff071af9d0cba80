"""What the ledger of a run refuses, and in which words."""

import sqlite3
from pathlib import Path

from dora_rl.core.protocol.errors import UserError

NO_ENTRY = (
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_AUTH,
)


class LedgerError(UserError):
    """A ledger that cannot be read, written or gone on with."""


def damaged(path: Path, what: str) -> LedgerError:
    return LedgerError(
        f"`{path}` is damaged: {what}. Restore it from a copy, with its -wal file if the copy "
        "has one and without if not, or start a new run."
    )


def explained(path: Path, error: sqlite3.Error, doing: str) -> LedgerError:
    """What SQLite says, as a user can act on it; `doing` is "read" or "write"."""
    number = getattr(error, "sqlite_errorcode", None)  # absent if Python itself complains
    code = None if number is None else number & 0xFF  # the rest is detail
    if code == sqlite3.SQLITE_FULL:
        what, fix = "the disk is full", "Free space on it, then resume the run"
    elif code == sqlite3.SQLITE_IOERR:
        what = f"{error} ({error.sqlite_errorname})"
        fix = "Check the disk, the quota and the limit on the size of a file, then resume the run"
    elif code in NO_ENTRY:
        what, fix = str(error), "Check the permissions of the file and of its directory"
    elif code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        what, fix = "another program holds it", "Close that program, then try again"
    elif doing == "write" and code not in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        what, fix = str(error), "Resume the run"
    else:
        return damaged(path, str(error))
    return LedgerError(f"cannot {doing} `{path}`: {what}. {fix}.")
