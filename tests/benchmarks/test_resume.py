"""The bench of a resume: real files, and a long history that is not replayed."""

import pytest

from dora_rl.benchmarks.resume import History, Plan, Result, measure
from dora_rl.core.protocol.errors import UserError


def history(events: int, *seconds: float) -> History:
    return History(events=events, steps=1, replayed=0, journal_bytes=1, seconds=seconds)


@pytest.mark.slow
def test_a_resume_replays_what_came_after_the_last_snapshot_alone() -> None:
    short, long = measure(Plan(events=(1_000, 11_000), repeats=1)).histories
    assert short.events >= 1_000 and long.events >= 11_000
    assert long.journal_bytes > 2 * short.journal_bytes
    assert short.replayed == short.events  # it has had no snapshot
    assert long.replayed < long.events - 5_000
    assert len(short.seconds) == len(long.seconds) == 1


def test_the_ratio_is_that_of_rounds_side_by_side() -> None:
    result = Result((history(10, 1.0, 2.0, 9.0), history(1_000, 1.5, 2.0)))
    assert result.ratio == 1.25  # the third round has no second half
    assert "1000 events against 10: 1.25 times (goal: 1.5 at most)" in result.summary()


def test_without_a_round_there_is_no_ratio() -> None:
    result = Result((history(10), history(1_000)))
    assert result.ratio is None and result.to_json()["ratio"] is None
    assert result.summary() == []


@pytest.mark.parametrize(
    ("events", "repeats", "said"),
    [((10,), 1, "`10`"), ((0, 10), 1, "`0,10`"), ((1, 2), 0, "`0`")],
)
def test_what_cannot_be_measured_is_refused(
    events: tuple[int, ...], repeats: int, said: str
) -> None:
    with pytest.raises(UserError, match=said):
        Plan(events=events, repeats=repeats)
