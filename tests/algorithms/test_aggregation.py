"""Weights: what each mode adds up to."""

import pytest
import torch
from hypothesis import given

from dora_rl.algorithms.aggregation import weights
from dora_rl.algorithms.algorithm import Responses
from dora_rl.algorithms.shapes import ShapeError
from tests.algorithms.batches import MAX_TOKENS, responses, rows

# Three sequences of 2, 3 and 1 tokens; of the second two count, of the third none.
MASK = torch.tensor([1, 1, 1, 0, 1, 0])
SEQUENCE = rows([2, 3, 1])


def test_by_hand() -> None:
    # token: 4 count. sequence: 3, also the one that is left out; two of 2 tokens each. constant: 3
    # sequences of 8.
    token = weights(MASK, SEQUENCE, "token", max_tokens=8)
    assert token.tolist() == [0.25, 0.25, 0.25, 0, 0.25, 0]
    sequence = weights(MASK, SEQUENCE, "sequence", max_tokens=8)
    assert sequence.tolist() == pytest.approx([1 / 6, 1 / 6, 1 / 6, 0, 1 / 6, 0])
    constant = weights(MASK, SEQUENCE, "constant", max_tokens=8)
    assert constant.tolist() == pytest.approx([1 / 24, 1 / 24, 1 / 24, 0, 1 / 24, 0])
    # Lengths 1 and 3: a token of the short one counts three times as much.
    short = weights(torch.ones(4), rows([1, 3]), "sequence", max_tokens=8)
    assert short.tolist() == pytest.approx([1 / 2, 1 / 6, 1 / 6, 1 / 6])


@given(responses())
def test_what_the_weights_add_up_to(batch: Responses) -> None:
    mask_T, sequence_T = batch.mask_T, batch.sequence_T
    trained = int(mask_T.sum())
    token = weights(mask_T, sequence_T, "token", max_tokens=MAX_TOKENS)
    sequence = weights(mask_T, sequence_T, "sequence", max_tokens=MAX_TOKENS)
    constant = weights(mask_T, sequence_T, "constant", max_tokens=MAX_TOKENS)
    for found in (token, sequence, constant):
        assert not found[~mask_T].any()
        assert (found[mask_T] > 0).all()
    assert float(token.sum()) == pytest.approx(min(trained, 1), abs=1e-6)
    number = max(1, len(set(sequence_T.tolist())))
    assert float(constant.sum()) == pytest.approx(trained / (number * MAX_TOKENS), abs=1e-6)
    shares = [float(sequence[sequence_T == row].sum()) for row in sequence_T[mask_T].unique()]
    assert shares == pytest.approx([1 / number] * len(shares))


def test_unordered_sequences_are_refused() -> None:
    with pytest.raises(ShapeError, match="must rise from 0"):
        weights(torch.ones(3), torch.tensor([1, 0, 0]), "token", max_tokens=8)
    with pytest.raises(ShapeError, match=r"must be flat int64: `torch\.int32`"):
        weights(torch.ones(1), torch.zeros(1, dtype=torch.int32), "token", max_tokens=8)
