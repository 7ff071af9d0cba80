"""Crashes, full disks, other processes and damage: a whole commit, or a refusal by name."""

import gc
import os
import random
import resource
import sqlite3
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dora_rl.store import schema
from dora_rl.store.ledger import Changes, Ledger, LedgerError, Position, VersionRow
from tests.patience import PATIENCE_S
from tests.store.ledgers import (
    DIED,
    FACTS,
    NAME,
    State,
    copy_files,
    die_at,
    fork,
    kill,
    model_after,
    nth,
    outcome,
    run,
    state_of,
)

pytestmark = pytest.mark.faults
REFUSED, COMMITTED, AGAIN = 1, 2, 3  # exit codes of a child


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / NAME


def begin(path: Path, commits: int) -> None:
    path.parent.mkdir(exist_ok=True)
    with Ledger.create(path, FACTS) as ledger:
        for n in range(1, commits + 1):
            ledger.commit(nth(n))


def state_on_disk(path: Path) -> State:
    with Ledger.open(path) as ledger:
        ledger._db.execute("PRAGMA synchronous=OFF")  # to close it is quicker; no power fails here
        return state_of(ledger)


# Crashes


def test_every_statement_of_a_commit_can_be_the_last(path: Path) -> None:
    begin(path, 2)
    before, after = model_after(2).state(), model_after(3).state()

    def commit(statement: int) -> int:
        ledger = Ledger.open(path)
        ledger._db.execute("PRAGMA cache_size=1")  # so that pages are written at once
        die_at(ledger, statement)
        ledger.commit(nth(3))
        return COMMITTED

    for statement in range(1, 1000):
        if run(lambda: commit(statement)) == DIED:  # noqa: B023
            assert state_on_disk(path) == before
        else:
            break
    assert statement > 50
    assert state_on_disk(path) == after


def test_killed_at_any_moment(path: Path) -> None:
    """What was said to be committed is there; of what was not, all or nothing."""
    begin(path, 0)
    moments = random.Random(5)
    done = 0
    for _ in range(12):
        out, into = os.pipe()

        def commit_on(done: int = done, into: int = into) -> None:
            ledger = Ledger.open(path)
            ledger._db.execute("PRAGMA wal_autocheckpoint=20")
            for n in range(done + 1, 10_000):
                ledger.commit(nth(n))
                os.write(into, struct.pack("i", n))

        child = fork(commit_on)
        os.close(into)
        promised = struct.unpack("i", os.read(out, 4))[0]  # it is under way
        time.sleep(moments.uniform(0, 0.03))
        kill(child)
        assert outcome(child) == -9
        while said := os.read(out, 4):
            promised = struct.unpack("i", said)[0]
        os.close(out)
        found = state_on_disk(path)
        done = found["position"].records // 10
        assert promised <= done <= promised + 1
        assert found == model_after(done).state()


def test_a_crash_while_it_is_made_leaves_no_ledger(path: Path, monkeypatch) -> None:
    monkeypatch.setattr(os, "rename", lambda *_: os._exit(DIED))
    assert run(lambda: Ledger.create(path, FACTS).close()) == DIED
    monkeypatch.undo()
    assert not path.exists()
    begin(path, 1)
    assert state_on_disk(path) == model_after(1).state()


# Other processes


def test_one_process_at_a_time(path: Path) -> None:
    begin(path, 1)
    out, into = os.pipe()

    def hold() -> None:
        with Ledger.open(path) as ledger:
            ledger.commit(nth(2))
            os.write(into, b"!")
            time.sleep(600)

    child = fork(hold)
    os.read(out, 1)
    for way in (Ledger.open, lambda path: Ledger.create(path, {})):
        with pytest.raises(LedgerError, match=f"the run is going on in process {child}: `"):
            way(path)
    with Ledger.read(path) as reader:
        assert state_of(reader) == model_after(2).state()
    kill(child)
    outcome(child)
    with Ledger.read(path) as reader:  # of a killed run
        assert state_of(reader) == model_after(2).state()
    assert state_on_disk(path) == model_after(2).state()
    with Ledger.open(path), pytest.raises(LedgerError, match=f"in process {os.getpid()}"):
        Ledger.open(path)
    os.close(out)
    os.close(into)


def rows(n: int) -> Changes:
    """Commit n of a run in which every commit writes every row."""
    made = [VersionRow(i, str(n), "published") for i in range(300)]
    return Changes(Position(n, n, float(n)), versions=made, payloads={7: b"%d" % n})


