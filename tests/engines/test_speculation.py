"""When tokens are proposed, and which: pure functions of counts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_rl.engines.speculation import Acceptance, Continuations, least_probability

texts = st.lists(st.integers(0, 3), max_size=40)
trials = st.lists(st.tuples(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.integers(0, 8)))


def counted(*all_texts: list[int]) -> Continuations:
    made = Continuations()
    for text in all_texts:
        made.count(text, 0, len(text))
    return made


def test_a_row_must_pay_for_itself() -> None:
    """By hand: beside one row of 9 units, one unit more is worth a ninth of a token."""
    assert least_probability(1) == pytest.approx(1 / 9)
    assert least_probability(8) == pytest.approx(1 / 2)
    assert all(least_probability(n) < least_probability(n + 1) < 1 for n in range(100))


def test_what_repeats_is_proposed_further_the_more_often_it_did() -> None:
    found = []
    for times in (1, 2, 5, 20):
        text = [1, 2, 3, 4] * times
        draft = counted(text).likely(text, least=0.1, most=15)
        assert draft.tokens == tuple([1, 2, 3, 4] * 4)[: len(draft.tokens)]
        found.append(len(draft.tokens))
    assert found == sorted(found)
    assert found[0] == 0 and found[-1] > 8


def test_probabilities_are_shares_of_what_followed_with_doubt() -> None:
    """By hand: 7 8 was followed by 1 three times and by 2 once, and by two unseen ones."""
    made = counted([7, 8, 1], [7, 8, 1], [7, 8, 2], [7, 8, 1])
    draft = made.likely([7, 8], least=0.3, most=4)
    assert draft.tokens == (1,)
    assert draft.probabilities == (pytest.approx(3 / 6),)
    assert made.likely([7, 8], least=0.6, most=4).tokens == ()
    assert made.likely([7, 8], least=0.3, most=4, trust=0.5).tokens == ()


def test_the_longest_context_decides() -> None:
    made = counted(*[[1, 2, 3, 5]] * 3, *[[9, 2, 3, 6]] * 9)
    assert made.likely([1, 2, 3], least=0.1, most=1).tokens == (5,)
    assert made.likely([4, 2, 3], least=0.1, most=1).tokens == (6,)


@given(st.lists(texts, max_size=3), texts, st.floats(0.01, 1), st.integers(0, 10))
def test_a_draft_is_as_likely_as_it_must_be(
    counts: list[list[int]], text: list[int], least: float, most: int
) -> None:
    made = counted(*counts)
    draft = made.likely(text, least, most)
    together = 1.0
    for token, probability in zip(draft.tokens, draft.probabilities, strict=True):
        assert 0 < probability < 1
        assert any(token in one for one in counts)
        together *= probability
        assert together >= least
    assert len(draft.tokens) <= most
    assert made.likely(text, least, most) == draft


@given(texts, st.integers(0, 40))
def test_text_can_be_counted_in_pieces(text: list[int], cut: int) -> None:
    cut = min(cut, len(text))
    whole, pieces = counted(text), Continuations()
    pieces.count(text, 0, cut)
    pieces.count(text, cut, len(text))
    assert pieces.counted == whole.counted == len(text)
    assert pieces.likely(text, 0.01, 8) == whole.likely(text, 0.01, 8)


@given(trials)
def test_trust_stays_a_share_and_comes_back(history: list[tuple[list[float], int]]) -> None:
    acceptance = Acceptance()
    assert acceptance.trust == 1
    for probabilities, accepted in history:
        acceptance.add(probabilities, min(accepted, len(probabilities)))
        assert 0 < acceptance.trust <= 1
    for _ in range(1000):
        acceptance.fade()
    assert acceptance.trust == pytest.approx(1, abs=0.01)


def test_proposals_that_fail_are_trusted_less() -> None:
    acceptance = Acceptance()
    for _ in range(50):
        acceptance.add((0.9, 0.8), 0)
    assert acceptance.trust < 0.2
    for _ in range(50):
        acceptance.add((0.9, 0.8), 2)
    assert acceptance.trust > 0.9
