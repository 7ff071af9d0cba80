"""Policy and value losses, one number a token, before any weighting.

Each takes log(policy / version that sampled) and advantages, and returns the loss with where it
was clipped: where the bounds took its gradient, or changed its weight.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dora_rl.algorithms.ratios import mean_log_ratio, ratio
from dora_rl.algorithms.shapes import check_same


class TokenLoss(NamedTuple):
    loss_T: Tensor
    clipped_T: Tensor


def ppo(
    log_ratio_T: Tensor, advantages_T: Tensor, *, low: float, high: float, dual: float = 0.0
) -> TokenLoss:
    """The clipped surrogate (arXiv 1707.06347), its bounds apart (DAPO, arXiv 2503.14476).

    `dual` > 1 caps the ratio of negative advantages (dual clip, arXiv 1912.09729); the three
    bounds together are LongCat's triplet clipping (arXiv 2509.18883).
    """
    check_same(log_ratio_T=log_ratio_T, advantages_T=advantages_T)
    return _clipped(ratio(log_ratio_T), advantages_T, low=low, high=high, dual=dual)


def gspo(
    log_ratio_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    sequence_T: Tensor,
    *,
    low: float,
    high: float,
) -> TokenLoss:
    """The clipped surrogate of whole sequences (arXiv 2507.18071): geometric mean of the ratios.

    Every token carries its sequence's loss, so the `sequence` aggregation gives the paper's.
    """
    check_same(log_ratio_T=log_ratio_T, advantages_T=advantages_T)
    ratio_T = ratio(mean_log_ratio(log_ratio_T, mask_T, sequence_T))
    return _clipped(ratio_T, advantages_T, low=low, high=high)


def cispo(
    logprobs_T: Tensor, log_ratio_T: Tensor, advantages_T: Tensor, *, low: float, high: float
) -> TokenLoss:
    """REINFORCE weighted by the clipped ratio as a constant (MiniMax-M1, arXiv 2506.13585).

    Unlike in PPO every token keeps a gradient.
    """
    check_same(logprobs_T=logprobs_T, log_ratio_T=log_ratio_T, advantages_T=advantages_T)
    ratio_T = ratio(log_ratio_T.detach())
    weights_T = ratio_T.clamp(1 - low, 1 + high)
    return TokenLoss(-weights_T * advantages_T * logprobs_T, weights_T != ratio_T)


def sapo(
    log_ratio_T: Tensor, advantages_T: Tensor, *, positive: float, negative: float
) -> TokenLoss:
    """A sigmoid gate in place of the clip (arXiv 2511.20347): sigmoid(τ (r - 1)) · 4/τ · A.

    `positive` and `negative` are τ by the sign of the advantage. Nothing is ever cut, so
    `clipped_T` is false.
    """
    check_same(log_ratio_T=log_ratio_T, advantages_T=advantages_T)
    tau_T = torch.where(advantages_T > 0, positive, negative).to(log_ratio_T.dtype)
    gate_T = torch.sigmoid(tau_T * (ratio(log_ratio_T) - 1)) * 4 / tau_T
    return TokenLoss(-gate_T * advantages_T, torch.zeros_like(advantages_T, dtype=torch.bool))


def reinforce(logprobs_T: Tensor, advantages_T: Tensor) -> TokenLoss:
    """-A log p (Williams 1992). Right on the policy that sampled alone."""
    check_same(logprobs_T=logprobs_T, advantages_T=advantages_T)
    clipped_T = torch.zeros_like(advantages_T, dtype=torch.bool)
    return TokenLoss(-advantages_T * logprobs_T, clipped_T)


def value(values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, *, clip: float) -> TokenLoss:
    """Half the squared error; with `clip` > 0 the worse of it and the one within the bounds."""
    check_same(values_T=values_T, old_values_T=old_values_T, returns_T=returns_T)
    error_T = (values_T - returns_T).square()
    if clip == 0:
        return TokenLoss(error_T / 2, torch.zeros_like(error_T, dtype=torch.bool))
    near_T = old_values_T + (values_T - old_values_T).clamp(-clip, clip)
    bounded_T = (near_T - returns_T).square()
    return TokenLoss(torch.maximum(error_T, bounded_T) / 2, bounded_T > error_T)


def _clipped(
    ratio_T: Tensor, advantages_T: Tensor, *, low: float, high: float, dual: float = 0.0
) -> TokenLoss:
    plain_T = ratio_T * advantages_T
    bounded_T = ratio_T.clamp(1 - low, 1 + high) * advantages_T
    clipped_T = bounded_T < plain_T
    objective_T = torch.minimum(plain_T, bounded_T)
    if dual > 0:
        floor_T = dual * advantages_T
        capped_T = (advantages_T < 0) & (floor_T > objective_T)
        objective_T = torch.where(capped_T, floor_T, objective_T)
        clipped_T = clipped_T | capped_T
    return TokenLoss(-objective_T, clipped_T)