def test_a_reader_beside_a_writer_sees_whole_commits(path: Path) -> None:
    begin(path, 0)

    def write_on() -> None:
        ledger = Ledger.open(path)
        for n in range(1, 100_000):
            ledger.commit(rows(n))

    child = fork(write_on)
    seen: list[int] = []
    try:
        deadline = time.monotonic() + 120
        while len(set(seen)) < 25 and time.monotonic() < deadline:
            with Ledger.read(path) as reader:
                n = reader.position.records
                seen.append(n)
                if n:
                    expected = rows(n)
                    assert list(reader.versions()) == expected.versions
                    assert reader.payload(7) == expected.payloads[7]
    finally:
        kill(child)
        outcome(child)
    assert len(set(seen)) >= 25
    assert seen == sorted(seen)


def test_a_fork_leaves_the_ledger_to_its_parent(path: Path) -> None:
    ledger = Ledger.create(path, FACTS)
    ledger.commit(nth(1))
    out, into = os.pipe()

    wait, tell = os.pipe()

    def meddle() -> None:
        nonlocal ledger
        with pytest.raises(LedgerError, match="was opened to read"):
            ledger.commit(nth(2))
        os.write(into, b"!")
        os.read(wait, 1)
        ledger.close()
        del ledger
        gc.collect()

    child = fork(meddle)
    assert os.read(out, 1) == b"!"
    ledger.commit(nth(2))
    with Ledger.read(path) as reader:
        assert reader.position == nth(2).position
    locked = run(lambda: REFUSED if refused(path) else None)
    assert locked == REFUSED  # the child that let go did not let go for us
    ledger.close()
    assert state_on_disk(path) == model_after(2).state()  # though the child lives
    assert run(lambda: commit_and_die(path)) == DIED
    os.write(tell, b"!")
    assert outcome(child) == 0
    assert state_on_disk(path) == model_after(3).state()  # the child left that -wal file alone
    for end in (out, into, wait, tell):
        os.close(end)


ORDINARY = """
import os, sys
from pathlib import Path
from dora_rl.store.ledger import Changes, Ledger, Position

path = Path(sys.argv[1])
ledger = Ledger.create(path, {})
ledger.commit(Changes(Position(1, 1, 1.0)))
out, into = os.pipe()
if not os.fork():
    os.close(into)
    os.read(out, 1)  # until the parent is dead
    sys.exit()
ledger.close()
later = Ledger.open(path)
later.commit(Changes(Position(2, 2, 2.0)))
os._exit(0)
"""


def test_a_fork_that_ends_in_the_ordinary_way(path: Path) -> None:
    """Python closes all that is left when it ends; here, after a later ledger's crash."""
    command = [sys.executable, "-c", ORDINARY, str(path)]
    # It waits for the fork too.
    subprocess.run(command, check=True, timeout=PATIENCE_S, capture_output=True)
    with Ledger.open(path) as ledger:
        assert ledger.position == Position(2, 2, 2.0)


def commit_and_die(path: Path) -> int:
    Ledger.open(path).commit(nth(3))
    os._exit(DIED)


def refused(path: Path) -> bool:
    try:
        Ledger.open(path).close()
    except LedgerError:
        return True
    return False


# Disks that take no more


def commit_within(path: Path, limit: int, again: bool) -> int:
    """In a child: a commit while no file may grow beyond the limit."""
    before = model_after(2).state()
    ledger = Ledger.open(path)
    ledger._db.execute("PRAGMA wal_autocheckpoint=1")
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
    try:
        ledger.commit(nth(3))
    except LedgerError as error:
        assert f"cannot write `{path}`: " in str(error) and "resume the run." in str(error)
        assert state_of(ledger) == before
        if not again:
            return REFUSED
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        ledger.commit(nth(3))
        return AGAIN
    return COMMITTED


@pytest.mark.parametrize("again", [False, True])
def test_every_write_can_be_the_one_that_fails(tmp_path: Path, again: bool) -> None:
    begin(tmp_path / "base" / NAME, 2)
    before, after = model_after(2).state(), model_after(3).state()
    limits = range(0, (tmp_path / "base" / NAME).stat().st_size + 40_000, 2900)
    ends = []
    for limit in limits:
        path = copy_files(tmp_path / "base" / NAME, tmp_path / str(limit))
        ends.append(run(lambda: commit_within(path, limit, again)))  # noqa: B023
        assert state_on_disk(path) == (before if ends[-1] == REFUSED else after)
    first, last = (AGAIN if again else REFUSED), COMMITTED
    assert ends == sorted(ends, key=[first, last].index)
    assert ends.count(first) > 5 and ends.count(last) > 5


