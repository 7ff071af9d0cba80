"""Rewards before they become advantages: worked examples."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dora_rl.algorithms import shaping
from dora_rl.algorithms.shapes import ShapeError
from tests.algorithms.batches import rows


def test_overlong_by_hand() -> None:
    # Of 100 tokens the last 20 are the buffer: 80 costs nothing, 90 half, 100 all of 2.
    lengths_N = torch.tensor([10, 80, 90, 100, 120])
    found = shaping.overlong(torch.ones(5), lengths_N, max_tokens=100, buffer=0.2, penalty=2.0)
    assert found.tolist() == pytest.approx([1.0, 1.0, 0.0, -1.0, -1.0], abs=1e-5)


@given(st.lists(st.integers(0, 50), min_size=2, max_size=6), st.floats(0, 1), st.floats(0, 3))
def test_the_penalty_grows_with_length_and_ends(
    lengths: list[int], buffer: float, penalty: float
) -> None:
    lengths_N = torch.tensor(sorted(lengths))
    rewards_N = torch.zeros(len(lengths), dtype=torch.float64)
    found = shaping.overlong(rewards_N, lengths_N, max_tokens=40, buffer=buffer, penalty=penalty)
    assert (found.diff() <= 0).all()
    assert (found <= 0).all() and (found >= -penalty).all()
    assert not found[lengths_N <= 40 * (1 - buffer)].any()


def test_penalties_by_hand() -> None:
    # 1 - (0.1 + 0.2), 2 - nothing, 3 - 0.5.
    found = shaping.less_penalty(
        torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.1, 0.2, 0.5]), torch.tensor([0, 0, 2])
    )
    assert found.tolist() == pytest.approx([0.7, 2.0, 2.5])


def test_the_reward_comes_with_the_last_sampled_token() -> None:
    # The first ends in an observed token, the second is empty, the third samples nothing.
    mask_T = torch.tensor([1, 1, 0, 0, 0, 1])
    found = shaping.token_rewards(torch.tensor([5.0, 6.0, 7.0, 8.0]), mask_T, rows([3, 0, 2, 1]))
    assert found.tolist() == [0, 5, 0, 0, 0, 8]
    nothing = torch.zeros(0, dtype=torch.int64)
    assert shaping.token_rewards(torch.ones(2), nothing, nothing).tolist() == []


def test_rows_beyond_the_rewards_are_refused() -> None:
    with pytest.raises(ShapeError, match="names row `1` of 1 sequences"):
        shaping.token_rewards(torch.ones(1), torch.ones(2), rows([1, 1]))
