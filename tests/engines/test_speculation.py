"""When tokens are proposed, and which: pure functions of counts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_rl.engines.speculation import (
    MOST_TOKENS,
    TYPICAL,
    Acceptance,
    Continuations,
    PassCosts,
    Speculation,
    most_sequences,
    worthwhile,
)

texts = st.lists(st.integers(0, 3), max_size=40)
trials = st.lists(st.tuples(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.integers(0, 8)))


def counted(*all_texts: list[int]) -> Continuations:
    made = Continuations()
    for text in all_texts:
        made.count(text, 0, len(text))
    return made


def test_costs_lie_on_lines_between_those_known() -> None:
    costs = PassCosts((1, 2, 4), (10.0, 15.0, 17.0))
    assert [costs.of(rows) for rows in range(1, 7)] == [10, 15, 16, 17, 18, 19]


def test_a_quick_pass_is_not_held_up_by_looking_for_drafts() -> None:
    quick, long = PassCosts((1, 16), (2e-4, 5e-4)), PassCosts((1, 16), (0.010, 0.028))
    assert most_sequences(Speculation.AUTO, quick) == 1
    assert most_sequences(Speculation.AUTO, long) == 4
    assert most_sequences(Speculation.ON, quick) == 4


def test_a_row_must_pay_for_itself() -> None:
    """By hand: beside one row of 9 units, one unit more is worth a ninth of a token."""
    assert worthwhile([0.12], 1, TYPICAL) == 1
    assert worthwhile([0.10], 1, TYPICAL) == 0
    assert worthwhile([0.40], 4, TYPICAL) == 1  # of 12 units for four: a third
    assert worthwhile([0.30], 4, TYPICAL) == 0


def test_a_second_row_that_is_dear_needs_more_than_one_token() -> None:
    """By hand: passes of 10, 15, 16 and 17 units, as where a lone row has a kernel of its own."""
    costs = PassCosts((1, 2, 4), (10.0, 15.0, 17.0))
    assert worthwhile([0.45], 1, costs) == 0
    assert worthwhile([0.45, 0.9, 0.9], 1, costs) == 3


@given(
    st.lists(st.floats(0, 1), max_size=8),
    st.integers(1, 8),
    st.lists(st.floats(0.1, 100), min_size=3, max_size=3),
)
def test_no_other_number_gives_more(
    probabilities: list[float], sequences: int, steps: list[float]
) -> None:
    costs = PassCosts((1, 4, 16), (steps[0], sum(steps[:2]), sum(steps)))
    best = worthwhile(probabilities, sequences, costs)

    def rate(count: int) -> float:
        together, expected = 1.0, float(sequences)
        for probability in probabilities[:count]:
            together *= probability
            expected += together
        return expected / costs.of(sequences + count)

    assert all(rate(best) >= rate(count) for count in range(len(probabilities) + 1))


def test_what_repeats_is_proposed_further_the_more_often_it_did() -> None:
    found = []
    for times in (1, 2, 5, 20):
        text = [1, 2, 3, 4] * times
        draft = counted(text).likely(text)
        assert draft.tokens == tuple([1, 2, 3, 4] * 4)[: len(draft.tokens)]
        found.append(len(draft.tokens))
    assert found == sorted(found)
    assert found[0] == 0 and found[-1] > 8


def test_probabilities_are_shares_of_what_followed_with_doubt() -> None:
    """By hand: 7 8 was followed by 1 three times and by 2 once, and by two unseen ones."""
    made = counted([7, 8, 1], [7, 8, 1], [7, 8, 2], [7, 8, 1])
    draft = made.likely([7, 8])
    assert draft.tokens == (1,)
    assert draft.probabilities == (pytest.approx(3 / 6),)
    assert made.likely([7, 8], trust=0.5).probabilities == (pytest.approx(3 / 12),)
    assert made.likely([7, 8], trust=0.1).tokens == ()


def test_the_longest_context_decides() -> None:
    made = counted(*[[1, 2, 3, 5]] * 3, *[[9, 2, 3, 6]] * 9)
    assert made.likely([1, 2, 3]).tokens == (5,)
    assert made.likely([4, 2, 3]).tokens == (6,)


@given(st.lists(texts, max_size=3), texts)
def test_a_draft_is_as_likely_as_it_must_be(counts: list[list[int]], text: list[int]) -> None:
    made = counted(*counts)
    draft = made.likely(text)
    together = 1.0
    for token, probability in zip(draft.tokens, draft.probabilities, strict=True):
        assert 0 < probability < 1
        assert any(token in one for one in counts)
        together *= probability
        assert together >= 0.1
    assert len(draft.tokens) <= MOST_TOKENS
    assert made.likely(text) == draft


@given(texts, st.integers(0, 40))
def test_text_can_be_counted_in_pieces(text: list[int], cut: int) -> None:
    cut = min(cut, len(text))
    whole, pieces = counted(text), Continuations()
    pieces.count(text, 0, cut)
    pieces.count(text, cut, len(text))
    assert pieces.counted == whole.counted == len(text)
    assert pieces.likely(text) == whole.likely(text)


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