def test_a_full_disk_is_said_in_so_many_words(path: Path) -> None:
    begin(path, 2)
    refusals = 0
    with Ledger.open(path) as ledger:
        (pages,) = ledger._db.execute("PRAGMA page_count").fetchone()
        for extra in range(100):
            ledger._db.execute(f"PRAGMA max_page_count={pages + extra}")
            try:
                ledger.commit(nth(3, size=9000))
                break
            except LedgerError as error:
                assert str(error) == (
                    f"cannot write `{path}`: the disk is full. Free space on it, then resume "
                    "the run."
                )
                refusals += 1
                assert state_of(ledger) == model_after(2).state()
                with Ledger.read(path) as reader:
                    assert state_of(reader) == model_after(2).state()
        assert refusals > 5
        assert ledger.position == nth(3).position
    with Ledger.open(path) as ledger:
        assert ledger.position == nth(3).position


@pytest.mark.parametrize("limit", [0, 1, 4096, 20_000, 36_000])
def test_a_ledger_that_cannot_be_made(path: Path, limit: int) -> None:
    def make() -> int:
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
        with pytest.raises(LedgerError, match=r"cannot (lock|write|make) `.*`: .*\."):
            Ledger.create(path, FACTS)
        return REFUSED

    assert run(make) == REFUSED
    assert not path.exists()
    begin(path, 1)
    assert state_on_disk(path) == model_after(1).state()


# Damage


