"""Cycles that are found in pieces: none is kept for good, and nothing stays frozen."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from dora_rl.machine.cycle_search import _PIECE_S, _WHOLE_S, CycleSearch


class Ring:
    """Refers to itself: only a search frees it."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def no_search_by_itself() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def dropped() -> "weakref.ref[Ring]":
    return weakref.ref(Ring())


def test_a_cycle_that_dies_young_is_found_when_a_piece_is_due() -> None:
    clock = Clock()
    with CycleSearch(clock) as search:
        ring = dropped()
        clock.now = 0.9 * _PIECE_S
        search.step()
        assert ring() is not None
        clock.now = 1.1 * _PIECE_S
        search.step()
        assert ring() is None


def test_a_cycle_that_dies_old_is_found_by_the_search_of_everything() -> None:
    clock = Clock()
    with CycleSearch(clock) as search:
        held = Ring()
        ring = weakref.ref(held)
        clock.now = 1.1 * _PIECE_S
        search.step()
        del held
        clock.now = 0.9 * _WHOLE_S
        search.step()
        assert ring() is not None, "it was frozen: that is what makes a piece short"
        clock.now = 1.1 * _WHOLE_S
        search.step()
        assert ring() is None
        ring = dropped()
        clock.now += 1.1 * _PIECE_S
        search.step()
        assert ring() is None


def test_nothing_is_frozen_afterwards() -> None:
    with pytest.raises(KeyboardInterrupt), CycleSearch():
        assert gc.get_freeze_count()
        raise KeyboardInterrupt
    assert not gc.get_freeze_count()
