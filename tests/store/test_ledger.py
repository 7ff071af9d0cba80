"""The ledger says what was committed, to every reader, after every way of ending."""

import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dora_rl.core.protocol.errors import UserError
from dora_rl.core.protocol.types import TrajectoryState
from dora_rl.store import schema
from dora_rl.store.ledger import (
    BatchRow,
    Changes,
    CheckpointRow,
    Ledger,
    LedgerError,
    Position,
    PrefixRow,
    SnapshotRow,
    VersionRow,
)
from tests.store.ledgers import FACTS, NAME, Model, copy_files, nth, run, state_of

START = Position(0, 0, 0.0)

KEYS = st.integers(0, 5)
NUMBERS = st.integers(0, 2**63 - 1)
MAYBE = st.none() | st.integers(0, 9)
TEXTS = st.text(max_size=5)
BLOBS = st.binary(max_size=20) | st.integers(0, 255).map(lambda byte: bytes([byte]) * 5000)
REALS = st.floats(allow_nan=False) | st.integers(-3, 3)
PREFIXES = st.builds(PrefixRow, KEYS, KEYS, BLOBS)
CHANGES = st.builds(
    Changes,
    st.builds(Position, NUMBERS, NUMBERS, REALS, TEXTS),
    batches=st.lists(st.builds(BatchRow, KEYS, TEXTS, BLOBS), max_size=2),
    versions=st.lists(st.builds(VersionRow, KEYS, TEXTS, TEXTS), max_size=2),
    checkpoints=st.lists(st.builds(CheckpointRow, KEYS, TEXTS), max_size=2),
    dropped_checkpoints=st.lists(KEYS, max_size=2),
    dropped_batches=st.lists(KEYS, max_size=2),
    snapshot=st.none() | st.builds(SnapshotRow, KEYS, TEXTS, TEXTS),
    payloads=st.dictionaries(KEYS, BLOBS, max_size=3),
    dropped_payloads=st.sets(KEYS, max_size=3),
    prefixes=st.lists(PREFIXES, max_size=4),
    dropped_prefixes=st.sets(KEYS, max_size=2),
)
JSON = st.dictionaries(TEXTS, st.none() | st.booleans() | NUMBERS | TEXTS, max_size=3)


class Twin(RuleBasedStateMachine):
    """A ledger and its model, side by side."""

    @initialize(facts=JSON)
    def begin(self, facts: dict[str, Any]) -> None:
        self.directory = Path(tempfile.mkdtemp())
        self.path = self.directory / NAME
        self.ledger = Ledger.create(self.path, facts)
        self.model = Model(facts)

    def teardown(self) -> None:
        if hasattr(self, "ledger"):
            self.ledger.close()
            shutil.rmtree(self.directory)

    @rule(changes=CHANGES)
    def commit(self, changes: Changes) -> None:
        self.ledger.commit(changes)
        self.model.commit(changes)

    @rule(facts=JSON)
    def set_facts(self, facts: dict[str, Any]) -> None:
        self.ledger.set_facts(facts)
        self.model.facts = facts

    @rule()
    def reopen(self) -> None:
        self.ledger.close()
        self.ledger = Ledger.open(self.path)

    @rule()
    def read_beside(self) -> None:
        with Ledger.read(self.path) as reader:
            assert state_of(reader) == self.model.state()

    @rule(changes=CHANGES, statement=st.integers(1, 30))
    def crash_in_commit(self, changes: Changes, statement: int) -> None:
        """What stands on the disk at some statement of a commit is what a power failure leaves."""
        copy = self.directory / "copy" / NAME
        seen = 0

        def count(_: str) -> None:
            nonlocal seen
            seen += 1
            if seen == statement:
                copy_files(self.path, copy.parent)

        self.ledger._db.execute("PRAGMA cache_size=1")  # so that pages are written at once
        self.ledger._db.set_trace_callback(count)
        self.ledger.commit(changes)
        self.ledger._db.set_trace_callback(None)
        if seen >= statement:
            with Ledger.open(copy) as ledger:
                assert state_of(ledger) == self.model.state()
        self.model.commit(changes)

    @rule(after=st.integers(-1, 5))
    def some_batches(self, after: int) -> None:
        rows = self.model.state()["batches"]
        assert list(self.ledger.batches(after)) == [row for row in rows if row.step > after]

    @rule(key=KEYS)
    def one_payload(self, key: int) -> None:
        assert self.ledger.payload(key) == self.model.payloads.get(key)

    @invariant()
    def same(self) -> None:
        if hasattr(self, "ledger"):
            assert state_of(self.ledger) == self.model.state()


