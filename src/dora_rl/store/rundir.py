"""A run directory: where its files are, how they are written and found again.

    config.toml      the resolved configuration
    metrics.json     what was measured
    metrics.jsonl    the same of every train step, where there was a trainer
    samples.jsonl    some of what was written in every train step, where there was a trainer
    trace.json       a timeline for Perfetto, where there was a trainer
    journal.jsonl    every event and the commands that answered it
    ledger.sqlite    how much of the journal counts, and what a resume needs besides
    trajectories/    the tokens that a resume needs: the ledger names them record by record
    snapshots/       what the core and its observers knew after some event: a resume begins there
    checkpoints/     step-N: a Hugging Face model directory each, or a PEFT adapter's
    PARADIGM/        the same again for each paradigm, where a simulation ran several

No run writes into the directory of another. What a resume changes is cut to what the ledger counts,
or replaced as a whole. It knows files, not what stands in them.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

from dora_rl.core.history.journal import Written, closed
from dora_rl.core.protocol.errors import UserError
from dora_rl.core.protocol.types import InstanceId
from dora_rl.store.durable_files import replace_file
from dora_rl.store.ledger import Ledger

CONFIG = "config.toml"
JOURNAL = "journal.jsonl"
LEDGER = "ledger.sqlite"
METRICS = "metrics.json"
METRICS_OF_STEPS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
TRAJECTORIES = "trajectories"
WEIGHTS = "weights"
CHECKPOINTS = "checkpoints"
EXCHANGE = "exchange"
TRACE = "trace.json"
_OWN, _SHARED = 0o700, 0o777  # but for the umask
_STEP = "step-"  # begins the name of a checkpoint
_LAST_LINE = 1 << 16  # bytes: a closing line is never longer
_BUFFER = 1 << 20  # a big run writes millions of short lines


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """A directory that this run owns: made by `create`, new or empty before."""

    path: Path

    @classmethod
    def create(cls, path: str | Path, *, shared: bool = False) -> "RunDirectory":
        """Unless it is shared, other users of the machine can neither enter nor list it."""
        path = Path(path)
        check_free(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            path.mkdir(mode=_SHARED if shared else _OWN)
        except FileExistsError:
            if not shared and path.stat().st_uid == os.geteuid():
                path.chmod(_OWN)  # else its maker has settled who may enter
        return cls(path)

    def section(self, name: str) -> "RunDirectory":
        """A directory inside, for one paradigm; who may enter this one may enter it."""
        return RunDirectory.create(self.path / name, shared=True)

    def write_config(self, text: str) -> None:
        self._write(CONFIG, text)

    def write_metrics(self, metrics: Mapping[str, Any]) -> None:
        self._write(METRICS, json.dumps(metrics, indent=2, allow_nan=False) + "\n")

    def _write(self, name: str, text: str) -> None:
        self.write_bytes(name, text.encode())

    def write_bytes(self, name: str, data: bytes) -> None:
        """All or nothing, also after a power loss: see `durable_files`."""
        replace_file(self.path / name, [data])

    @contextmanager
    def lines(self, name: str, *, append: bool = False) -> Iterator[TextIO]:
        """A new file that grows by lines, buffered, never held as a whole.

        One that is there is refused, unless it is to be appended to.
        """
        mode: Literal["a", "x"] = "a" if append else "x"
        path = self.path / name
        try:
            file = open(path, mode, encoding="ascii", newline="\n", buffering=_BUFFER)  # noqa: SIM115
        except FileExistsError:  # another run was quicker
            raise _not_empty(self.path) from None
        with file:
            yield file

    @contextmanager
    def journal(self) -> Iterator[Callable[[str], object]]:
        """A function that appends text to the journal."""
        with self.lines(JOURNAL) as file:
            yield file.write


@dataclass(frozen=True, slots=True)
class JournalFile:
    """A journal on disk; `name` tells the journals of one run apart."""

    name: str
    path: Path

    @property
    def size(self) -> int:
        return self.path.stat().st_size

    def lines(self) -> Iterator[str]:
        """Its lines with their ends; of a run that has not ended, what its ledger vouches for."""
        ledger = self.path.parent / LEDGER
        if self.path.name != JOURNAL or not ledger.is_file() or self._is_closed():
            return self.raw_lines()
        with Ledger.read(ledger) as found:
            position = found.position
        vouched = Written(position.records, position.bytes, position.sha256)
        return closed(self.raw_lines(), vouched, "the run has not ended")

    def _is_closed(self) -> bool:
        with open(self.path, "rb") as file:
            file.seek(max(0, self.size - _LAST_LINE))
            return file.read().rpartition(b'\n{"end":')[1] != b""

    def raw_lines(self, start: int = 0) -> Iterator[str]:
        """Every line from a byte on; every byte is one character, so that no file fails here."""
        with open(self.path, encoding="latin-1", newline="\n", buffering=_BUFFER) as file:
            file.seek(start)
            yield from file


def copies_of(exchange: Path, instance: InstanceId) -> Path:
    """Where an instance keeps versions that it was sent."""
    return exchange / f"weights-{instance}"


def checkpoint_path(directory: Path, step: int) -> Path:
    return directory / f"{_STEP}{step}"


def step_of(checkpoint: Path) -> int | None:
    """The step that a checkpoint's directory is named by; None if it is not one of ours."""
    number = checkpoint.name.removeprefix(_STEP)
    ours = checkpoint.name.startswith(_STEP) and number.isdecimal()
    return int(number) if ours else None


