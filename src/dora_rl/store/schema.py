"""What a ledger has: its rows, the tables for them, and the seals that tell damage.

It knows neither files nor transactions. Whoever changes a field of a row changes FORMAT as well.
"""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Generic, NamedTuple, TypeVar, get_type_hints

import msgspec

APPLICATION = 0x444F5241  # "DORA"
FORMAT = 3  # 2 held tokens; 1 had a row for every group and trajectory, and no snapshots


class Position(NamedTuple):
    """How much of the journal counts."""

    records: int
    bytes: int
    now: float
    sha256: str = ""
    """Of those bytes, if the writer of the journal keeps it."""


class BatchRow(NamedTuple):
    step: int
    state: str
    content: bytes
    """The encoded command; opaque here."""


class VersionRow(NamedTuple):
    version: int
    digest: str
    state: str
    """`published` or `deleted`."""


class CheckpointRow(NamedTuple):
    step: int
    name: str


class PrefixRow(NamedTuple):
    """A piece of a running trajectory; `start` is the number of tokens before it."""

    trajectory: int
    start: int
    content: bytes


class SnapshotRow(NamedTuple):
    """The snapshot that a resume begins with; there is one at most."""

    records: int
    """The events that it has taken in."""
    name: str
    sha256: str


class PayloadRow(NamedTuple):
    trajectory: int
    content: bytes


class FactsRow(NamedTuple):
    id: int
    content: str  # a JSON object


class HeadRow(NamedTuple):
    """The one row that every commit writes: the journal's position, and all tables' totals."""

    id: int
    records: int
    bytes: int
    now: float
    sha256: str
    totals: str  # a JSON object


@dataclass(slots=True)
class Changes:
    """What happened since the last commit. Rows replace those of the same key; drops go first."""

    position: Position
    batches: list[BatchRow] = field(default_factory=list)
    dropped_batches: list[int] = field(default_factory=list)
    versions: list[VersionRow] = field(default_factory=list)
    checkpoints: list[CheckpointRow] = field(default_factory=list)
    dropped_checkpoints: list[int] = field(default_factory=list)
    payloads: dict[int, bytes] = field(default_factory=dict)
    dropped_payloads: set[int] = field(default_factory=set)
    prefixes: list[PrefixRow] = field(default_factory=list)
    dropped_prefixes: set[int] = field(default_factory=set)
    snapshot: SnapshotRow | None = None
    """In place of the one before, if it is there."""


class Total(NamedTuple):
    """How many rows a table has, and the sum of their seals.

    SQLite vouches for no page: after damage, pages of two commits can stand side by side with
    every row as it once was. Only the sum tells that they do not belong together.
    """

    rows: int = 0
    sum: int = 0

    def plus(self, seal: int) -> "Total":
        return Total(self.rows + 1, (self.sum + seal) & _MASK)

    def minus(self, seal: int) -> "Total":
        return Total(self.rows - 1, (self.sum - seal) & _MASK)


_MASK = (1 << 64) - 1
_ENCODER = msgspec.msgpack.Encoder()
Row = TypeVar("Row", bound=tuple[Any, ...])
Stored = tuple[Any, ...]  # a row as SQLite has it: its fields, then its seal


def _real(value: Any) -> float:
    number = float(value) + 0.0  # SQLite has no -0.0
    if number != number:
        raise ValueError("a ledger cannot keep NaN: `nan`. Give a number.")
    return number


def _blob(value: Any) -> bytes:
    return value if type(value) is bytes else bytes(memoryview(value))


# What a column is to SQLite, and a value as SQLite gives it back: the seal is of that.
_KINDS: dict[type, tuple[str, Callable[[Any], Any]]] = {
    int: ("INTEGER", operator.index),
    float: ("REAL", _real),
    str: ("TEXT", str.__str__),
    bytes: ("BLOB", _blob),
}


class Table(Generic[Row]):
    """Rows of one kind. Its columns are the fields of the row, the first `keys` its key."""

    def __init__(self, name: str, row: Callable[..., Row], keys: int = 1) -> None:
        self.name, self.keys, self.row = name, keys, row
        self._converters: list[Callable[[Any], Any]] = []
        columns = []
        hints = get_type_hints(row)
        for column, hint in hints.items():
            kind, convert = _KINDS[hint]
            self._converters.append(convert)
            columns.append(f'"{column}" {kind} NOT NULL')
        named = [f'"{column}"' for column in hints][:keys]
        if keys == 1:
            columns[0] = f"{named[0]} INTEGER PRIMARY KEY NOT NULL"
            end = ""
        else:  # an index of its own would be a second copy of the keys, which no seal covers
            end = f", PRIMARY KEY ({', '.join(named)})) WITHOUT ROWID"
        self.create = f'CREATE TABLE "{name}" ({", ".join(columns)}, "seal" INTEGER NOT NULL'
        self.create += end or ")"
        marks = ", ".join("?" * (len(columns) + 1))
        one = " AND ".join(f"{key} = ?" for key in named)
        self.put = f'INSERT OR REPLACE INTO "{name}" VALUES ({marks})'
        self.drop = f'DELETE FROM "{name}" WHERE {named[0]} = ?'
        self.seals_dropped = f'SELECT "seal" FROM "{name}" WHERE {named[0]} = ?'
        self.seal_replaced = f'SELECT "seal" FROM "{name}" WHERE {one}'
        self.get = f'SELECT * FROM "{name}" WHERE {one}'
        self.all = f'SELECT * FROM "{name}" ORDER BY {", ".join(named)}'
        self.after = f'SELECT * FROM "{name}" WHERE {named[0]} > ? ORDER BY {", ".join(named)}'

    def sealed(self, row: Sequence[Any]) -> Stored:
        """The row as it is stored; a value that SQLite would alter is refused."""
        values = [convert(value) for convert, value in zip(self._converters, row, strict=True)]
        return (*values, self._seal(values))

    def is_whole(self, stored: Stored) -> bool:
        return bool(self._seal(stored[:-1]) == stored[-1])

    def _seal(self, values: Iterable[Any]) -> int:
        data = _ENCODER.encode((self.name, *values))
        return int.from_bytes(blake2b(data, digest_size=8).digest(), "big", signed=True)


BATCHES = Table("batches", BatchRow)
VERSIONS = Table("versions", VersionRow)
CHECKPOINTS = Table("checkpoints", CheckpointRow)
PAYLOADS = Table("payloads", PayloadRow)
PREFIXES = Table("prefixes", PrefixRow, keys=2)
SNAPSHOTS = Table("snapshots", SnapshotRow)
FACTS = Table("facts", FactsRow)
HEAD = Table("head", HeadRow)  # it has the totals of the others, and none of its own

TABLES: tuple[Table[Any], ...] = (
    *(BATCHES, VERSIONS, CHECKPOINTS, PAYLOADS, PREFIXES, SNAPSHOTS, FACTS),
)
SCHEMA: Mapping[str, str] = {table.name: table.create for table in (*TABLES, HEAD)}
