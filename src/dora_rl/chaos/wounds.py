"""Files of a run, cut or altered while it is dead, and made whole again when it refuses them."""

import os
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from dora_rl.store.rundir import CONFIG, JOURNAL, LEDGER

# One of these is taken, then one of its files.
_DATABASE = (LEDGER, f"{LEDGER}-wal")
_CHANGING = (CONFIG, JOURNAL, *_DATABASE)
_LASTING = ("checkpoints", "weights")  # directories of directories, each written once

_State = tuple[int, int, int]


class Wound(NamedTuple):
    """A damaged file; `whole` is a directory with it as it was, and with what belongs to it."""

    path: Path
    part_of: Path
    """What a refusal may name instead: a checkpoint, a version; else the file itself."""
    lasting: bool
    whole: Path
    evidence: Path
    """The file whose change tells that the run went on."""
    left: _State | None
    """That file, as it was left."""

    @property
    def current(self) -> bool:
        """Whether the run has not gone on since: else its files are newer than our copy."""
        return _state(self.evidence) == self.left

    def named_in(self, words: str, *, as_input: bool) -> bool:
        """By its own name, or by that of what it is a part of: `step-20`, `ledger.sqlite`."""
        if self.path.name == CONFIG and not as_input:
            return False  # it was read, and is named as the place of some setting
        # A database is one thing: the ledger is refused for what its -wal file has lost.
        names = _DATABASE if self.path.name in _DATABASE else (self.part_of.name,)
        return any(_names(self.part_of.with_name(name), words) for name in names)

    def heal(self) -> None:
        for file in _with_what_belongs_to_it(self.path):
            file.unlink()
        for copy in self.whole.iterdir():
            shutil.copyfile(copy, self.path.with_name(copy.name))


class Wounds:
    """What is damaged now. Whole copies are kept in `hospital`."""

    def __init__(self, run: Path, hospital: Path) -> None:
        self._run = run
        self._hospital = hospital
        self._number = 0
        self._open: list[Wound] = []
        self._unseen: list[Wound] = []  # by the last life: they were inflicted after it began

    @property
    def open(self) -> list[Wound]:
        """Those that the run has not got over."""
        self._open = [wound for wound in self._open if wound.current]
        return self._open

    @property
    def possible(self) -> bool:
        """Whether there is a file left to damage."""
        return bool(self._files())

    def inflict(self, rng: random.Random) -> str | None:
        """Cut or alter a file; nobody may use it. Says what was done, if anything."""
        files = self._files()
        if not files:
            return None
        kind = rng.choice(sorted(files))
        path = rng.choice(files[kind])
        whole = self._hospital / str(self._number)
        whole.mkdir(parents=True)
        self._number += 1
        for file in _with_what_belongs_to_it(path):
            shutil.copyfile(file, whole / file.name)
        done = _damage(path, rng)
        inside = path.relative_to(self._run)
        part_of = self._run.joinpath(*inside.parts[:2])
        # SQLite tidies up when a ledger is closed, also one that is refused then; but before a
        # commit the journal is written, and a life that takes over replaces it.
        evidence = self._run / JOURNAL if path.name in _DATABASE else path
        wound = Wound(path, part_of, kind in _LASTING, whole, evidence, _state(evidence))
        self._open.append(wound)
        self._unseen.append(wound)
        return f"{inside} {done}"

    def _files(self) -> dict[str, list[Path]]:
        """By kind, those that may be damaged; a kind without any is left out."""
        # A copy of what changes is good only until the run goes on: one at a time.
        one = any(not wound.lasting for wound in self.open)
        found = {} if one else {name: [self._run / name] for name in _CHANGING}
        for name in _LASTING:
            found[name] = sorted(_below(self._run / name))
        taken = {wound.path for wound in self._open}
        usable = {
            kind: [path for path in paths if path not in taken and _size(path)]
            for kind, paths in found.items()
        }
        return {kind: paths for kind, paths in usable.items() if paths}

    def life_begins(self) -> None:
        """Whoever lives from now on can name what is damaged by now."""
        self._unseen = []

    def outlived(self) -> None:
        """The run goes on in spite of them: what it has written since is newer than our copies."""
        self._open = [wound for wound in self.open if wound.lasting]

    def heal_those_named(self, words: str, *, as_input: bool = True) -> list[Path]:
        """Put back what the last life has refused by name; `as_input` if it did so at once."""
        known = [wound for wound in self.open if wound not in self._unseen]
        named = [wound for wound in known if wound.named_in(words, as_input=as_input)]
        for wound in named:
            wound.heal()
            self._open.remove(wound)
        return [wound.path for wound in named]


def _names(path: Path, words: str) -> bool:
    """Whether they have this name as a whole, alone or behind that of its directory.

    `step-20` is not `step-200`, and a version is not the trainer's state of the same number, which
    is in a checkpoint.
    """
    before = rf"(?:(?<![\w./-])|(?<![\w.-]){re.escape(path.parent.name)}/)"
    return re.search(rf"{before}{re.escape(path.name)}(?![\w-]|\.\w)", words) is not None


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


def _damage(path: Path, rng: random.Random) -> str:
    size = path.stat().st_size
    at = rng.randrange(size)
    with open(path, "r+b") as file:
        if rng.random() < 0.5:
            file.truncate(at)
            return f"cut to {at} of {size} bytes"
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1 << rng.randrange(8)]))
        return f"altered in byte {at} of {size}"