@pytest.fixture(scope="module")
def wreck(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A killed run: commits 1 to 5 in the database, some of them and 6 to 9 in the -wal file."""
    path = tmp_path_factory.mktemp("wreck") / NAME

    def work() -> None:
        ledger = Ledger.create(path, FACTS)
        ledger._db.execute("PRAGMA wal_autocheckpoint=0")
        for n in range(1, 10):
            ledger.commit(nth(n))
            if n in (2, 5):
                ledger._db.execute("PRAGMA wal_checkpoint")
        os._exit(0)

    assert run(work) == 0
    return path


@pytest.fixture(scope="module")
def states() -> dict[Position, State]:
    """What a ledger says after each commit of a run."""
    made = [model_after(n).state() for n in range(13)]
    return {state["position"]: state for state in made}


def judge(path: Path, states: dict[Position, State]) -> str:
    """Read a damaged ledger both ways: a refusal that names it, or exactly one commit."""
    verdicts = []
    for way in (Ledger.read, Ledger.open):
        try:
            with way(path) as ledger:
                if way == Ledger.open:
                    ledger._db.execute("PRAGMA synchronous=OFF")  # to close it is quicker
                state = state_of(ledger)
        except LedgerError as error:
            assert f"`{path}`" in str(error) and "\n" not in str(error)
            verdicts.append("refused")
        else:
            assert state == states[state["position"]]
            verdicts.append(str(state["position"].records // 10))
    (verdict,) = set(verdicts)
    return verdict


def test_the_wreck_itself_is_whole(
    tmp_path: Path, wreck: Path, states: dict[Position, State]
) -> None:
    assert judge(copy_files(wreck, tmp_path), states) == "9"
    assert wreck.stat().st_size > 30_000
    assert wreck.with_name(f"{NAME}-wal").stat().st_size > 30_000


def cuts(size: int, count: int) -> Iterator[int]:
    """Sizes to cut a file to, those around the boundaries of pages among them."""
    yield from (0, 1, 16, 31, 32, 33, 56, 100, 511, 512, 4095, 4096, 4097, size - 1)
    yield from range(0, size, max(1, size // count))


@pytest.mark.parametrize("ending", ["", "-wal"])
def test_a_cut_file(
    tmp_path: Path, wreck: Path, states: dict[Position, State], ending: str
) -> None:
    content = wreck.with_name(NAME + ending).read_bytes()
    verdicts = set()
    for size in cuts(len(content), 50):
        path = copy_files(wreck, tmp_path, {ending: content[:size]})
        verdicts.add(judge(path, states))
    assert "refused" in verdicts if not ending else verdicts == {"5", "6", "7", "8"}


@pytest.mark.parametrize("ending", ["", "-wal"])
def test_a_flipped_bit(
    tmp_path: Path, wreck: Path, states: dict[Position, State], ending: str
) -> None:
    content = wreck.with_name(NAME + ending).read_bytes()
    chance = random.Random(7)
    places = [*range(112), *(chance.randrange(len(content)) for _ in range(130))]
    verdicts = set()
    for place in places:
        flipped = bytearray(content)
        flipped[place] ^= 1 << chance.randrange(8)
        path = copy_files(wreck, tmp_path, {ending: bytes(flipped)})
        verdicts.add(judge(path, states))
    assert len(verdicts) > 1


def test_a_flipped_bit_without_a_wal(
    tmp_path: Path, wreck: Path, states: dict[Position, State]
) -> None:
    """Nothing shadows the pages here: what is not refused was in a gap."""
    whole = copy_files(wreck, tmp_path / "whole")
    Ledger.open(whole).close()
    content = whole.read_bytes()
    chance = random.Random(8)
    verdicts = []
    for _ in range(130):
        place = chance.randrange(len(content))
        flipped = bytearray(content)
        flipped[place] ^= 1 << chance.randrange(8)
        path = copy_files(whole, tmp_path, {"": bytes(flipped)})
        verdicts.append(judge(path, states))
    assert set(verdicts) == {"refused", "9"}
    assert verdicts.count("refused") > 50


def test_files_of_two_moments(tmp_path: Path, states: dict[Position, State]) -> None:
    """A database and a -wal file that do not belong together: each page of them is sound."""
    moments = []
    with Ledger.create(tmp_path / NAME, FACTS) as ledger:
        ledger._db.execute("PRAGMA wal_autocheckpoint=0")
        for n in range(1, 9):
            ledger.commit(nth(n))
            moments.append(copy_files(ledger.path, tmp_path / f"after {n}"))
            if n in (3, 5):
                ledger._db.execute("PRAGMA wal_checkpoint")
                moments.append(copy_files(ledger.path, tmp_path / f"moved {n}"))
    verdicts = set()
    for one in moments:
        for other in moments:
            wal = other.with_name(f"{NAME}-wal").read_bytes()
            path = copy_files(one, tmp_path / "mixed", {"-wal": wal})
            verdicts.add(judge(path, states))
    assert {"refused", "1", "8"} <= verdicts


ALTERATIONS = [
    statement.format(table)
    for table in schema.SCHEMA
    for statement in (
        'DELETE FROM "{0}" WHERE rowid = (SELECT MAX(rowid) FROM "{0}")',
        'UPDATE "{0}" SET seal = seal + 1 WHERE rowid = (SELECT MAX(rowid) FROM "{0}")',
    )
    if table != "prefixes"  # it has no rowid
] + [
    "DELETE FROM prefixes WHERE trajectory = 9",
    "UPDATE prefixes SET start = start + 100 WHERE trajectory = 9",
    "UPDATE versions SET state = 'lost' WHERE version = 1",
    "UPDATE versions SET version = 900 WHERE version = 1",
    "UPDATE snapshots SET sha256 = 'other'",
    "UPDATE head SET now = now + 1",
    "UPDATE payloads SET content = CAST(content AS TEXT) WHERE trajectory = 9",
    "UPDATE batches SET state = CAST(x'ff' AS TEXT)",
    "UPDATE head SET records = records - 1",
    "UPDATE facts SET content = '{}'",
    "INSERT INTO versions SELECT 900, digest, state, seal FROM versions LIMIT 1",
    "CREATE TABLE more (a)",
    "CREATE INDEX more ON versions (state)",
    "CREATE TRIGGER more AFTER INSERT ON batches BEGIN DELETE FROM versions; END",
    "DROP TABLE versions",
    "PRAGMA journal_mode=DELETE",
]


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three commits that ended well."""
    path = tmp_path_factory.mktemp("closed") / NAME
    begin(path, 3)
    return path


@pytest.mark.parametrize("alteration", ALTERATIONS)
def test_what_another_hand_altered(tmp_path: Path, closed: Path, alteration: str) -> None:
    """As SQLite sees it, each of these is a sound database."""
    path = copy_files(closed, tmp_path)
    other = sqlite3.connect(path)
    other.execute(alteration)
    other.commit()
    other.close()
    for way in (Ledger.open, Ledger.read):
        with (
            pytest.raises(LedgerError, match=r"` is damaged: .*\. Restore it from a copy"),
            way(path) as ledger,
        ):
            state_of(ledger)


def test_a_schema_that_is_no_text(path: Path) -> None:
    """SQLite quotes it in its message, and Python fails to decode that."""
    begin(path, 1)
    content = path.read_bytes()
    assert content.count(b'CREATE TABLE "versions"') == 1
    path.write_bytes(content.replace(b'CREATE TABLE "versions"', b'CREATE TABLE "a" \xffbcdef'))
    for way in (Ledger.open, Ledger.read):
        with pytest.raises(LedgerError, match=r"` is damaged: .*\. Restore it from a copy"):
            way(path)


def test_a_damaged_row_is_not_handed_out(path: Path) -> None:
    begin(path, 1)
    other = sqlite3.connect(path)
    other.execute("UPDATE payloads SET content = x'00' WHERE trajectory = 5")
    other.execute("UPDATE batches SET content = x'00' WHERE step = 1")
    other.commit()
    other.close()
    with Ledger.read(path) as reader:
        assert reader.payload(4) is not None
        with pytest.raises(LedgerError, match="a row of payloads is not as it was written"):
            reader.payload(5)
        with pytest.raises(LedgerError, match="a row of batches is not as it was written"):
            list(reader.batches(after=0))
