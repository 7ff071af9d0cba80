"""Samples as tensors: what goes where, and what is refused."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dora_rl.core.protocol.types import Segment
from dora_rl.samples import Span
from dora_rl.trainer.batches import collate, collate_shared, make_batch
from dora_rl.trainer.errors import StepRejected
from tests.trainer.samples import VOCAB, batch_of, sample


@given(st.integers(0, 99), st.sets(st.integers(0, 11), min_size=1))
def test_positions_predict_the_tokens_of_the_flat_layout(seed: int, chosen: set[int]) -> None:
    batch = make_batch(batch_of(seed), vocab_size=VOCAB)
    rows = tuple(sorted(chosen))
    micro = collate(batch, rows)
    width = micro.input_BT.shape[1]
    for place, token, flat in zip(
        micro.positions_T.tolist(), micro.targets_T.tolist(), micro.flat_T.tolist(), strict=True
    ):
        row, column = rows[place // width], place % width
        whole = batch.tokens[row].tolist()
        assert whole[column + 1] == token
        assert micro.input_BT[place // width, : column + 1].tolist() == whole[: column + 1]
        assert flat == batch.starts[row] + column + 1 - batch.prompts[row]
    assert len(micro.targets_T) == sum(batch.responses[row] for row in rows)
    assert micro.padding == sum(width - batch.lengths[row] for row in rows)
    assert batch.sequence(rows).bincount().tolist() == [batch.responses[row] for row in rows]


def test_the_order_of_the_samples_does_not_matter() -> None:
    samples = batch_of(3)
    one, other = (make_batch(s, vocab_size=VOCAB) for s in (samples, tuple(reversed(samples))))
    assert one.samples == other.samples
    assert torch.equal(one.rollout_logprobs_T, other.rollout_logprobs_T)


def test_what_was_observed_is_nobodys() -> None:
    seen = sample(1, tokens=(6, 7, 8, 9), observed=(Span(1, 3),), version=5)
    batch = make_batch([sample(0, version=5), seen], vocab_size=VOCAB)
    assert batch.mask_T.tolist() == [True] * 5 + [False] * 2 + [True]
    assert batch.version_T.tolist() == [5] * 5 + [-1, -1, 5]
    assert collate(batch, (0,)).sampled_T is None
    sampled = collate(batch, (0, 1)).sampled_T
    assert sampled is not None
    assert sampled.tolist() == [0, 1, 2, 3, 4, 7]


@pytest.mark.parametrize("counted", [2, 4])
def test_segments_say_which_version_sampled(counted: int) -> None:
    """They count what was sampled, or all of the response."""
    segments = (Segment(3, "a", counted // 2), Segment(4, "b", counted // 2))
    mixed = sample(0, observed=(Span(1, 3),), segments=segments)
    batch = make_batch([mixed], vocab_size=VOCAB)
    assert batch.version_T.tolist() == [3, -1, -1, 4]
    assert batch.versions == (3, 4)


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        ({"tokens": (), "logprobs": ()}, "is empty"),
        ({"prompt": ()}, "is empty"),
        ({"logprobs": (-1.0,)}, "4 tokens and 1 logprobs"),
        ({"reward": float("nan")}, "its reward is `nan`"),
        ({"tokens": (1, 2, VOCAB, 3)}, f"the token `{VOCAB}` is not in the vocabulary"),
        ({"prompt": (-1,)}, "the token `-1`"),
        ({"logprobs": (-1.0, float("-inf"), -1.0, -1.0)}, "log-probability is not finite"),
        ({"logprobs": (-1.0, 0.5, -1.0, -1.0)}, "above 0"),
        ({"observed": (Span(2, 7),), "logprobs": (-1.0,) * 4}, "observed span `2` to `7`"),
        ({"segments": (Segment(0, "a", 1), Segment(1, "b", 2))}, "segments have 3 tokens"),
    ],
)
def test_a_broken_sample_is_named(broken: dict[str, Any], why: str) -> None:
    with pytest.raises(StepRejected, match=why) as caught:
        make_batch([sample(0), sample(7, **broken)], vocab_size=VOCAB)
    assert caught.value.trajectories == (7,)


def test_a_batch_is_neither_empty_nor_double() -> None:
    with pytest.raises(StepRejected, match="the batch is empty"):
        make_batch([], vocab_size=VOCAB)
    with pytest.raises(StepRejected, match="trajectory `3` is twice"):
        make_batch([sample(3), sample(3)], vocab_size=VOCAB)


def test_a_packed_micro_batch_has_no_padding() -> None:
    batch = make_batch(batch_of(3), vocab_size=VOCAB)
    rows = (4, 0, 7)
    packed, plain = (collate(batch, rows, packed=packed) for packed in (True, False))
    assert packed.padding == 0 < plain.padding
    assert packed.lengths == tuple(batch.lengths[row] for row in rows)
    assert packed.input_BT.tolist() == [
        [token for row in rows for token in batch.tokens[row][:-1].tolist()]
    ]
    # Each position holds the token before the one that it predicts, as in a padded one.
    for micro in (packed, plain):
        read = micro.input_BT.flatten()[micro.positions_T]
        before = [batch.tokens[r][batch.prompts[r] - 1 : -1] for r in rows]
        assert torch.equal(read, torch.cat(before))
    assert torch.equal(packed.targets_T, plain.targets_T)
    assert torch.equal(packed.flat_T, plain.flat_T)


def test_a_prompt_that_siblings_share_stands_once() -> None:
    prompts, responses = {0: (3, 4, 5), 1: (3, 4, 5), 2: (8, 9)}, {0: (6, 7, 8), 1: (6,), 2: (1, 2)}
    samples = [sample(i, prompts[i], responses[i]) for i in prompts]
    batch = make_batch(samples, vocab_size=VOCAB)
    micro = collate_shared(batch, (1, 2, 0))
    assert micro.rows == (1, 0, 2) and micro.padding == 0
    assert micro.input_BT.tolist() == [[3, 4, 5, 6, 7, 8, 9, 1]]
    assert micro.positions_T.tolist() == [2, 2, 3, 4, 6, 7]
    assert micro.targets_T.tolist() == [6, 6, 7, 8, 1, 2]
    assert micro.flat_T.tolist() == [3, 0, 1, 2, 4, 5]
    packing = micro.packing
    assert packing is not None and packing.most_keys == 5
    assert packing.groups.tolist() == [0, 2, 4]
    assert packing.segments.tolist() == [0, 3, 5, 7, 8]
    assert packing.prefixes.tolist() == [3, 2]
    assert packing.positions_T.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]


def test_a_micro_batch_without_rows_reads_one_token() -> None:
    batch = make_batch([sample(0)], vocab_size=VOCAB)
    micro = collate_shared(batch, ())
    assert micro.input_BT.tolist() == [[0]] and not len(micro.targets_T)
    assert micro.packing is not None and micro.packing.segments.tolist() == [0, 1]
