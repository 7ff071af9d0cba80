"""A batch dealt to ranks: every row to one of them, nothing of another's, tokens even."""

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dora_rl.samples import Span
from dora_rl.trainer.batches import make_batch
from dora_rl.trainer.shares import Share, deal, padded
from tests.trainer.samples import VOCAB, batch_of, sample


@given(st.integers(0, 99), st.integers(1, 4), st.integers(1, 5), st.integers(1, 4))
def test_every_row_goes_to_one_rank_and_comes_back(
    seed: int, groups: int, ranks: int, minibatches: int
) -> None:
    batch = make_batch(batch_of(seed, groups=groups), vocab_size=VOCAB)
    dealt = deal(batch, minibatches, ranks)
    assert sorted(row for rows in dealt.rows for row in rows) == list(range(len(batch.samples)))
    assert len(dealt.shares) == ranks
    found = torch.full_like(batch.rollout_logprobs_T, float("nan"))
    for rows, share in zip(dealt.rows, dealt.shares, strict=True):
        mine = share.batch()
        assert mine.samples == tuple(batch.samples[row] for row in rows)
        assert len(mine.mask_T) <= share.width
        assert share.num_minibatches == len(dealt.minibatches)
        for part, whole in enumerate(dealt.minibatches):
            assert [rows[r] for r in share.rows(part)] == [row for row in rows if row in whole]
        found[batch.flat(rows)] = mine.rollout_logprobs_T
    assert torch.equal(found, batch.rollout_logprobs_T)
    # What rank 0 lacks it could not report; see `Stepper._tallied`.
    assert all(dealt.shares[0].rows(part) for part in range(len(dealt.minibatches)))
    if ranks > 1 and groups > 1:
        most = max(batch.lengths)
        for whole in dealt.minibatches:
            tokens = [
                sum(batch.lengths[row] for row in rows if row in whole) for rows in dealt.rows
            ]
            assert max(tokens) - min(tokens) <= most


def test_a_rank_is_sent_its_own_rows_alone() -> None:
    batch = make_batch(batch_of(1, groups=8), vocab_size=VOCAB)
    sizes = [len(msgspec.msgpack.encode(share)) for share in deal(batch, 2, 4).shares]
    whole = len(msgspec.msgpack.encode(deal(batch, 2, 1).shares[0]))
    assert sum(sizes) < 1.1 * whole
    assert max(sizes) < 0.35 * whole


def test_a_rank_without_rows_has_an_empty_batch() -> None:
    batch = make_batch([sample(0, observed=(Span(1, 2),))], vocab_size=VOCAB)
    _, idle = deal(batch, 3, 2).shares
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(idle), type=Share)
    assert again == idle
    empty = idle.batch()
    assert empty.lengths == empty.starts == ()
    assert empty.mask_T.dtype == torch.bool and empty.mask_T.numel() == 0
    assert idle.rows(0) == ()
    assert idle.versions == (0,)


@pytest.mark.parametrize("count", [1, 3])
def test_missing_calls_are_empty(count: int) -> None:
    assert padded([(1, 2)], count) == [(1, 2), *[()] * (count - 1)]
