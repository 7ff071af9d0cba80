"""Prompts that leave no room for a response: refused, or left out, by a setting."""

from collections.abc import Callable
from typing import TypeAlias

from dora_rl.tasks.errors import TaskError
from dora_rl.tasks.sources import Row, Source

CHECKED = 10_000  # rows of a source with an end that are looked at before the run
CHECKED_OF_ENDLESS = 64
_MOST_IN_A_ROW = 1000

WhyTooLong: TypeAlias = Callable[[int], str | None]
"""Why a prompt of so many tokens is not served, and the fix without a full stop; None if it is."""


def problem(why_too_long: WhyTooLong, tokens: int) -> str | None:
    """What is wrong with a prompt of so many tokens, if anything: the end of a sentence."""
    why = why_too_long(tokens)
    return None if why is None else f"a prompt of {tokens} tokens: {why}"


def refusal(where: str, problem: str) -> TaskError:
    return TaskError(f"{where} has {problem}, or set task.long_prompts=skip.")


class Fitting:
    """A source whose rows all fit: one that does not ends the run, or the next takes its place.

    `problem_of` says what is wrong with a row that is too long, and None of one that fits. A row
    is a function of its index even so: the first from there on that fits.
    """

    def __init__(
        self, source: Source, problem_of: Callable[[Row], str | None], *, skip: bool
    ) -> None:
        self._source = source
        self._problem_of = problem_of
        self._skip = skip
        self._last_problem = ""
        self.name = source.name
        self.random_access = source.random_access

    @property
    def length(self) -> int | None:
        return self._source.length

    def row(self, index: int) -> Row | None:
        length = self._source.length
        around = length if length and index < length else None  # after the last comes the first
        for at in range(index, index + _MOST_IN_A_ROW):
            row = self._source.row(at % around if around else at)
            if row is None or self._fits(at, row):
                return row
        raise self._none_fits(index)

    def first(self, num_rows: int) -> Source:
        """The first rows that fit, each once: the set of an evaluation, all of it looked at."""
        rows: list[Row] = []
        at = left_out = 0
        while len(rows) < num_rows and (row := self._source.row(at)) is not None:
            at += 1
            if self._fits(at - 1, row):
                rows.append(row)
                left_out = 0
            else:
                left_out += 1
                if self._source.length is None and left_out == _MOST_IN_A_ROW:
                    break
        if at and not rows:
            raise self._none_fits(0)
        return _Listed(self._source, rows)

    def _fits(self, at: int, row: Row) -> bool:
        problem = self._problem_of(row)
        if problem is not None:
            self._last_problem = problem
            if not self._skip:
                raise refusal(f"row {at} of {self.name}", problem)
        return problem is None

    def _none_fits(self, index: int) -> TaskError:
        return TaskError(
            f"all prompts of {self.name} from row {index} on are too long. The last that was "
            f"looked at has {self._last_problem}."
        )

    def identity(self) -> str:
        return self._source.identity()

    def check(self) -> None:
        """Look at the first rows before the run: those that must fit do, and one does at least."""
        length = self._source.length
        for index in range(CHECKED_OF_ENDLESS if length is None else min(length, CHECKED)):
            row = self._source.row(index)
            if row is None:
                break
            self._fits(index, row)
        self.row(0)


class _Listed:
    """Some rows of a source, under its name and identity."""

    random_access = True

    def __init__(self, source: Source, rows: list[Row]) -> None:
        self.name = source.name
        self.identity = source.identity
        self._rows = rows

    @property
    def length(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> Row | None:
        return self._rows[index] if index < len(self._rows) else None