TestTwin = Twin.TestCase
TestTwin.settings = settings(
    max_examples=25,
    stateful_step_count=12,
    suppress_health_check=[HealthCheck.too_slow],  # on a busy machine, as with the deadline
)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger.create(tmp_path / NAME, FACTS) as made:
        yield made


def test_a_new_ledger_is_empty(ledger: Ledger) -> None:
    assert state_of(ledger) == Model().state()
    assert ledger.position == START


def test_a_commit_waits_for_the_disk(ledger: Ledger) -> None:
    """No test can cut the power: this is what SQLite was told, after `create` and `open`."""
    for _ in range(2):
        assert ledger._db.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL
        assert ledger._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        ledger.close()
        ledger = Ledger.open(ledger.path)
    ledger.close()


def test_facts_come_back_as_they_will_after_a_resume(tmp_path: Path) -> None:
    with Ledger.create(tmp_path / NAME, {"pair": (1, 2)}) as ledger:
        assert ledger.facts == {"pair": [1, 2]}
        ledger.set_facts({"other": (3,)})
        assert ledger.facts == {"other": [3]}


@pytest.mark.parametrize("facts", [{"a": {1, 2}}, {"a": float("nan")}, {"a": b"bytes"}])
def test_facts_that_are_no_json(ledger: Ledger, facts: dict[str, Any]) -> None:
    with pytest.raises(LedgerError, match=r"facts must be JSON data: .*\. Give plain values"):
        ledger.set_facts(facts)
    assert ledger.facts == FACTS


def test_an_error_of_the_ledger_is_the_users() -> None:
    assert issubclass(LedgerError, UserError)


def test_a_reader_stays_at_one_commit(ledger: Ledger) -> None:
    model = Model()
    ledger.commit(nth(1))
    model.commit(nth(1))
    with Ledger.read(ledger.path) as reader:
        rows = reader.prefixes()
        first = next(rows)
        ledger.commit(nth(2))
        assert [first, *rows] == model.state()["prefixes"]
        assert state_of(reader) == model.state()
    with Ledger.read(ledger.path) as reader:
        assert reader.position == nth(2).position


def test_a_reader_cannot_write(ledger: Ledger) -> None:
    with Ledger.read(ledger.path) as reader:
        with pytest.raises(LedgerError, match=r"`.*` was opened to read\. Use Ledger.open"):
            reader.commit(nth(1))
        with pytest.raises(LedgerError, match="was opened to read"):
            reader.set_facts({})
    assert state_of(ledger) == Model().state()


def test_rows_are_not_read_all_at_once(ledger: Ledger) -> None:
    ledger.commit(nth(1))
    rows = ledger.prefixes()
    assert len(list(islice(rows, 2))) == 2
    ledger.commit(nth(2))
    with pytest.raises(RuntimeError, match="changed while it was read"):
        next(rows)


def test_a_closed_ledger_is_no_damaged_one(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / NAME, FACTS)
    ledger.close()
    ledger.close()
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        ledger.commit(nth(1))
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        list(ledger.versions())


ROW = VersionRow(1, "d1", "published")
PREFIX = PrefixRow(1, 0, b"abc")


