"""KV through the object store of a cluster: put at the source, pulled once by the target.

It is lost with the process beside the source, as the source itself is; then the trajectory is read
again from its prefix. `scratch` is a directory of this worker on its own node.
"""

import logging
from pathlib import Path

from dora_rl.core.protocol.types import MigrationId
from dora_rl.transports.errors import ObjectStoreError
from dora_rl.transports.objects.link import ObjectLink

_log = logging.getLogger(__name__)


def key_of(migration: MigrationId) -> str:
    """Of what is lent for this migration."""
    return f"migration-{migration}"


class KvObjects:
    def __init__(self, link: ObjectLink, scratch: Path, *, timeout_s: float) -> None:
        self._link = link
        self._scratch = scratch
        self._timeout_s = timeout_s

    def put(self, migration: MigrationId, data: bytes) -> None:
        file = self._scratch / f"put-{migration}"
        try:
            file.write_bytes(data)
            self._link.lend(key_of(migration), file, self._timeout_s)
        except ObjectStoreError as error:
            raise OSError(str(error)) from error
        finally:
            file.unlink(missing_ok=True)

    def take(self, migration: MigrationId) -> bytes:
        file = self._scratch / f"take-{migration}"
        try:
            self._link.take(key_of(migration), file, self._timeout_s)
            return file.read_bytes()
        except ObjectStoreError as error:
            raise OSError(str(error)) from error
        finally:
            file.unlink(missing_ok=True)

    def discard(self, migration: MigrationId) -> None:
        try:
            self._link.discard(key_of(migration), self._timeout_s)
        except ObjectStoreError as error:  # it costs room until its source ends
            _log.warning("migration %d is not discarded: %s", migration, error)
