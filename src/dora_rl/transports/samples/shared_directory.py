"""Samples in a directory of one machine: append-only files of records, one writer for each.

    trajectories/INSTANCE-INCARNATION-NUMBER     records, one after the other

A rollout worker appends to its own file and begins another when that is full. The driver keeps
count of the records that are still needed; a file without any is deleted once its writer has
begun another. A crash of anyone leaves records that nobody refers to: a resume deletes them.
"""

import logging
import os
import re
from collections import Counter
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from dora_rl.samples import RecordRef
from dora_rl.transports.errors import RecordLost

# What is kept for the sake of one record, at most; and a deletion for every so many bytes.
FILE_BYTES = 16 << 20
_NAME = re.compile(r"\d+-\d+-\d+")

_log = logging.getLogger(__name__)


class _RecordFile(NamedTuple):
    """Ordered by age among those of one instance."""

    instance: int
    incarnation: int
    number: int

    @property
    def name(self) -> str:
        return f"{self.instance}-{self.incarnation}-{self.number}"


def _file_of(ref: RecordRef) -> _RecordFile:
    return _RecordFile(ref.instance, ref.incarnation, ref.file)


def _checksum(record: bytes) -> int:
    return int.from_bytes(blake2b(record, digest_size=8).digest(), "big", signed=True)


class SampleWriter:
    """Appends the records of one incarnation of an instance."""

    def __init__(
        self, root: Path, instance: int, incarnation: int, *, file_bytes: int | None = None
    ) -> None:
        self._root = root
        self._writer = instance, incarnation
        self._file_bytes = FILE_BYTES if file_bytes is None else file_bytes
        self._begun = 0  # files
        self._fd: int | None = None
        self._end = 0

    def put(self, record: bytes) -> RecordRef:
        if self._fd is None or self._end >= self._file_bytes:
            self._begin_file()
        assert self._fd is not None
        offset, left = self._end, memoryview(record)
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError:
            self.close()  # a part of it may be there: the next record begins another file
            raise
        self._end += len(record)
        return RecordRef(*self._writer, self._begun - 1, offset, len(record), _checksum(record))

    def _begin_file(self) -> None:
        """A file that is there already has another writer, which must not be written over."""
        self.close()
        name = _RecordFile(*self._writer, self._begun).name
        self._begun += 1
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._fd, self._end = os.open(self._root / name, flags, 0o666), 0

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


class SampleReader:
    """Reads the records of all workers."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def get(self, ref: RecordRef) -> bytes:
        path = os.path.join(self._root, _file_of(ref).name)
        try:
            # Few system calls: responses are short, and the driver reads every one of them.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                record = os.pread(fd, ref.size, ref.offset)
            finally:
                os.close(fd)
        except OSError as error:
            raise RecordLost(
                f"`{path}` cannot be read, though tokens in it are needed: {error.strerror}."
            ) from error
        if len(record) != ref.size or _checksum(record) != ref.checksum:
            raise RecordLost(
                f"`{path}` is damaged: {ref.size} bytes from {ref.offset} on are not as written."
            )
        return record


class SampleStore:
    """The driver's end: which records are needed, what is on the disk, what may go.

    store.retain(ref)       # the ledger is about to name it
    store.sync()            # … and may, from here on
    store.release(ref)      # the ledger is about to forget it
    store.collect()         # it has: files that nobody needs are deleted
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._needed: Counter[_RecordFile] = Counter()
        self._unsynced: set[_RecordFile] = set()
        self._unnamed = False  # a file may be there whose name is not on the disk
        self._newest: dict[int, _RecordFile] = {}  # of each instance: it may still be written to

    def create(self) -> None:
        self._root.mkdir(exist_ok=True)
        sync_path(self._root.parent)

    def seen(self, ref: RecordRef) -> None:
        """A worker has told of a record: it is done with its earlier files."""
        file = _file_of(ref)
        newest = self._newest.get(ref.instance)
        if newest is None or file > newest:
            self._newest[ref.instance] = file
            self._needed[file] = 0
            self._unnamed = True

    def retain(self, ref: RecordRef) -> None:
        self.seen(ref)
        file = _file_of(ref)
        self._needed[file] += 1
        self._unsynced.add(file)

    def release(self, ref: RecordRef) -> None:
        file = _file_of(ref)
        self._needed[file] -= 1
        assert self._needed[file] >= 0, "released more often than retained"

    def sync(self) -> None:
        """Everything that was retained is on the disk when this returns."""
        for path in self.take_unsynced():
            sync_path(path)

    def take_unsynced(self) -> list[Path]:
        """What is to be synced so that everything that was retained is on the disk.

        From here on it counts as synced: whoever takes it sees to it.
        """
        paths = [self._root / file.name for file in self._unsynced if self._needed[file]]
        self._unsynced.clear()
        if self._unnamed:
            paths.append(self._root)
            self._unnamed = False
        return paths

    def collect(self) -> None:
        """Delete the files that are not needed and that nobody writes to any more."""
        self.delete(self.unneeded())

    def unneeded(self) -> list[_RecordFile]:
        """The files that are not needed and that nobody writes to any more."""
        return [
            file
            for file, needed in self._needed.items()
            if not needed and file < self._newest[file.instance]
        ]

    def delete(self, files: Iterable[_RecordFile]) -> None:
        """Delete files that were `unneeded`, once the ledger has forgotten them as well."""
        for file in files:
            if self._needed.get(file) == 0:
                del self._needed[file]
                self._delete(file.name)

    def sweep(self, named: Iterable[RecordRef]) -> None:
        """Nobody writes here now: delete every file without a record that is named."""
        kept = {_file_of(ref).name for ref in named}
        for path in self._root.iterdir() if self._root.is_dir() else ():
            if _NAME.fullmatch(path.name) and path.name not in kept:
                self._delete(path.name)

    def check(self, refs: Iterable[RecordRef]) -> None:
        """Refuse records that are missing or damaged."""
        reader = SampleReader(self._root)
        for ref in refs:
            reader.get(ref)

    def _delete(self, name: str) -> None:
        """What cannot be deleted costs room, and the run nothing."""
        try:
            (self._root / name).unlink(missing_ok=True)
        except OSError as error:
            _log.warning("`%s` is not needed, and stays: %s", self._root / name, error)


def sync_path(path: Path) -> None:
    """Have a file, or the names in a directory, on the disk. Any thread may."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(fd)