@pytest.mark.parametrize(
    "row",
    [
        PREFIX._replace(start=1.5),
        PREFIX._replace(start=None),
        PREFIX._replace(start=2**63),
        PREFIX._replace(start="7"),
        PREFIX._replace(content="abc"),
        PREFIX._replace(content=None),
        PREFIX._replace(trajectory=None),
        ROW._replace(state=7),
        ROW._replace(state=None),
        ROW._replace(state="\ud800"),
        Position(1, 1, float("nan")),
    ],
)
def test_what_sqlite_would_alter_is_refused(ledger: Ledger, row: Any) -> None:
    changes = Changes(Position(1, 1, 1.0), versions=[ROW], prefixes=[PREFIX])
    match row:
        case PrefixRow():
            changes.prefixes.append(row)
        case VersionRow():
            changes.versions.append(row)
        case Position():
            changes.position = row
    with pytest.raises((TypeError, ValueError, OverflowError)):
        ledger.commit(changes)
    assert state_of(ledger) == Model().state()
    ledger.commit(Changes(Position(1, 1, 1.0), versions=[ROW], prefixes=[PREFIX]))
    assert (list(ledger.versions()), list(ledger.prefixes())) == ([ROW], [PREFIX])


def test_states_may_be_enums(ledger: Ledger) -> None:
    ledger.commit(Changes(START, versions=[ROW._replace(state=TrajectoryState.SCORED)]))
    assert [row.state for row in ledger.versions()] == ["scored"]


@given(st.lists(st.integers(-(2**63), 2**63 - 1)), st.randoms(use_true_random=False))
def test_totals_know_no_order(seals: list[int], random: Any) -> None:
    total = schema.Total()
    for seal in seals:
        total = total.plus(seal)
    random.shuffle(seals)
    for seal in seals:
        total = total.minus(seal)
    assert total == schema.Total()


def test_format_3_is_what_it_was() -> None:
    """A ledger must be readable by the next release: whoever changes this gives a new FORMAT."""
    assert schema.FORMAT == 3
    assert list(schema.SCHEMA) == [
        *("batches", "versions", "checkpoints", "payloads", "prefixes", "snapshots", "facts"),
        "head",
    ]
    assert schema.SNAPSHOTS.create == (
        'CREATE TABLE "snapshots" ("records" INTEGER PRIMARY KEY NOT NULL, "name" TEXT NOT NULL, '
        '"sha256" TEXT NOT NULL, "seal" INTEGER NOT NULL)'
    )
    assert schema.PREFIXES.create == (
        'CREATE TABLE "prefixes" ("trajectory" INTEGER NOT NULL, "start" INTEGER NOT NULL, '
        '"content" BLOB NOT NULL, "seal" INTEGER NOT NULL, '
        'PRIMARY KEY ("trajectory", "start")) WITHOUT ROWID'
    )
    assert schema.SNAPSHOTS.sealed((7, "7.json", "ab"))[-1] == 3769912873514435765
    assert schema.PREFIXES.sealed((1, 2, b"abc"))[-1] == 6520863210512300479


# What is refused, by name


def refusal(path: Path) -> str:
    """How `open` and `read` refuse it: in the same words, and leaving it as it is."""
    before = path.read_bytes() if path.is_file() else None
    messages = set()
    for way in (Ledger.open, Ledger.read):
        with pytest.raises(LedgerError) as caught:
            way(path)
        messages.add(str(caught.value))
    assert before is None or path.read_bytes() == before
    (message,) = messages
    assert f"`{path}`" in message and "\n" not in message
    return message


