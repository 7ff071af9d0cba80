"""Files of a run, truncated or altered between two incarnations, and restored once refused."""

import json
import os
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from dora_rl.core.protocol.errors import UserError
from dora_rl.store.ledger import Ledger
from dora_rl.store.rundir import CONFIG, JOURNAL, LEDGER, TRAJECTORIES
from dora_rl.store.snapshot_files import SNAPSHOTS, SnapshotFiles

# One of these is taken, then one of its files.
_DATABASE = (LEDGER, f"{LEDGER}-wal")
_CHANGING = (CONFIG, JOURNAL, *_DATABASE)
# Without the first the whole journal is replayed; of the second not all bytes are needed.
_BESIDE = (SNAPSHOTS, TRAJECTORIES)
_LASTING = ("checkpoints", "weights")  # directories of directories, each written once

_State = tuple[int, int, int]


class DamagedFile(NamedTuple):
    """A damaged file; `backup` is a directory with its original and those of its companions."""

    path: Path
    part_of: Path
    """What a refusal may name instead: a checkpoint, a version; else the file itself."""
    lasting: bool
    backup: Path
    evidence: Path
    """The file whose change tells that the run has written since."""
    left: _State | None
    """State of that file right after the damage."""

    @property
    def current(self) -> bool:
        """Whether the run has not written since: else its files are newer than the backup."""
        return _state(self.evidence) == self.left

    def named_in(self, message: str, *, as_input: bool) -> bool:
        """By its own name, or by that of what it is a part of: `step-20`, `ledger.sqlite`."""
        if self.path.name == CONFIG and not as_input:
            return False  # it was readable, and is named for the place of a setting
        # A database is one thing: the ledger is refused for what its -wal file has lost.
        names = _DATABASE if self.path.name in _DATABASE else (self.part_of.name,)
        return any(_names(self.part_of.with_name(name), message) for name in names)

    def restore(self) -> None:
        """Put the originals back."""
        for file in _with_what_belongs_to_it(self.path):
            file.unlink()
        for copy in self.backup.iterdir():
            shutil.copyfile(copy, self.path.with_name(copy.name))


class DamagedFiles:
    """The damaged files of a run; their originals are kept in `backups`."""

    def __init__(self, run: Path, backups: Path) -> None:
        self._run = run
        self._backups = backups
        self._number = 0
        self._remaining: list[DamagedFile] = []
        self._since_start: list[DamagedFile] = []  # of the last incarnation

    @property
    def remaining(self) -> list[DamagedFile]:
        """Those that the run has not replaced by newer ones."""
        self._remaining = [file for file in self._remaining if file.current]
        return self._remaining

    @property
    def possible(self) -> bool:
        """Whether there is a file left to damage."""
        return bool(self._files())

    def damage_one(self, rng: random.Random) -> str | None:
        """Truncate or alter a file that no process uses; what was done, or None without a file."""
        files = self._files()
        if not files:
            return None
        kind = rng.choice(sorted(files))
        path = rng.choice(files[kind])
        backup = self._backups / str(self._number)
        backup.mkdir(parents=True)
        self._number += 1
        for file in _with_what_belongs_to_it(path):
            shutil.copyfile(file, backup / file.name)
        done = _damage(path, rng, self._first_byte(path))
        inside = path.relative_to(self._run)
        part_of = self._run.joinpath(*inside.parts[:2])
        # SQLite tidies up when a ledger is closed, also one that is refused then; but before a
        # commit the journal is appended to, and a run that is resumed has cut it before.
        changing = path.name in _DATABASE or kind in _BESIDE
        evidence = self._run / JOURNAL if changing else path
        damaged = DamagedFile(path, part_of, kind in _LASTING, backup, evidence, _state(evidence))
        self._remaining.append(damaged)
        self._since_start.append(damaged)
        return f"{inside} {done}"

    def _files(self) -> dict[str, list[Path]]:
        """By kind, those that may be damaged; a kind without any is left out."""
        # A backup of what changes is valid only until the run writes again: one at a time.
        one = any(not file.lasting for file in self.remaining)
        found = {} if one else {name: [self._run / name] for name in _CHANGING}
        for name in _LASTING if one else (*_LASTING, *_BESIDE):
            found[name] = sorted(_below(self._run / name))
        taken = {file.path for file in self._remaining}
        usable = {
            kind: [path for path in paths if path not in taken and _size(path)]
            for kind, paths in found.items()
        }
        usable[JOURNAL] = [
            path for path in usable.get(JOURNAL, []) if _size(path) > self._first_byte(path)
        ]
        return {kind: paths for kind, paths in usable.items() if paths}

    def _first_byte(self, path: Path) -> int:
        """Where a resume begins to read: damage before it shows only in an audit of the whole."""
        if path.name != JOURNAL:
            return 0
        try:
            with Ledger.read(self._run / LEDGER) as ledger:
                row = ledger.snapshot()
            if row is None:
                return 0
            content = json.loads(SnapshotFiles(self._run).read(row))
        except UserError:  # a damaged one: then it reads all of it
            return 0
        return int(content["position"][1])

    def incarnation_started(self) -> None:
        """A driver was started: from now on it can name what is damaged by now."""
        self._since_start = []

    def survived(self) -> None:
        """The run trained in spite of them: what it has written since is newer than the backups."""
        self._remaining = [file for file in self.remaining if file.lasting]

    def restore_named(self, message: str, *, as_input: bool = True) -> list[Path]:
        """Restore what the last incarnation refused by name; `as_input` if it did so at once."""
        known = [file for file in self.remaining if file not in self._since_start]
        named = [file for file in known if file.named_in(message, as_input=as_input)]
        for file in named:
            file.restore()
            self._remaining.remove(file)
        return [file.path for file in named]


def _names(path: Path, message: str) -> bool:
    """Whether the message has this name as a whole, alone or behind that of its directory.

    `step-20` is not `step-200`, and a version is not the trainer's state of the same number, which
    is in a checkpoint.
    """
    before = rf"(?:(?<![\w./-])|(?<![\w.-]){re.escape(path.parent.name)}/)"
    return re.search(rf"{before}{re.escape(path.name)}(?![\w-]|\.\w)", message) is not None


def _below(directory: Path) -> Iterator[Path]:
    """Its files; hidden is what is being written or deleted. It may change meanwhile."""
    for place, directories, names in os.walk(directory):
        directories[:] = [name for name in directories if not name.startswith(".")]
        yield from (Path(place, name) for name in names if not name.startswith("."))


def _size(path: Path) -> int:
    state = _state(path)
    return 0 if state is None else state[1]


def _state(path: Path) -> _State | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _with_what_belongs_to_it(path: Path) -> list[Path]:
    """A database has other files beside it; each is nothing without the others."""
    if path.name.startswith(LEDGER):
        return sorted(path.parent.glob(f"{LEDGER}*"))
    return [path]


def _damage(path: Path, rng: random.Random, first: int) -> str:
    """From byte `first` on."""
    size = path.stat().st_size
    at = rng.randrange(first, size)
    with open(path, "r+b") as file:
        if rng.random() < 0.5:
            file.truncate(at)
            return f"cut to {at} of {size} bytes"
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1 << rng.randrange(8)]))
        return f"altered in byte {at} of {size}"
