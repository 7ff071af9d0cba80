"""Files of a run, cut or altered while it is dead, and made whole again when it refuses them."""

import random
import shutil
from pathlib import Path
from typing import NamedTuple

from dora_rl.store.rundir import CONFIG, JOURNAL, LEDGER

# One of these is taken, then one of its files.
_CHANGING = (CONFIG, JOURNAL, LEDGER, f"{LEDGER}-wal")
_LASTING = ("checkpoints/*/*", "weights/*/*")  # written once


class Wound(NamedTuple):
    """A damaged file; `whole` is a directory with it as it was, and with what belongs to it."""

    path: Path
    lasting: bool
    whole: Path

    def named_in(self, words: str) -> bool:
        """By its own name, or by that of what it is a part of: `step-20`, `ledger.sqlite`."""
        name = self.path.name.removesuffix("-wal")
        return name in words or (self.lasting and self.path.parent.name in words)

    def heal(self) -> None:
        if not self.path.parent.is_dir():  # it went its way, with all of its files
            return
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
        self.open: list[Wound] = []

    def inflict(self, rng: random.Random) -> str | None:
        """Cut or alter a file; nobody may use it. Says what was done, if anything."""
        # A copy of what changes is good only until the run goes on: one at a time.
        kinds = _LASTING if any(not wound.lasting for wound in self.open) else _CHANGING + _LASTING
        kind = rng.choice(kinds)
        taken = {wound.path for wound in self.open}
        files = sorted(path for path in self._run.glob(kind) if path not in taken)
        files = [path for path in files if path.stat().st_size]
        if not files:
            return None
        path = rng.choice(files)
        whole = self._hospital / str(self._number)
        whole.mkdir(parents=True)
        self._number += 1
        for file in _with_what_belongs_to_it(path):
            shutil.copyfile(file, whole / file.name)
        self.open.append(Wound(path, kind in _LASTING, whole))
        return f"{path.relative_to(self._run)} {_damage(path, rng)}"

    def outlived(self) -> None:
        """The run goes on in spite of them: what it has written since is newer than our copies."""
        self.open = [wound for wound in self.open if wound.lasting]

    def heal_those_named(self, words: str) -> list[Path]:
        """Put back what the run has refused by name."""
        named = [wound for wound in self.open if wound.named_in(words)]
        for wound in named:
            wound.heal()
            self.open.remove(wound)
        return [wound.path for wound in named]


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