def test_what_is_no_ledger(tmp_path: Path) -> None:
    path = tmp_path / NAME
    assert "does not exist. Give the ledger.sqlite of a run." in refusal(path)
    assert "is a directory" in refusal(tmp_path)
    assert "does not exist" in refusal(tmp_path / "nowhere" / NAME)
    assert list(tmp_path.iterdir()) == []
    os.mkfifo(tmp_path / "pipe")
    assert "is not a file" in refusal(tmp_path / "pipe")
    path.write_bytes(b"")
    assert "is empty" in refusal(path)
    for content in (b"x", b"SQLite format 3\0", b"not a database" * 1000):
        path.write_bytes(content)
        assert "is no ledger. Give the ledger.sqlite of a run." in refusal(path)


def test_another_database(tmp_path: Path) -> None:
    path = tmp_path / NAME
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE trajectories (trajectory INTEGER)")
    other.close()
    assert "is no ledger" in refusal(path)


@pytest.mark.parametrize("found", [2, 4])
def test_another_format(found: int, tmp_path: Path) -> None:
    path = tmp_path / NAME
    Ledger.create(path, FACTS).close()
    other = sqlite3.connect(path)
    other.execute(f"PRAGMA user_version={found}")
    other.close()
    message = refusal(path)
    assert f"has the format `{found}`: this dora-rl knows format 3. Use a dora-rl" in message
    assert "start a new run from its checkpoint: set model.path" in message


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / NAME
    with Ledger.create(path, FACTS) as ledger:
        ledger.commit(nth(1))
    with pytest.raises(LedgerError, match=r"`.*` exists. Resume its run, or name a new directory"):
        Ledger.create(path, {})
    with Ledger.open(path) as ledger:  # and the lock is free
        assert ledger.position == nth(1).position
    # What is left of another ledger would be taken for a part of this one.
    (tmp_path / "b.sqlite-wal").write_bytes(b"")
    with pytest.raises(LedgerError, match=r"b.sqlite-wal` exists"):
        Ledger.create(tmp_path / "b.sqlite", {})
    with pytest.raises(LedgerError, match=r"cannot lock `.*Check that its directory is there"):
        Ledger.create(tmp_path / "nowhere" / NAME, {})


def test_a_creation_that_was_cut_off_is_made_again(tmp_path: Path) -> None:
    (tmp_path / f".{NAME}.partial").write_bytes(b"half a database")
    with Ledger.create(tmp_path / NAME, FACTS) as ledger:
        assert state_of(ledger) == Model().state()
    assert {p.name for p in tmp_path.iterdir()} == {NAME, ".ledger.lock"}


def test_names_that_an_address_would_alter(tmp_path: Path) -> None:
    path = tmp_path / "a?mode=memory#b%20c é" / NAME
    path.parent.mkdir()
    Ledger.create(path, FACTS).close()
    with Ledger.open(path) as ledger:
        assert ledger.facts == FACTS
    assert path.is_file()


def test_without_permission() -> None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / NAME
        with Ledger.create(path, FACTS) as ledger:
            ledger.commit(nth(1))
        path.chmod(0o444)
        path.parent.chmod(0o555)

        def read_but_not_write() -> None:
            give_up_root()
            with Ledger.read(path) as reader:
                assert reader.position == nth(1).position
            for way in (Ledger.open, lambda _: Ledger.create(path.with_name("b.sqlite"), {})):
                with pytest.raises(
                    LedgerError, match=r"cannot lock `.*`: Permission denied\. Check"
                ):
                    way(path)

        assert run(read_but_not_write) == 0
        path.parent.chmod(0o777)
        path.with_name(".ledger.lock").chmod(0o666)

        def not_write() -> None:
            give_up_root()
            with pytest.raises(LedgerError, match=r"cannot write `.*`: .*\. Check the permission"):
                Ledger.open(path)

        assert run(not_write) == 0
        path.chmod(0o000)

        def not_read() -> None:
            give_up_root()
            for way in (Ledger.open, Ledger.read):
                with pytest.raises(LedgerError, match=r"cannot read `.*`: .*\. Check the permiss"):
                    way(path)

        assert run(not_read) == 0


def give_up_root() -> None:
    if os.geteuid() == 0:
        os.setuid(65534)
