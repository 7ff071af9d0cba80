"""Sampling noise: uniform, independent, and the same on every machine for ever."""

import math
import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_rl.engines import noise
from dora_rl.engines.noise import uniform

DRAWS = 20_000
words = st.integers(0, 2**64 - 1)

# How a stream of numbers may come about: along each of the arguments.
STREAMS: dict[str, Callable[[int], float]] = {
    "positions": lambda i: uniform(7, 3, i),
    "trajectories": lambda i: uniform(7, i, 3),
    "seeds": lambda i: uniform(i, 7, 3),
    "far trajectories": lambda i: uniform(7, 2**64 - 1 - i, 0),
    "first tokens of groups of 16": lambda i: uniform(0, 16 * i, 0),
}


def correlation(xs: Sequence[float], ys: Sequence[float]) -> float:
    return statistics.correlation(xs, ys)


@pytest.mark.parametrize("stream", STREAMS)
def test_uniform(stream: str) -> None:
    numbers = [STREAMS[stream](i) for i in range(DRAWS)]
    bins = 64
    counts = [0] * bins
    for number in numbers:
        counts[int(number * bins)] += 1
    expected = DRAWS / bins
    stat = sum((count - expected) ** 2 / expected for count in counts)
    assert abs(stat - (bins - 1)) < 4 * math.sqrt(2 * (bins - 1))
    # The top bits are not all: what is below the bins is uniform too.
    fine = statistics.fmean(number * bins % 1 for number in numbers)
    assert abs(fine - 0.5) < 4 * math.sqrt(1 / 12 / DRAWS)


@pytest.mark.parametrize("stream", STREAMS)
def test_neighbours_are_independent(stream: str) -> None:
    numbers = [STREAMS[stream](i) for i in range(DRAWS)]
    for lag in (1, 2, 16):
        assert abs(correlation(numbers[:-lag], numbers[lag:])) < 4 / math.sqrt(DRAWS)
    # Pairs fill the square evenly.
    cells = [0] * 64
    for x, y in pairwise(numbers):
        cells[8 * int(8 * x) + int(8 * y)] += 1
    expected = (DRAWS - 1) / 64
    stat = sum((count - expected) ** 2 / expected for count in cells)
    assert stat < 63 + 5 * math.sqrt(2 * 63)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((7, 3), (7, 4)),
        ((7, 3), (8, 3)),
        ((3, 7), (7, 3)),
        ((0, 0), (0, 2**64 - 1)),
        ((0, 1), (1, 0)),
    ],
)
def test_trajectories_are_independent(one: tuple[int, int], other: tuple[int, int]) -> None:
    xs = [uniform(*one, i) for i in range(DRAWS)]
    ys = [uniform(*other, i) for i in range(DRAWS)]
    assert abs(correlation(xs, ys)) < 4 / math.sqrt(DRAWS)
    assert not set(xs) & set(ys)


@given(words, words, words)
def test_a_pure_function_into_the_open_interval(seed: int, trajectory: int, at: int) -> None:
    number = uniform(seed, trajectory, at)
    assert 0 < number < 1
    assert uniform(seed, trajectory, at) == number


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (b"\0" * 8, 0.0),
        (b"\0" * 7 + b"\x80", 0.5),
        (b"\xff" * 8, 1.0),
    ],
)
def test_the_ends_are_never_reached(
    monkeypatch: pytest.MonkeyPatch, block: bytes, expected: float
) -> None:
    made = SimpleNamespace(digest=lambda: block)
    monkeypatch.setattr(noise.hashlib, "blake2b", lambda *_, **__: made)
    number = uniform(0, 0, 0)
    assert 0 < number < 1
    assert number == pytest.approx(expected, abs=2**-50)


def test_the_same_for_ever() -> None:
    """A run that is resumed by a later release must continue with the same noise."""
    pinned = {
        (0, 0, 0): 0.15674255346555804,
        (0, 0, 1): 0.6269999134633439,
        (0, 1, 0): 0.46336674681515017,
        (1, 0, 0): 0.3377613412673092,
        (7, 123456789, 4096): 0.41003629310441864,
        (2**64 - 1, 2**64 - 1, 2**64 - 1): 0.5929208270283521,
    }
    for arguments, expected in pinned.items():
        assert uniform(*arguments) == pytest.approx(expected, abs=2**-50)
