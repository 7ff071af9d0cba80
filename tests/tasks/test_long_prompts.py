"""Rows that are too long: by the length of their prompts, here the number of letters."""

from typing import Any

import pytest

from dora_rl.tasks.errors import TaskError
from dora_rl.tasks.long_prompts import Fitting
from dora_rl.tasks.sources import Row, Source, open_source

LONG = "long"


def fitting(prompts: Any, *, skip: bool = True) -> Fitting:
    def problem_of(row: Row) -> str | None:
        return "too many letters. Take some away" if row["prompt"] == LONG else None

    source: Source = open_source(
        prompts, seed=0, key="prompt", options={}, check=lambda *_: None, import_path=()
    )
    return Fitting(source, problem_of, skip=skip)


def prompts_of(source: Source) -> list[str]:
    assert source.length is not None
    rows = (source.row(index) for index in range(source.length))
    return [row["prompt"] for row in rows if row is not None]


def test_what_fits_is_found_behind_any_number_of_long_ones() -> None:
    rows = ["a", *[LONG] * 1500, "b", *[LONG] * 1500]
    assert prompts_of(fitting(rows).first(9)) == ["a", "b"]


def endless(position: int, seed: int) -> str:
    return "a" if position == 3 else LONG


def test_an_endless_source_is_not_searched_for_ever() -> None:
    assert prompts_of(fitting(endless).first(2)) == ["a"]


def never(position: int, seed: int) -> str:
    return LONG


@pytest.mark.parametrize("prompts", [[LONG] * 3, never], ids=["rows", "endless"])
def test_that_none_fits_is_told_with_the_fix(prompts: Any) -> None:
    with pytest.raises(TaskError, match=r"from row 0 on are too long.* Take some away\.$"):
        fitting(prompts).first(2)
    with pytest.raises(TaskError, match=r"from row 0 on are too long.* Take some away\.$"):
        fitting(prompts).row(0)


def test_a_row_is_a_function_of_its_index() -> None:
    source = fitting(["a", LONG, "b", LONG])
    rows = [source.row(index) for index in (3, 2, 1, 0)]
    assert [row and row["prompt"] for row in rows] == ["a", "b", "b", "a"]
    assert source.row(4) is None


def test_a_refusal_names_the_row_and_both_fixes() -> None:
    with pytest.raises(TaskError, match=r"^row 1 of .*letters\. Take some away, or set task\."):
        fitting(["a", LONG], skip=False).check()
