"""Importance weights for the gap between trainer and engine: same weights, other rounding.

The weight is p_trainer / p_engine of the version that sampled, a constant to the gradient. It is
not about staleness: the ratio in the loss is.

For the sequence level pass `ratios.sequence_log_ratio`: the product of its tokens' weights, the
unbiased one. Their geometric mean stays near 1 whatever the gap: no cap would ever bind.
"""

from typing import NamedTuple

from torch import Tensor

from dora_rl.algorithms.ratios import ratio


class Correction(NamedTuple):
    """What multiplies each token's loss, and where the cap changed it."""

    weights_T: Tensor
    cut_T: Tensor


def truncated(log_ratio_T: Tensor, *, cap: float) -> Correction:
    """min(w, cap): truncated importance sampling (Ionides 2008; IMPALA, arXiv 1802.01561)."""
    weights_T = ratio(log_ratio_T.detach())
    return Correction(weights_T.clamp(max=cap), weights_T > cap)


def masked(log_ratio_T: Tensor, *, cap: float) -> Correction:
    """w where w <= cap, else 0: what the engine should hardly have sampled is left out."""
    weights_T = ratio(log_ratio_T.detach())
    cut_T = weights_T > cap
    return Correction(weights_T.masked_fill(cut_T, 0.0), cut_T)
