"""A journal read from the middle: proven by the digests of two places in it, or refused."""

import random
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_rl.core.history.journal import (
    JournalWriter,
    Record,
    Written,
    check_between,
    closed,
    read_between,
    read_header,
    read_journal,
    verify_journal,
)
from dora_rl.core.protocol.errors import JournalError
from dora_rl.core.protocol.settings import Settings
from tests.core.adversary import Adversary, stir

SETTINGS = Settings(groups_per_step=2, group_size=2, max_staleness=2)


def storm() -> tuple[list[str], list[Written]]:
    """The lines of a journal, and what was written after each of them."""
    lines: list[str] = []
    writer = JournalWriter(lines.append, SETTINGS, {"seed": 3})
    places = [writer.written]

    def observe(*told) -> None:
        writer.handled(*told)
        places.append(writer.written)

    world = Adversary(SETTINGS, observe)
    world.join(0)
    stir(world, random.Random(3), 60, faults=True)
    writer.close("done")
    return lines, places


LINES, PLACES = storm()
TWO_PLACES = st.lists(st.integers(0, len(PLACES) - 1), min_size=2, max_size=2).map(sorted)


def after(place: Written) -> list[str]:
    return LINES[place.records + 1 :]


def test_the_header_is_the_first_place() -> None:
    header, place = read_header(LINES[0])
    assert header.settings == SETTINGS and header.meta == {"seed": 3}
    assert place == PLACES[0]


@given(TWO_PLACES)
def test_what_lies_between_two_places_is_proven_and_read(at: list[int]) -> None:
    since, until = PLACES[at[0]], PLACES[at[1]]
    check_between(after(since), since, until)
    records = [part for part in read_journal(LINES) if isinstance(part, Record)]
    assert list(read_between(after(since), since, until)) == records[since.records : until.records]


@given(TWO_PLACES.filter(lambda at: at[0] < at[1]), st.data())
def test_what_was_altered_or_cut_between_them_is_refused(
    at: list[int], data: st.DataObject
) -> None:
    since, until = PLACES[at[0]], PLACES[at[1]]
    lines = list(islice(after(since), until.records - since.records))
    hit = data.draw(st.integers(0, len(lines) - 1))
    how = data.draw(st.sampled_from(["altered", "cut", "swapped digest"]))
    if how == "altered":
        where = data.draw(st.integers(0, len(lines[hit]) - 2))
        lines[hit] = lines[hit][:where] + "~" + lines[hit][where + 1 :]
        if lines[hit] == after(since)[hit]:
            return
    elif how == "cut":
        del lines[hit:]
    else:
        since = since._replace(sha256=until.sha256)
    with pytest.raises(JournalError, match="do not match the SHA-256 recorded in the ledger"):
        check_between(lines, since, until)


@given(st.integers(0, len(PLACES) - 1))
def test_the_first_part_is_closed_into_a_whole_journal(at: int) -> None:
    whole = list(closed(iter(LINES), PLACES[at], "killed"))
    assert whole[:-1] == LINES[: at + 1]
    assert verify_journal(whole).reason == "killed"
    with pytest.raises(JournalError, match="do not match the SHA-256"):
        list(closed(iter(LINES), PLACES[at]._replace(sha256="0" * 64), "killed"))


def test_of_a_run_that_has_committed_nothing_there_is_no_journal_yet() -> None:
    with pytest.raises(JournalError, match="just begun"):
        list(closed(iter(LINES[:1]), Written(0, 0, ""), "the run has not ended"))


@given(st.integers(0, len(PLACES) - 1))
def test_a_writer_that_continues_writes_the_same_bytes(at: int) -> None:
    lines = LINES[: at + 1]
    writer = JournalWriter(lines.append, SETTINGS, after=PLACES[at])
    for record in (part for part in read_journal(LINES) if isinstance(part, Record)):
        if record.line > at + 1:
            writer.handled(record.now, record.event, record.commands)
    writer.close("done")
    assert lines == LINES


@pytest.mark.parametrize("line", ["{", '{"a": 1}', "NaN", "[" * 100_000])
def test_a_line_that_is_no_record_is_refused(line: str) -> None:
    with pytest.raises(JournalError, match="journal line 2"):
        list(read_between([line + "\n"], PLACES[0], PLACES[1]))