def checkpoints_in(directory: Path) -> list[tuple[int, Path]]:
    """The checkpoints of a run, in the order of their steps."""
    found = directory.iterdir() if directory.is_dir() else ()
    return sorted((step, path) for path in found if (step := step_of(path)) is not None)


def find_checkpoint(run: str | Path, step: int | None = None) -> tuple[int, Path]:
    """The last checkpoint of a run, or that of a step, with its step."""
    run = Path(run)
    if not run.is_dir():
        raise UserError(f"no such run: `{run}`. Give a directory that a run wrote with --out.")
    found = dict(checkpoints_in(run / CHECKPOINTS))
    if not found and not (run / LEDGER).is_file():
        raise UserError(
            f"not a run: `{run}` has neither {LEDGER} nor {CHECKPOINTS}/. Give a directory that "
            "`dora-rl train` wrote with --out."
        )
    if not found:
        raise UserError(
            f"no checkpoint in `{run}` yet. Run: dora-rl train --resume {run}; its end saves one, "
            "and so does one Ctrl-C."
        )
    step = max(found) if step is None else step
    if step not in found:
        there = ", ".join(map(str, found))
        raise UserError(f"no checkpoint of step `{step}` in `{run}`. There are those of: {there}.")
    return step, found[step]


def check_outside(run: str | Path, path: str | Path) -> None:
    """Refuse a path within a run, where a resume would find it and take it for the run's own."""
    if Path(path).resolve().is_relative_to(Path(run).resolve()):
        raise UserError(f"within the run: `{path}`. Name a directory outside of `{run}`.")


def check_free(path: str | Path) -> None:
    """Refuse a path that holds something already; nothing is written."""
    path = Path(path)
    if path.is_dir():
        if (path / LEDGER).is_file():
            raise UserError(
                f"not empty: `{path}` holds a run. Go on with it by --resume {path}, name a new "
                "directory, or remove this one."
            )
        if any(path.iterdir()):
            raise _not_empty(path)
    elif path.exists() or path.is_symlink():
        raise UserError(f"not a directory: `{path}`. Name a new directory.")


def _not_empty(path: Path) -> UserError:
    return UserError(f"not empty: `{path}`. Name a new directory, or remove this one.")


def find_journals(path: str | Path) -> list[JournalFile]:
    """The journal that `path` is, or those of the run that it holds, in order of name."""
    path = Path(path)
    if path.is_dir():
        found = [path / JOURNAL, *sorted(path.glob(f"*/{JOURNAL}"))]
        journals = [JournalFile(p.parent.name, p) for p in found if p.is_file()]
        if not journals:
            raise UserError(
                f"no {JOURNAL} in `{path}`. Give the directory that a run wrote with --out."
            )
        return journals
    if not path.exists():
        raise UserError(
            f"no such run: `{path}`. Give a directory that a run wrote with --out, or a journal."
        )
    return [JournalFile(path.stem, path)]
