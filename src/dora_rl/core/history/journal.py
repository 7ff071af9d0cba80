"""The journal of a run as lines of text: what was reported, when, and what the core answered.

    {"format":"dora-rl journal","version":2,"settings":{...},"promises":{...},"meta":{...}}
    [now,event,[command,...]]
    [now,event,null,"why the event was refused"]
    {"end":"why the run ended","records":2,"sha256":"..."}

Invariants: the same run gives the same bytes; the closing line counts the records and holds a
digest of all that stands before it, so that a journal that was cut or altered anywhere is
refused. The digest is a chain, SHA-256 of the digest so far and the next line: whoever knows it at
one line can continue from there without what stands before. (Version 1 had one SHA-256 of all
bytes, and is still read.) It makes and reads lines: the file belongs to whoever runs.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, Protocol

from dora_rl.core.history.codec import (
    decode,
    decode_command,
    decode_event,
    dumps,
    encode,
    encode_command,
    encode_event,
)
from dora_rl.core.protocol.commands import Command
from dora_rl.core.protocol.errors import JournalError
from dora_rl.core.protocol.events import Event
from dora_rl.core.protocol.paradigms import PARADIGMS
from dora_rl.core.protocol.settings import Settings

FORMAT = "dora-rl journal"
VERSION = 2
_FLAT = 1  # the last version whose digest is no chain
_CUT = "The run that wrote it did not end, or the file was cut: copy it again, or run again."


@dataclass(frozen=True, slots=True)
class Header:
    """The first line: what a replay needs, and whatever the writer wants to remember."""

    settings: Settings
    meta: Mapping[str, Any]


class Written(NamedTuple):
    """How much of a journal is there, its header included; the digest is of those lines."""

    records: int
    bytes: int
    sha256: str


class Record(NamedTuple):
    """One event that the core handled, or refused; `text` is its line, numbered from 1."""

    line: int
    text: str
    now: float
    event: Event
    commands: tuple[Command, ...]
    refused: str | None


@dataclass(frozen=True, slots=True)
class Closing:
    """The last line; whoever has seen it has seen an unaltered journal."""

    reason: str
    records: int


def handled_line(now: float, event: Event, commands: Sequence[Command]) -> str:
    """The line of an event that was handled, without its end."""
    return _dumps([now, encode_event(event), [encode_command(command) for command in commands]])


def refused_line(now: float, event: Event, reason: str) -> str:
    return _dumps([now, encode_event(event), None, reason])


class _Digest(Protocol):
    """Of lines that are taken in one by one."""

    def update(self, line: bytes, /) -> None: ...
    def hexdigest(self) -> str: ...
    def copy(self) -> "_Digest": ...


class _Chain:
    """d(0) = b"", d(n) = SHA-256 of d(n - 1) and line n: it can be taken up anywhere."""

    __slots__ = ("_last",)

    def __init__(self, sha256: str = "") -> None:
        self._last = bytes.fromhex(sha256)

    def update(self, line: bytes, /) -> None:
        self._last = hashlib.sha256(self._last + line).digest()

    def hexdigest(self) -> str:
        return self._last.hex()

    def copy(self) -> "_Chain":
        return _Chain(self.hexdigest())


class JournalWriter:
    """Writes a journal line by line, as the run goes, through `write`."""

    def __init__(
        self,
        write: Callable[[str], object],
        settings: Settings,
        meta: Mapping[str, Any] | None = None,
        *,
        after: Written | None = None,
    ) -> None:
        """With `after`, so much is written already: the lines that follow it are next."""
        self._write = write
        self._closed = False
        self._digest = _Chain("" if after is None else after.sha256)
        self._records = 0 if after is None else after.records
        self._bytes = 0 if after is None else after.bytes
        if after is not None:
            return
        self._put(
            _dumps(
                {
                    "format": FORMAT,
                    "version": VERSION,
                    "settings": encode(settings),
                    "promises": _promises(settings),
                    "meta": dict(meta or {}),
                }
            )
        )

    def handled(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """Record an event and the commands that answered it."""
        self._put(handled_line(now, event, commands))
        self._records += 1

    def refused(self, now: float, event: Event, reason: str) -> None:
        """Record an event that was refused, and so changed nothing."""
        self._put(refused_line(now, event, reason))
        self._records += 1

    @property
    def written(self) -> Written:
        """All that was given to `write`; whether it is on a disk is not known here."""
        return Written(self._records, self._bytes, self._digest.hexdigest())

    def close(self, reason: str) -> None:
        """Write the closing line. Without it the journal is refused by every reader."""
        line = _closing_line(self._digest.copy(), reason, self._records)
        self._put(line)
        self._closed = True

    def _put(self, line: str) -> None:
        if self._closed:
            raise JournalError("the journal is closed: nothing can follow its closing line")
        line += "\n"
        self._digest.update(line.encode("ascii"))
        self._bytes += len(line)
        self._write(line)


def _dumps(data: Any) -> str:
    try:
        return dumps(data)
    except ValueError as error:
        raise JournalError(f"cannot be written to a journal: {error}: `{data}`") from None


def _promises(settings: Settings) -> dict[str, Any]:
    paradigm = PARADIGMS[settings.paradigm]
    return {
        "one_version": paradigm.pins_version,
        "bounded": paradigm.bounded,
        "max_staleness": paradigm.max_staleness(settings),
    }


def _closing_line(digest: _Digest, reason: str, records: int) -> str:
    """`digest` has taken in all lines before; the reason and the count go in as well."""
    body = {"end": reason, "records": records}
    digest.update(_dumps(body).encode("ascii"))
    return _dumps({**body, "sha256": digest.hexdigest()})


# --- reading ------------------------------------------------------------------------------


def closed(lines: Iterable[str], written: Written, reason: str) -> Iterator[str]:
    """The first part of a journal as a whole one: what is vouched for, and a closing line."""
    if not written.bytes:
        raise JournalError(
            "the run has just begun, and nothing of its journal is committed yet. Try again in a "
            "second."
        )
    digest = _Chain()
    number = 0
    for line in islice(lines, written.records + 1):
        number += 1
        digest.update(line.encode("latin-1"))
        yield line
    if digest.hexdigest() != written.sha256:
        raise _not_vouched_for(number, 1, written)
    yield _closing_line(digest, reason, written.records) + "\n"


def read_header(line: str) -> tuple[Header, Written]:
    """The first line alone, and what is written with it."""
    _, _, data = next(_checked([line], parse=True))
    digest = _Chain()
    digest.update(line.encode("ascii"))
    return _read_header(data), Written(0, len(line), digest.hexdigest())


def check_between(lines: Iterable[str], since: Written, until: Written) -> None:
    """Prove the lines that follow `since` by the digests of both places; records are not read."""
    digest = _Chain(since.sha256)
    number = since.records + 1
    for line in islice(lines, until.records - since.records):
        number += 1
        digest.update(line.encode("latin-1"))
    if number != until.records + 1 or digest.hexdigest() != until.sha256:
        raise _not_vouched_for(number, since.records + 2, until)


def read_between(lines: Iterable[str], since: Written, until: Written) -> Iterator[Record]:
    """The records that follow `since`; they must have been proven by `check_between`."""
    numbers = range(since.records + 2, until.records + 2)
    for number, line in zip(numbers, lines, strict=False):
        try:
            data = json.loads(line, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            raise _strange(number, "not JSON") from None
        if type(data) is not list:
            raise _strange(number, "not a record")
        yield _read_record(number, line[:-1], data)


def _not_vouched_for(number: int, first: int, written: Written) -> JournalError:
    return JournalError(
        f"journal line {number}: lines {first} to {written.records + 1} do not match the SHA-256 "
        "recorded in the ledger. The file was cut or altered: take the original."
    )


def read_journal(lines: Iterable[str]) -> Iterator[Header | Record | Closing]:
    """The header, each record, the closing; JournalError as soon as something is wrong.

    Alterations that keep a line readable show only at the closing line, so what was read is
    proven only then; `verify_journal` proves it beforehand where lines can be read twice.
    Lines come with their ends, from a file opened with `encoding="latin-1", newline="\\n"`.
    """
    for number, line, data in _checked(lines, parse=True):
        if number == 1:
            yield _read_header(data)
        elif type(data) is list:
            yield _read_record(number, line[:-1], data)
        else:
            yield Closing(data["end"], data["records"])


def verify_journal(lines: Iterable[str]) -> Closing:
    """Check that a journal is whole and unaltered, without reading its records."""
    closing = None
    for number, _, data in _checked(lines, parse=False):
        if number == 1:
            _read_header(data)
        elif type(data) is dict:
            closing = Closing(data["end"], data["records"])
    assert closing is not None, "_checked ends with the closing line, or raises"
    return closing


def _checked(lines: Iterable[str], parse: bool) -> Iterator[tuple[int, str, Any]]:
    """Number, text and data of each line (records only if `parse`), with digest and count."""
    digest: _Digest = _Chain()
    number = 0
    closed = False
    for line in lines:
        number += 1
        if closed:
            raise JournalError(f"journal line {number}: something follows the closing line")
        if not line.endswith("\n"):
            raise JournalError(f"journal line {number}: cut in the middle. {_CUT}")
        if not line.isascii():
            raise JournalError(f"journal line {number}: not ASCII. The file was altered.")
        data = None
        if parse or line[0] != "[":
            try:
                data = json.loads(line, parse_constant=_refuse_constant)
            except (ValueError, RecursionError):
                raise _strange(number, "not JSON") from None
        if number == 1:
            if _check_format(data) <= _FLAT:
                digest = hashlib.sha256()
        elif type(data) is dict:
            _check_closing(number, line, data, digest)
            closed = True
        elif parse and type(data) is not list:
            raise _strange(number, "neither a record nor the closing line")
        digest.update(line.encode("ascii"))
        yield number, line, data
    if number == 0:
        raise JournalError("journal line 1: the journal is empty. Give a journal that a run wrote.")
    if not closed:
        raise JournalError(f"journal line {number}: the closing line is missing. {_CUT}")


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number")


def _check_format(data: Any) -> int:
    """The version that it is written in, if that can be read here."""
    if type(data) is not dict or data.get("format") != FORMAT:
        raise JournalError(
            f"journal line 1: not a dora-rl journal. "
            f'Its first line must hold `"format":"{FORMAT}"`.'
        )
    version = data.get("version")
    if type(version) is int and version > VERSION:
        raise JournalError(
            f"journal line 1: written in format {version}, this dora-rl reads up to {VERSION}. "
            "Use the dora-rl that wrote it, or a newer one."
        )
    if type(version) is not int or version < 1:
        raise _strange(1, f"unknown format version `{version}`")
    return version


def _check_closing(number: int, line: str, data: dict[str, Any], digest: _Digest) -> None:
    reason, records = data.get("end"), data.get("records")
    if type(reason) is not str or type(records) is not int:
        raise _strange(number, "neither a record nor the closing line")
    if records != number - 2:
        raise JournalError(
            f"journal line {number}: {records} records were written, {number - 2} are here. {_CUT}"
        )
    if line != _closing_line(digest.copy(), reason, records) + "\n":
        raise JournalError(
            f"journal line {number}: the digest does not match lines 1 to {number}. "
            "The file was altered: take the original."
        )


def _strange(number: int, problem: str) -> JournalError:
    return JournalError(
        f"journal line {number}: {problem}. The file was altered, or is no journal: "
        "take the original."
    )


def _read_header(data: dict[str, Any]) -> Header:
    expected = {"format", "version", "settings", "promises", "meta"}
    if data.keys() != expected or type(data["meta"]) is not dict:
        raise _strange(1, f"a header has {', '.join(sorted(expected))}")
    try:
        settings = decode(Settings, data["settings"])
    except JournalError as error:
        raise JournalError(
            f"journal line 1: {error}. Use the dora-rl that wrote it, if it is another one."
        ) from None
    if data["promises"] != _promises(settings):
        raise JournalError(
            f"journal line 1: `{settings.paradigm}` promised {dumps(data['promises'])} when this "
            "was written, and does not now. Use the dora-rl that wrote it."
        )
    return Header(settings, data["meta"])


def _read_record(number: int, text: str, data: list[Any]) -> Record:
    size = len(data)
    now = data[0] if data else None
    if type(now) is float or type(now) is int:
        try:
            if size == 3 and type(data[2]) is list:
                answer = tuple([decode_command(command) for command in data[2]])
                return Record(number, text, now, decode_event(data[1]), answer, None)
            if size == 4 and data[2] is None and type(data[3]) is str:
                return Record(number, text, now, decode_event(data[1]), (), data[3])
        except JournalError as error:
            raise JournalError(f"journal line {number}: {error}") from None
    raise _strange(number, "a record is [time, event, commands] or [time, event, null, reason]")
