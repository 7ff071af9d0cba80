"""Ratios of probabilities, from logarithms, finite whatever comes."""

from torch import Tensor

from dora_rl.algorithms.shapes import check_precise, check_same, sequence_mean, sequence_sum

# e^20 is 5e8: a ratio beyond it estimates nothing any more, and float32 would overflow at e^89.
LARGEST = 20.0


def log_ratio(logprobs_T: Tensor, other_T: Tensor, mask_T: Tensor) -> Tensor:
    """log(p / q) a token; 0 where nothing was sampled."""
    check_same(logprobs_T=logprobs_T, other_T=other_T, mask_T=mask_T)
    check_precise(logprobs_T=logprobs_T, other_T=other_T)
    return (logprobs_T - other_T).masked_fill(mask_T == 0, 0.0)


def ratio(log_ratio_T: Tensor) -> Tensor:
    """exp, with an end: no infinity, and no gradient, beyond e^20."""
    return log_ratio_T.clamp(-LARGEST, LARGEST).exp()


def sequence_log_ratio(log_ratio_T: Tensor, sequence_T: Tensor) -> Tensor:
    """Each token's sequence's log(p / q): the sum, which is the logarithm of the product."""
    check_same(log_ratio_T=log_ratio_T, sequence_T=sequence_T)
    return sequence_sum(log_ratio_T, sequence_T)[sequence_T]


def mean_log_ratio(log_ratio_T: Tensor, mask_T: Tensor, sequence_T: Tensor) -> Tensor:
    """Each token's sequence's mean log-ratio: the logarithm of the geometric mean."""
    check_same(log_ratio_T=log_ratio_T, mask_T=mask_T, sequence_T=sequence_T)
    return sequence_mean(log_ratio_T, mask_T, sequence_T)[sequence_T]
