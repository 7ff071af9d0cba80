"""Where rows come from: files, datasets, sequences, functions of the position, iterators.

A source gives the row at an index, the same every time, as plain JSON data. Orders, epochs and
what a row must hold are the stream's business.
"""

import hashlib
import inspect
import json
import os
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol, TypeAlias

from dora_rl.extras import require
from dora_rl.sandbox.objects import import_object, label_of, name_of, said
from dora_rl.tasks.errors import TaskError
from dora_rl.tasks.fingerprints import code_of, digest
from dora_rl.tasks.rewards import gym_dataset

Row: TypeAlias = dict[str, Any]
_SAMPLE = 4096  # rows that stand for a long source in its identity
_FIRST = 16  # rows that stand for an endless one
_LONGEST_LINE = 64 << 20


class Source(Protocol):
    """Rows by index."""

    name: str  # as a message shows it
    random_access: bool

    @property
    def length(self) -> int | None:
        """How many rows there are; None if endless, or not known yet."""

    def row(self, index: int) -> Row | None:
        """The row at an index; None after the last."""

    def identity(self) -> str:
        """A digest by which another source is told from this one."""


class JsonLines:
    """A file with one JSON object a line, checked at once and read on demand."""

    random_access = True

    def __init__(self, path: str | Path, key: str, check: Callable[[Row, str, str], Any]) -> None:
        self.name = f"`{path}`"
        self._starts, self._lengths = array("Q"), array("Q")
        self._digest = hashlib.blake2b(digest_size=16)
        try:
            # Kept open: rows are read from it on demand.
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._file)
            with open(self._file, "rb", closefd=False) as file:
                self._scan(file, key, check)
        except OSError as error:
            raise TaskError(
                f"task.prompts cannot be read: `{path}`: {error.strerror}. Name a JSONL file."
            ) from None

    @property
    def length(self) -> int:
        return len(self._starts)

    def row(self, index: int) -> Row | None:
        if index >= len(self._starts):
            return None
        line = os.pread(self._file, self._lengths[index], self._starts[index])
        return _json_object(line, f"{self.name}, prompt {index + 1} (changed since the start?)")

    def identity(self) -> str:
        return self._digest.hexdigest()

    def _scan(self, file: IO[bytes], key: str, check: Callable[[Row, str, str], Any]) -> None:
        start = 0
        number = 0
        while line := file.readline(_LONGEST_LINE + 1):
            number += 1
            if line.strip():
                where = f"{self.name}, line {number}"
                if len(line) > _LONGEST_LINE:
                    raise TaskError(f"{where}: longer than {_LONGEST_LINE >> 20} MiB. Split it.")
                check(_json_object(line, where), key, where)
                self._starts.append(start)
                self._lengths.append(len(line))
                self._digest.update(line.strip() + b"\n")
            start += len(line)
        if not self._starts:
            raise TaskError(f"no prompts in {self.name}: it is empty. Write one object a line.")


