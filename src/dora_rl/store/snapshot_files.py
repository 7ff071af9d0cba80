"""The snapshots of a run: files of `snapshots/`, each of which counts once a ledger names it.

    row = files.write(records, data)     # on the disk, and not yet counted
    ledger.commit(Changes(position, snapshot=row))
    files.keep_only(row)                 # what it replaces may go

A crash at any point leaves the file that the last commit names. What is in them is not known here.
"""

import re
from hashlib import sha256
from pathlib import Path

from dora_rl.core.protocol.errors import UserError
from dora_rl.store.durable_files import replace_file, sync_directory
from dora_rl.store.schema import SnapshotRow

SNAPSHOTS = "snapshots"
_OURS = re.compile(r"\d{12,}\.json|\.\d{12,}\.json\.partial")  # files that are written here


class SnapshotDamaged(UserError):
    """A snapshot that is not as the ledger has it; the message is without a fix."""


class SnapshotFiles:
    def __init__(self, run: Path) -> None:
        self.directory = run / SNAPSHOTS

    def write(self, records: int, data: bytes) -> SnapshotRow:
        """A new file, durable when this returns, and the row that names it."""
        self.directory.mkdir(exist_ok=True)
        path = self.directory / f"{records:012d}.json"
        replace_file(path, [data])
        sync_directory(self.directory.parent)
        return SnapshotRow(records, path.name, sha256(data).hexdigest())

    def path(self, row: SnapshotRow) -> Path:
        return self.directory / f"{row.records:012d}.json"

    def read(self, row: SnapshotRow) -> bytes:
        """What was written; SnapshotDamaged if it is missing, cut or altered."""
        path = self.path(row)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise SnapshotDamaged(f"`{path}` cannot be read: {error.strerror}") from error
        if row.name != path.name or sha256(data).hexdigest() != row.sha256:
            raise SnapshotDamaged(f"`{path}` does not match the SHA-256 recorded in the ledger")
        return data

    def keep_only(self, row: SnapshotRow | None) -> None:
        """Remove snapshots that no ledger names: older ones, and what a killed process left."""
        if self.directory.is_dir():
            for path in self.directory.iterdir():
                if _OURS.fullmatch(path.name) and (row is None or path.name != row.name):
                    path.unlink(missing_ok=True)
