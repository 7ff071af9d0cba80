"""Advantages from rewards. Groups may have lost members; one that is left alone gets 0.

`group_N` names groups by any integers. Sums are taken in float64: the
rounding of equal rewards must stay far below the epsilon that divides it.
"""

from collections.abc import Sequence
from math import comb, sqrt

import torch
from torch import Tensor

from dora_rl.algorithms.shapes import check_same, check_sequences, masked_mean

_EPS = 1e-6  # far below any spread of rewards that means something
_EPS_SQUARED = 1e-8  # of whitening: added to the variance, as TRL and verl do


def grpo(rewards_N: Tensor, group_N: Tensor) -> Tensor:
    """(r - mean) / std of the group (DeepSeekMath, arXiv 2402.03300); std with n - 1."""
    deviation_N, count_N, row_N = _deviations(rewards_N, group_N)
    squares = torch.zeros_like(count_N).index_add(0, row_N, deviation_N.square())
    std = (squares / (count_N - 1).clamp(min=1)).sqrt()
    return (deviation_N / (std[row_N] + _EPS)).to(rewards_N.dtype)


def dr_grpo(rewards_N: Tensor, group_N: Tensor) -> Tensor:
    """r - mean of the group (Dr. GRPO, arXiv 2503.20783)."""
    return _deviations(rewards_N, group_N)[0].to(rewards_N.dtype)


def rloo(rewards_N: Tensor, group_N: Tensor) -> Tensor:
    """r - mean of the others of the group (RLOO, arXiv 2402.14740)."""
    deviation_N, count_N, row_N = _deviations(rewards_N, group_N)
    # r - (sum - r) / (n - 1) = (r - mean) · n / (n - 1)
    return (deviation_N * (count_N / (count_N - 1).clamp(min=1))[row_N]).to(rewards_N.dtype)


def reinforce_pp(
    rewards_T: Tensor, mask_T: Tensor, sequence_T: Tensor, *, gamma: float = 1.0
) -> Tensor:
    """Discounted sums of what follows, whitened over the batch (REINFORCE++, arXiv 2501.03262)."""
    check_same(rewards_T=rewards_T, mask_T=mask_T, sequence_T=sequence_T)
    check_sequences(sequence_T)
    return whiten(_discounted(rewards_T, mask_T, sequence_T, gamma), mask_T)


def reinforce_pp_baseline(
    rewards_N: Tensor, group_N: Tensor, mask_T: Tensor, sequence_T: Tensor
) -> Tensor:
    """r - mean of the group, whitened over the tokens of the batch (arXiv 2501.03262)."""
    check_same(mask_T=mask_T, sequence_T=sequence_T)
    check_sequences(sequence_T, rewards_N.numel())
    return whiten(dr_grpo(rewards_N, group_N)[sequence_T], mask_T)


def pass_at_k(rewards_N: Tensor, group_N: Tensor, *, k: int) -> Tensor:
    """What a member adds to the best of k, over its spread (Pass@k Training, arXiv 2508.10751).

    The mean over all k-subsets of the group that hold the member, less the mean over all, by the
    standard deviation over all. With rewards of two values this is the paper's closed form; it
    continues to hold with more. A group that fell to k members or fewer gets 0.
    """
    check_same(rewards_N=rewards_N, group_N=group_N)
    advantages_N = torch.zeros_like(rewards_N)
    for group in torch.unique(group_N):
        members = torch.nonzero(group_N == group).flatten()
        found = _best_of(rewards_N[members].tolist(), k)
        advantages_N[members] = rewards_N.new_tensor(found)
    return advantages_N


