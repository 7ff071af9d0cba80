"""Rewards before they become advantages: length, and distance from the reference."""

import torch
from torch import Tensor

from dora_rl.algorithms.shapes import check_same, check_sequences, sequence_sum


def overlong(
    rewards_N: Tensor, lengths_N: Tensor, *, max_tokens: int, buffer: float, penalty: float
) -> Tensor:
    """DAPO's soft overlong punishment (arXiv 2503.14476).

    The penalty grows from 0 to `penalty` over the last `buffer` (a share) of `max_tokens`. A length
    has what `max_tokens` bounds: all tokens of a response, sampled and observed.
    """
    check_same(rewards_N=rewards_N, lengths_N=lengths_N)
    if buffer == 0:
        return rewards_N
    over_N = lengths_N.to(rewards_N.dtype) - max_tokens * (1 - buffer)
    return rewards_N - penalty * (over_N / (max_tokens * buffer)).clamp(0, 1)


def less_penalty(rewards_N: Tensor, penalty_T: Tensor, sequence_T: Tensor) -> Tensor:
    """The reward less the penalties of its tokens, such as their KL (arXiv 2203.02155)."""
    check_same(penalty_T=penalty_T, sequence_T=sequence_T)
    check_sequences(sequence_T, rewards_N.numel())
    return rewards_N - sequence_sum(penalty_T, sequence_T, rewards_N.numel()).to(rewards_N.dtype)


def token_rewards(rewards_N: Tensor, mask_T: Tensor, sequence_T: Tensor) -> Tensor:
    """The reward at the last sampled token of its sequence, 0 elsewhere."""
    check_same(mask_T=mask_T, sequence_T=sequence_T)
    check_sequences(sequence_T, rewards_N.numel())
    sampled = torch.nonzero(mask_T != 0).flatten()
    row = sequence_T[sampled]
    last = torch.ones_like(row, dtype=torch.bool)
    last[:-1] = row[1:] != row[:-1]
    rewards_T = rewards_N.new_zeros(mask_T.shape)
    rewards_T[sampled[last]] = rewards_N[row[last]]
    return rewards_T
