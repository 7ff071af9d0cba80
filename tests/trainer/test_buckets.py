"""Which sequences go together: each exactly once, little padding, fair shares."""

from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from dora_rl.trainer.buckets import MAX_PADDING, microbatches, minibatches, plan, shares

LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=60)


@given(LENGTHS, st.integers(1, 600))
def test_microbatches_hold_every_row_once_within_budget_and_padding(
    lengths: list[int], budget: int
) -> None:
    batches = microbatches(range(len(lengths)), lengths, budget)
    assert Counter(row for rows in batches for row in rows) == Counter(range(len(lengths)))
    for rows in batches:
        slots = len(rows) * max(lengths[row] for row in rows)
        padding = slots - sum(lengths[row] for row in rows)
        assert padding < MAX_PADDING * slots
        assert slots <= budget or len(rows) == 1


@given(LENGTHS, st.integers(1, 600))
def test_a_microbatch_is_closed_only_for_a_reason(lengths: list[int], budget: int) -> None:
    batches = microbatches(range(len(lengths)), lengths, budget)
    for rows, following in pairwise(batches):
        more = (*rows, following[0])
        slots = len(more) * max(lengths[row] for row in more)
        padding = slots - sum(lengths[row] for row in more)
        assert slots > budget or padding >= MAX_PADDING * slots


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 99)), min_size=1, max_size=40),
    st.integers(1, 6),
)
def test_minibatches_keep_groups_whole_and_tokens_even(
    rows: list[tuple[int, int]], count: int
) -> None:
    groups, lengths = [group for group, _ in rows], [length for _, length in rows]
    parts = minibatches(groups, lengths, count)
    assert Counter(row for part in parts for row in part) == Counter(range(len(rows)))
    assert len(parts) == min(count, len(set(groups)))
    for group in set(groups):
        assert sum(any(groups[row] == group for row in part) for part in parts) == 1
    sizes = [sum(lengths[row] for row in part) for part in parts]
    largest = max(sum(n for g, n in rows if g == group) for group in set(groups))
    assert max(sizes) - min(sizes) <= largest


@given(LENGTHS, st.integers(1, 600), st.integers(1, 5))
def test_every_rank_has_equally_many_calls(lengths: list[int], budget: int, ranks: int) -> None:
    planned = plan(range(len(lengths)), lengths, budget, ranks)
    assert len(planned) == ranks
    assert len({len(mine) for mine in planned}) == 1
    found = Counter(row for mine in planned for rows in mine for row in rows)
    assert found == Counter(range(len(lengths)))
    tokens = [
        sum(lengths[r] for r in share) for share in shares(range(len(lengths)), lengths, ranks)
    ]
    assert max(tokens) - min(tokens) <= max(lengths)


def test_the_order_does_not_matter_to_what_goes_together() -> None:
    assert microbatches([2, 0, 1], [5, 9, 5], 100) == [(1,), (0, 2)]
    assert microbatches([1, 2, 0], [5, 9, 5], 100) == [(1,), (0, 2)]