def gae(
    rewards_T: Tensor,
    values_T: Tensor,
    mask_T: Tensor,
    sequence_T: Tensor,
    *,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv 1506.02438): advantages and returns.

    The recursion runs over the sampled tokens of a sequence: what was observed between two of
    them takes no step. A sequence ends with its last sampled token, also when it was truncated.
    """
    check_same(rewards_T=rewards_T, values_T=values_T, mask_T=mask_T, sequence_T=sequence_T)
    check_sequences(sequence_T)
    values_T = values_T.detach().to(rewards_T.dtype)
    next_T = torch.zeros_like(values_T)
    sampled = torch.nonzero(mask_T != 0).flatten()
    inner = sequence_T[sampled[1:]] == sequence_T[sampled[:-1]]
    next_T[sampled[:-1][inner]] = values_T[sampled[1:][inner]]
    delta_T = rewards_T + gamma * next_T - values_T
    advantages_T = _discounted(delta_T, mask_T, sequence_T, gamma * lam)
    returns_T = (advantages_T + values_T).masked_fill(mask_T == 0, 0.0)
    return advantages_T, returns_T


def whiten(values_T: Tensor, mask_T: Tensor) -> Tensor:
    """Mean 0 and variance 1, with n - 1, over the masked-in entries; 0 elsewhere."""
    check_same(values_T=values_T, mask_T=mask_T)
    wide_T, kept_T = values_T.double(), (mask_T != 0).double()
    centred_T = (wide_T - masked_mean(wide_T, mask_T)) * kept_T
    variance = centred_T.square().sum() / (kept_T.sum() - 1).clamp(min=1)
    return (centred_T * (variance + _EPS_SQUARED).rsqrt()).to(values_T.dtype)


def _deviations(rewards_N: Tensor, group_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """r - mean of the group, the groups' sizes, and each entry's row among the groups."""
    check_same(rewards_N=rewards_N, group_N=group_N)
    groups, row_N = torch.unique(group_N, return_inverse=True)
    zero = torch.zeros(groups.numel(), dtype=torch.float64, device=rewards_N.device)
    wide_N = rewards_N.double()
    count = zero.index_add(0, row_N, torch.ones_like(wide_N))
    mean = zero.index_add(0, row_N, wide_N) / count
    return wide_N - mean[row_N], count, row_N


def _discounted(values_T: Tensor, mask_T: Tensor, sequence_T: Tensor, discount: float) -> Tensor:
    """sum of discount^j · value j sampled tokens later, for every sampled token; 0 elsewhere."""
    result_T = torch.zeros_like(values_T)
    sampled = torch.nonzero(mask_T != 0).flatten()
    if not sampled.numel():
        return result_T
    # Step d handles the tokens that have d sampled ones after them, of all sequences at once.
    _, counts = torch.unique_consecutive(sequence_T[sampled], return_counts=True)
    end = counts.cumsum(0).repeat_interleave(counts)
    depth = end - 1 - torch.arange(sampled.numel(), device=end.device)
    order = torch.argsort(depth, stable=True)
    widths = torch.bincount(depth).tolist()
    values = values_T[sampled]
    result = values.clone()
    for here in torch.split(order, widths)[1:]:
        result[here] = values[here] + discount * result[here + 1]
    result_T[sampled] = result
    return result_T


def _best_of(rewards: Sequence[float], k: int) -> list[float]:
    n = len(rewards)
    if n <= k:
        return [0.0] * n
    ranked = sorted(rewards)
    # ranked[j] is the best of a k-subset if the k - 1 others come from the j below it.
    chance = [comb(j, k - 1) / comb(n, k) for j in range(n)]
    mean = sum(p * r for p, r in zip(chance, ranked, strict=True))
    spread = sqrt(sum(p * (r - mean) ** 2 for p, r in zip(chance, ranked, strict=True)))
    if spread < _EPS:
        return [0.0] * n
    return [(_best_with(i, ranked, k) - mean) / spread for i in map(ranked.index, rewards)]


def _best_with(i: int, ranked: Sequence[float], k: int) -> float:
    """The mean of the best of all k-subsets that hold `ranked[i]`."""
    if k == 1:
        return ranked[i]
    others = [*ranked[:i], *ranked[i + 1 :]]
    best = sum(comb(j, k - 2) * max(ranked[i], other) for j, other in enumerate(others))
    return best / comb(len(others), k - 1)
