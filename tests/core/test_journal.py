"""The journal: reproducible bytes, and no cut or altered one is ever read."""

import io
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_rl.core.history.journal import (
    Closing,
    Header,
    JournalWriter,
    Record,
    read_journal,
    verify_journal,
)
from dora_rl.core.protocol import commands as c
from dora_rl.core.protocol import events as e
from dora_rl.core.protocol.errors import JournalError
from dora_rl.core.protocol.settings import Settings
from dora_rl.core.protocol.types import Segment

SETTINGS = Settings(groups_per_step=1, group_size=1)
FINISHED = e.TrajectoryFinished(0, 1, 5, (Segment(0, "d0", 5),))
STORY: list[tuple[float, e.Event, Sequence[c.Command]]] = [
    (0.0, e.WeightsPublished(0, "d0"), [c.FetchPrompts(0, 1), c.SetTimer(10.0)]),
    (0.1 + 0.2, e.PromptsAvailable(0, 1), [c.Start(0, 1, 0, 0)]),
    (2, FINISHED, [c.Score(0, 1)]),
]


def written(reason: str = "done", meta: Any = None) -> str:
    out = io.StringIO()
    writer = JournalWriter(out.write, SETTINGS, meta)
    for now, event, commands in STORY:
        writer.handled(now, event, commands)
    writer.refused(3.5, e.BatchTrained(9), "step 9 is not being trained: `é`")
    writer.close(reason)
    return out.getvalue()


def lines(text: str) -> list[str]:
    return list(io.StringIO(text, newline="\n"))


JOURNAL = written(meta={"scenario": "default", "seed": 7})


def refusal(text: str, read: Any = read_journal) -> str:
    """Read to the end, as every reader must; the error's message."""
    with pytest.raises(JournalError) as caught:
        list(read(lines(text)))
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_what_was_written_is_read() -> None:
    header, *records, closing = read_journal(lines(JOURNAL))
    assert header == Header(SETTINGS, {"scenario": "default", "seed": 7})
    assert closing == Closing("done", 4)
    assert all(isinstance(record, Record) for record in records)
    told = [(r.now, r.event, r.commands) for r in records if isinstance(r, Record)]
    assert told[:3] == [(now, event, tuple(commands)) for now, event, commands in STORY]
    refused = records[3]
    assert isinstance(refused, Record)
    assert (refused.line, refused.refused) == (5, "step 9 is not being trained: `é`")
    assert verify_journal(lines(JOURNAL)) == closing


def test_the_bytes_are_canonical_and_reproducible() -> None:
    assert written() == written()
    assert JOURNAL.isascii()
    assert (
        lines(JOURNAL)[2]
        == '[0.30000000000000004,["PromptsAvailable",0,1,false],[["Start",0,1,0,0,0]]]\n'
    )
    assert lines(JOURNAL)[3] == '[2,["TrajectoryFinished",0,1,5,[[0,"d0",5]]],[["Score",0,1]]]\n'
    assert lines(JOURNAL)[4].startswith('[3.5,["BatchTrained",9],null,"step 9')
    assert set(json.loads(lines(JOURNAL)[-1])) == {"end", "records", "sha256"}


@given(st.integers(0, len(JOURNAL) - 1))
def test_any_cut_is_refused(length: int) -> None:
    for read in (read_journal, verify_all):
        message = refusal(JOURNAL[:length], read)
        assert message.startswith("journal line ")


@given(st.integers(0, len(JOURNAL) - 1), st.integers(0, 255))
def test_any_altered_byte_is_refused(place: int, byte: int) -> None:
    if chr(byte) == JOURNAL[place]:
        byte ^= 1
    altered = JOURNAL[:place] + chr(byte) + JOURNAL[place + 1 :]
    for read in (read_journal, verify_all):
        refusal(altered, read)


@pytest.mark.parametrize("place", range(len(lines(JOURNAL))))
def test_a_missing_or_doubled_line_is_refused(place: int) -> None:
    whole = lines(JOURNAL)
    refusal("".join(whole[:place] + whole[place + 1 :]))
    refusal("".join(whole[:place] + whole[place : place + 1] + whole[place:]))


def verify_all(text: list[str]) -> list[Closing]:
    return [verify_journal(text)]


def test_each_refusal_names_the_line_and_what_to_do() -> None:
    whole = lines(JOURNAL)
    assert refusal("") == ("journal line 1: the journal is empty. Give a journal that a run wrote.")
    cut = refusal(JOURNAL[:-20])
    assert cut.startswith("journal line 6: cut in the middle.") and "run again" in cut
    unclosed = refusal("".join(whole[:-1]))
    assert unclosed.startswith("journal line 5: the closing line is missing.")
    assert "run again" in unclosed
    fewer = refusal("".join(whole[:3] + whole[4:]))
    assert fewer.startswith("journal line 5: 4 records were written, 3 are here.")
    altered = refusal(JOURNAL.replace('"Score",0', '"Score",1'))
    assert altered.startswith("journal line 6: the digest does not match lines 1 to 6.")
    assert refusal(JOURNAL + "\n").startswith("journal line 7: ")
    assert refusal(JOURNAL + whole[1]).startswith("journal line 7: something follows")
    assert refusal(JOURNAL.replace('"Start"', '"Begin"')).startswith(
        "journal line 3: unknown name of a command: `'Begin'`"
    )
    assert refusal("é" + JOURNAL).startswith("journal line 1: not ASCII")


def test_a_strange_record_is_refused() -> None:
    whole = lines(JOURNAL)
    for strange in ('["0",["TimerFired"],[]]', '[0,["TimerFired"]]', "[]", "3", "[true,[],[]]"):
        message = refusal("".join([whole[0], strange + "\n", *whole[2:]]))
        assert message.startswith("journal line 2: "), strange


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"format": "a diary"}, "not a dora-rl journal"),
        ({"version": 3}, "written in format 3, this dora-rl reads up to 2. Use the dora-rl"),
        ({"version": "1"}, "unknown format version"),
        ({"version": 0}, "unknown format version"),
        ({"meta": []}, "a header has format, meta, promises, settings, version"),
        ({"extra": 1}, "a header has format, meta, promises, settings, version"),
        ({"settings": {}}, "Settings: missing fields: `paradigm`"),
        ({"promises": {"one_version": False}}, "`multi_version` promised"),
    ],
)
def test_another_header_is_refused(changes: dict[str, Any], problem: str) -> None:
    whole = lines(JOURNAL)
    header = json.dumps({**json.loads(whole[0]), **changes}) + "\n"
    message = refusal("".join([header, *whole[1:]]))
    assert message.startswith("journal line 1: ")
    assert problem in message


def test_a_text_that_is_no_journal_is_refused() -> None:
    for text in ("hello\n", "[1,2]\n", "{}\n", "null\n", "[" * 100_000 + "\n"):
        assert refusal(text).startswith("journal line 1: ")


def test_nothing_follows_the_closing_line() -> None:
    writer = JournalWriter(io.StringIO().write, SETTINGS)
    writer.close("done")
    with pytest.raises(JournalError, match="closed"):
        writer.handled(0.0, e.TimerFired(), [])


@pytest.mark.parametrize("now", [float("nan"), float("inf")])
def test_a_time_that_json_cannot_hold_is_refused_and_not_written(now: float) -> None:
    out = io.StringIO()
    writer = JournalWriter(out.write, SETTINGS)
    before = out.getvalue()
    with pytest.raises(JournalError, match="cannot be written"):
        writer.handled(now, e.TimerFired(), [])
    assert out.getvalue() == before
    writer.close("done")
    assert verify_journal(lines(out.getvalue())).records == 0