class Rows:
    """A sequence, or a dataset of Hugging Face: whatever has a length and is indexed."""

    random_access = True

    def __init__(self, rows: Any, name: str, key: str) -> None:
        self.name = name
        self._rows = rows
        self._key = key

    @property
    def length(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> Row | None:
        if index >= len(self._rows):
            return None
        return plain_row(self._rows[index], self._key, f"row {index} of {self.name}")

    def identity(self) -> str:
        known = getattr(self._rows, "_fingerprint", None)  # a dataset of Hugging Face has one
        if isinstance(known, str):
            return f"{known}/{len(self._rows)}"
        listed = isinstance(self._rows, list | tuple)  # else a row may cost a read of a disk
        step = 1 if listed else max(1, len(self._rows) // _SAMPLE)
        return digest([len(self._rows), *(self.row(i) for i in range(0, len(self._rows), step))])


class Function:
    """A function of (position, seed) and options: endless, unless it returns None."""

    random_access = False
    length = None

    def __init__(
        self, function: Callable[..., Any], seed: int, options: Mapping[str, Any], key: str
    ) -> None:
        self.name = f"`{label_of(function)}`"
        self._function = function
        self._seed = seed
        self._options = dict(options)
        self._key = key
        try:
            inspect.signature(function).bind(0, seed, **options)
        except TypeError as error:
            raise TaskError(f"task.options do not suit {self.name}: {error}.") from None

    def row(self, index: int) -> Row | None:
        row = self._function(index, self._seed, **self._options)
        return None if row is None else plain_row(row, self._key, f"row {index} of {self.name}")

    def identity(self) -> str:
        first = [self.row(index) for index in range(_FIRST)]
        return digest([name_of(self._function) or self.name, self._options, first])


class Stream:
    """An iterator, read once; its rows are kept, since a position may be asked for again."""

    random_access = False

    def __init__(self, rows: Iterable[Any], name: str, key: str) -> None:
        self.name = name
        self._rest: Iterator[Any] | None = iter(rows)
        self._seen: list[Row] = []
        self._key = key

    @property
    def length(self) -> int | None:
        return None if self._rest is not None else len(self._seen)

    def row(self, index: int) -> Row | None:
        while len(self._seen) <= index and self._rest is not None:
            try:
                row = next(self._rest)
            except StopIteration:
                self._rest = None
            else:
                where = f"row {len(self._seen)} of {self.name}"
                self._seen.append(plain_row(row, self._key, where))
        return self._seen[index] if index < len(self._seen) else None

    def identity(self) -> str:
        return digest([self.row(index) for index in range(_FIRST)])


class Gym:
    """A generator of reasoning-gym: of `size` problems, or endless without it."""

    random_access = True
    _CHUNK = 500  # problems of one seed, if endless: the library's own default

    def __init__(self, name: str, seed: int, options: Mapping[str, Any]) -> None:
        require(f"gym:{name}", "tasks")
        self.name = f"`gym:{name}`"
        self._gym = name
        self._seed = seed
        self._size = options.get("size")
        self._options = json.dumps({"size": self._CHUNK, **options}, sort_keys=True)
        try:
            self._dataset(0)
        except (TypeError, ValueError, AssertionError) as error:
            raise TaskError(f"task.prompts: {self.name} cannot be made: {said(error)}") from error

    @property
    def length(self) -> int | None:
        return self._size

    def row(self, index: int) -> Row | None:
        if self._size is not None:
            if index >= self._size:
                return None
            chunk, place = 0, index
        else:
            chunk, place = divmod(index, self._CHUNK)
        entry = self._dataset(chunk)[place]
        origin = {
            "name": self._gym,
            "seed": self._chunk_seed(chunk),
            "index": place,
            "options": self._options,
        }
        question = entry["question"]
        row = {"prompt": question, "question": question, "answer": entry["answer"], "gym": origin}
        return plain_row(row | {"metadata": entry.get("metadata")}, "prompt", self.name)

    def identity(self) -> str:
        first = [self.row(index) for index in range(min(_FIRST, self._size or _FIRST))]
        return digest([self._gym, self._options, first])

    def _dataset(self, chunk: int) -> Any:
        return gym_dataset(self._gym, self._chunk_seed(chunk), self._options)

    def _chunk_seed(self, chunk: int) -> int:
        if chunk == 0:
            return self._seed
        text = f"{self._seed}/{chunk}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little")


def open_source(
    prompts: Any,
    *,
    seed: int,
    key: str,
    options: Mapping[str, Any],
    check: Callable[[Row, str, str], Any],
    import_path: Sequence[str] = (),
) -> Source:
    """The source that a setting names, or that an object of the Python API is."""
    if isinstance(prompts, str | Path):
        text = str(prompts)
        if text.startswith("gym:"):
            return Gym(text.removeprefix("gym:"), seed, options)
        if text.startswith("hf:"):
            return _rows(_hugging_face(text, options), f"`{text}`", key)
        if names_code(text):
            found = import_object(text, "task.prompts", import_path)
            return _from_object(found, f"`{text}`", seed, key, options)
        _no_options(options, f"`{text}`")
        return JsonLines(prompts, key, check)
    return _from_object(prompts, f"the prompts ({type(prompts).__name__})", seed, key, options)


def names_code(prompts: str) -> bool:
    """Whether it is `module:attribute`, and no file or dataset."""
    return (
        ":" in prompts
        and not prompts.startswith(("gym:", "hf:"))
        and not prompts.endswith(".jsonl")
        and not os.path.exists(prompts)
    )


def code_behind(prompts: Any, import_path: Sequence[str] = ()) -> Any:
    """The text of the code that makes the rows; None where they are data."""
    if isinstance(prompts, str | Path):
        named = names_code(str(prompts))
        return code_of(str(prompts), "task.prompts", import_path) if named else None
    if callable(prompts) and not hasattr(prompts, "__getitem__"):
        return code_of(prompts, "task.prompts")
    code = getattr(prompts, "gi_code", None)  # of a generator
    return None if code is None else code_of(code, "task.prompts")


def _from_object(found: Any, name: str, seed: int, key: str, options: Mapping[str, Any]) -> Source:
    if callable(found) and not hasattr(found, "__getitem__"):
        if "position" in _parameters(found):
            return Function(found, seed, options, key)
        found = _call_maker(found, name, seed, options)
    else:
        _no_options(options, name)
    return _rows(found, name, key)


def _rows(found: Any, name: str, key: str) -> Source:
    if isinstance(found, str | bytes | Mapping):
        raise TaskError(f"task.prompts must give rows: {name} gives `{found!r:.60}`.")
    if hasattr(found, "__len__") and hasattr(found, "__getitem__"):
        return Rows(found, name, key)
    if isinstance(found, Iterable):
        return Stream(found, name, key)
    raise TaskError(
        f"task.prompts must give rows: {name} gives `{found!r:.60}`. Return a list, or yield rows."
    )


def _call_maker(make: Callable[..., Any], name: str, seed: int, options: Mapping[str, Any]) -> Any:
    arguments = dict(options)
    if "seed" in _parameters(make):
        arguments.setdefault("seed", seed)
    try:
        inspect.signature(make).bind(**arguments)
    except TypeError as error:
        raise TaskError(f"task.options do not suit {name}: {error}.") from None
    return make(**arguments)


def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    try:
        return frozenset(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return frozenset()


def _no_options(options: Mapping[str, Any], name: str) -> None:
    if options:
        raise TaskError(
            f"task.options are for generators, not for {name}: `{next(iter(options))}`."
        )


def _hugging_face(text: str, options: Mapping[str, Any]) -> Any:
    require(text, "datasets")
    import datasets

    name, _, split = text.removeprefix("hf:").partition(":")
    try:
        return datasets.load_dataset(name, split=split or "train", **options)
    except Exception as error:  # of the network, of the hub, of the files
        raise TaskError(f"task.prompts: `{text}` cannot be loaded: {said(error)}") from error


def plain_row(row: Any, key: str, where: str) -> Row:
    """A row as JSON has it, so that rewards see one form wherever it came from."""
    if isinstance(row, str):
        row = {key: row}
    if not isinstance(row, Mapping):
        raise TaskError(f"{where} must be a mapping or text: `{row!r:.60}`.")
    try:
        plain: Row = json.loads(json.dumps(dict(row), default=_plain_value))
    except (TypeError, ValueError, RecursionError) as error:
        raise TaskError(f"{where} is not JSON: {error}. Keep text, numbers and lists.") from None
    return plain


def _plain_value(value: Any) -> Any:
    for convert in ("tolist", "isoformat"):  # numpy's, and dates
        if hasattr(value, convert):
            return getattr(value, convert)()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    raise TypeError(f"`{value!r:.60}` is a {type(value).__name__}")


def _json_object(line: bytes, where: str) -> Row:
    try:
        row = json.loads(line)
    except RecursionError:
        raise TaskError(f"{where}: nested too deeply. Flatten it.") from None
    except ValueError as error:  # UnicodeDecodeError too
        shown = line.decode("utf-8", "replace").strip()[:60]
        raise TaskError(f"{where}: not JSON: `{shown}`: {error}. Write one object.") from None
    if not isinstance(row, dict):
        raise TaskError(f"{where}: not an object: `{row!r:.60}`. Write one object a line.")
    return row
