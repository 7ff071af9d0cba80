"""Which sequences go together: each exactly once, little padding, fair shares."""

from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from dora_rl.trainer.buckets import (
    MAX_PADDING,
    assign,
    microbatches,
    minibatches,
    packs,
    shared_packs,
    shares,
)

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


@given(LENGTHS, st.integers(1, 5), st.integers(1, 5))
def test_every_rank_has_its_share_of_every_minibatch(
    lengths: list[int], count: int, ranks: int
) -> None:
    parts = minibatches(range(len(lengths)), lengths, count)
    rank_of = assign(parts, lengths, ranks)
    assert len(rank_of) == len(lengths)
    for part in parts:
        tokens = [sum(lengths[r] for r in part if rank_of[r] == rank) for rank in range(ranks)]
        assert max(tokens) - min(tokens) <= max(lengths)
        assert any(rank_of[row] == 0 for row in part)
        # It is the deal of the part by itself.
        for rank, rows in enumerate(shares(part, lengths, ranks)):
            assert all(rank_of[row] == rank for row in rows)


@given(LENGTHS, st.integers(1, 600))
def test_packs_hold_every_row_once_within_the_budget(lengths: list[int], budget: int) -> None:
    found = packs(range(len(lengths)), lengths, budget)
    assert Counter(row for rows in found for row in rows) == Counter(range(len(lengths)))
    sizes = [sum(lengths[row] for row in rows) for rows in found]
    for rows, size in zip(found, sizes, strict=True):
        assert size <= budget or len(rows) == 1
    # No two could be one: more than half of every pack but one is used.
    assert all(one + other > budget for one, other in pairwise(sorted(sizes)))


@given(st.lists(st.tuples(st.integers(1, 60), LENGTHS), max_size=6), st.integers(1, 600))
def test_packs_of_shared_prompts_count_a_prompt_once(
    drawn: list[tuple[int, list[int]]], budget: int
) -> None:
    lengths, families = [], []
    for prompt, responses in drawn:
        rows = range(len(lengths), len(lengths) + len(responses))
        lengths += [prompt + own - 1 for own in responses]
        families += [(prompt, rows)] if responses else []
    found = shared_packs(families, lengths, budget)
    assert Counter(row for rows in found for row in rows) == Counter(range(len(lengths)))
    prompt_of = {row: (number, p) for number, (p, rows) in enumerate(families) for row in rows}
    for rows in found:
        prompts = sum(size for _, size in {prompt_of[row] for row in rows})
        own = sum(lengths[row] - prompt_of[row][1] for row in rows)
        assert prompts + own <= budget or len(rows) == 1
    assert found == shared_packs(families, lengths, budget)


def test_the_order_does_not_matter_to_what_goes_together() -> None:
    assert microbatches([2, 0, 1], [5, 9, 5], 100) == [(1,), (0, 2)]
    assert microbatches([1, 2, 0], [5, 9, 5], 100) == [(1,), (0, 2)]
