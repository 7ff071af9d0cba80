"""KV in a directory that all instances see: one file for each migration, gone when it is read."""

import os
from contextlib import suppress
from pathlib import Path

from dora_rl.core.protocol.types import MigrationId


class KvDirectory:
    def __init__(self, root: Path) -> None:
        self._root = root

    def put(self, migration: MigrationId, data: bytes) -> None:
        file = self._file(migration)
        partial = file.with_name(f".{file.name}.partial")
        try:
            partial.write_bytes(data)
            os.replace(partial, file)
        except OSError:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            raise

    def take(self, migration: MigrationId) -> bytes:
        file = self._file(migration)
        try:
            return file.read_bytes()
        finally:
            file.unlink(missing_ok=True)

    def discard(self, migration: MigrationId) -> None:
        self._file(migration).unlink(missing_ok=True)

    def _file(self, migration: MigrationId) -> Path:
        return self._root / f"migration-{migration}"
