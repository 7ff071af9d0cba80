"""Estimators of KL(policy || reference) from the sampled tokens (Schulman 2020, "Approximating KL
Divergence"). Each takes log(policy / reference) a token."""

from torch import Tensor, expm1

from dora_rl.algorithms.ratios import LARGEST


def k1(log_ratio_T: Tensor) -> Tensor:
    """log(p / q): unbiased, of either sign. As a loss its gradient is zero on average."""
    return log_ratio_T


def k2(log_ratio_T: Tensor) -> Tensor:
    """log(p / q)² / 2: biased and small in variance. As a loss its gradient is that of the KL."""
    return log_ratio_T.square() / 2


def k3(log_ratio_T: Tensor) -> Tensor:
    """q / p - 1 + log(p / q): unbiased and never negative."""
    # Both terms end together: the second alone would push p further away from q.
    log_ratio_T = log_ratio_T.clamp(min=-LARGEST)
    return expm1(-log_ratio_T) + log_ratio_T


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}
