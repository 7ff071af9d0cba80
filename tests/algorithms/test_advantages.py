"""Advantages: worked examples, sums that must vanish, and groups that lost members."""

from collections.abc import Callable
from itertools import combinations
from math import sqrt
from random import Random
from statistics import fmean, pstdev

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dora_rl.algorithms import advantages
from dora_rl.algorithms.shapes import ShapeError
from tests.algorithms.batches import rows

OfGroups = Callable[[Tensor, Tensor], Tensor]
OF_GROUPS: tuple[OfGroups, ...] = (
    advantages.grpo,
    advantages.dr_grpo,
    advantages.rloo,
    lambda rewards_N, group_N: advantages.pass_at_k(rewards_N, group_N, k=2),
)
# Two groups, interleaved: 1, 0, 0, 0 and 2, 4.
REWARDS = torch.tensor([1.0, 2.0, 0.0, 0.0, 4.0, 0.0])
GROUPS = torch.tensor([7, 3, 7, 7, 3, 7])


def groups_of_rewards() -> st.SearchStrategy[list[tuple[float, int]]]:
    reward = st.floats(-10, 10, allow_subnormal=False, width=32)
    return st.lists(st.tuples(reward, st.integers(0, 2)), min_size=1, max_size=12)


def near(expected: list[float]) -> object:
    return pytest.approx(expected, abs=1e-4)


def test_grpo_by_hand() -> None:
    # 1, 0, 0, 0: mean 1/4, squares 9/16 + 3/16 = 3/4, over 3 is 1/4, std 1/2: 3/2 and -1/2.
    # 2, 4: mean 3, squares 2, over 1, std √2: ±1/√2.
    r = 1 / sqrt(2)
    found = advantages.grpo(REWARDS, GROUPS)
    assert found.tolist() == near([1.5, -r, -0.5, -0.5, r, -0.5])


def test_dr_grpo_by_hand() -> None:
    # The same means, 1/4 and 3, and nothing else.
    found = advantages.dr_grpo(REWARDS, GROUPS)
    assert found.tolist() == near([0.75, -1.0, -0.25, -0.25, 1.0, -0.25])


def test_rloo_by_hand() -> None:
    # 1 against 0, 0, 0; 0 against 1, 0, 0, so -1/3; 2 against 4; 4 against 2.
    found = advantages.rloo(REWARDS, GROUPS)
    assert found.tolist() == near([1.0, -2.0, -1 / 3, -1 / 3, 2.0, -1 / 3])


def test_pass_at_k_by_hand() -> None:
    # 1, 0, 0, 0 and k = 2: of six pairs three hold the 1, so the mean of the best is 1/2 and its
    # deviation 1/2. Each pair of the 1 has best 1: (1 - 1/2) / (1/2) = 1. A 0 pairs with the 1
    # once in three: (1/3 - 1/2) / (1/2) = -1/3. The group of two has one pair: nobody differs.
    found = advantages.pass_at_k(REWARDS, GROUPS, k=2)
    assert found.tolist() == near([1.0, 0.0, -1 / 3, -1 / 3, 0.0, -1 / 3])


@given(st.lists(st.sampled_from((-1.0, 0.0, 0.5, 3.0)), min_size=2, max_size=6), st.integers(1, 5))
def test_pass_at_k_is_what_enumerating_the_subsets_gives(rewards: list[float], k: int) -> None:
    found = advantages.pass_at_k(
        torch.tensor(rewards), torch.zeros(len(rewards), dtype=torch.int64), k=k
    )
    subsets = list(combinations(range(len(rewards)), min(k, len(rewards))))
    best = {subset: max(rewards[i] for i in subset) for subset in subsets}
    spread = pstdev(best.values())
    for i, value in enumerate(found.tolist()):
        mine = fmean(b for subset, b in best.items() if i in subset)
        expected = (mine - fmean(best.values())) / spread if spread else 0.0
        assert value == pytest.approx(expected, abs=1e-5)


def test_reinforce_pp_by_hand() -> None:
    # Rewards at the ends: 3 after one token, 0 after three, no discount. What follows is 3 | 0 0 0:
    # mean 3/4, squares (81 + 27)/16, over 3 is 9/4, deviation 3/2: 3/2 | -1/2 each.
    found = advantages.reinforce_pp(
        torch.tensor([3.0, 0.0, 0.0, 0.0]), torch.ones(4), rows([1, 3]), gamma=1.0
    )
    assert found.tolist() == near([1.5, *[-0.5] * 3])


def test_reinforce_pp_discounts() -> None:
    # Discount 1/2 and reward 4 at the end of three: 1, 2, 4. Mean 7/3, squares
    # (16 + 1 + 25) / 9, over 2 is 7/3. The observed token in between takes no step.
    found = advantages.reinforce_pp(
        torch.tensor([0.0, 0.0, 9.0, 4.0]), torch.tensor([1, 1, 0, 1]), rows([4]), gamma=0.5
    )
    deviation = sqrt(7 / 3)
    expected = [-4 / 3 / deviation, -1 / 3 / deviation, 0.0, 5 / 3 / deviation]
    assert found.tolist() == near(expected)


def test_reinforce_pp_baseline_by_hand() -> None:
    # 2, 4 of one group: -1, 1. Lengths 3 and 1: -1 -1 -1 | 1 has mean -1/2 and squares
    # 3/4 + 9/4, over 3 is 1.
    found = advantages.reinforce_pp_baseline(
        torch.tensor([2.0, 4.0]), torch.tensor([5, 5]), torch.ones(4), rows([3, 1])
    )
    assert found.tolist() == near([*[-0.5] * 3, 1.5])


def test_gae_by_hand() -> None:
    # gamma 1, lambda 1/2. First sequence: values 1, 2, reward 3 at the end:
    #   δ = 0 + 2 - 1 = 1 and 3 - 2 = 1; A = 1 + 1/2 · 1 = 3/2 and 1; returns 5/2 and 3.
    # Second: sampled 4, observed, sampled 6, reward 0:
    #   δ = 6 - 4 = 2 and 0 - 6 = -6; A = 2 - 3 = -1 and -6; returns 3 and 0.
    found, returns = advantages.gae(
        torch.tensor([0.0, 3.0, 0.0, 0.0, 0.0]),
        torch.tensor([1.0, 2.0, 4.0, 99.0, 6.0]),
        torch.tensor([1, 1, 1, 0, 1]),
        rows([2, 3]),
        gamma=1.0,
        lam=0.5,
    )
    assert found.tolist() == near([1.5, 1.0, -1.0, 0.0, -6.0])
    assert returns.tolist() == near([2.5, 3.0, 3.0, 0.0, 0.0])


@given(
    st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5), st.booleans()), max_size=12),
    st.lists(st.integers(0, 4), max_size=4),
    st.floats(0.1, 1.0),
    st.floats(0.0, 1.0),
)
def test_gae_is_the_recursion_over_the_sampled_tokens(
    entries: list[tuple[float, float, bool]], lengths: list[int], gamma: float, lam: float
) -> None:
    lengths = [*lengths, max(0, len(entries) - sum(lengths))]
    sequence_T = rows(lengths)[: len(entries)]
    rewards, values, mask = zip(*entries, strict=True) if entries else ((), (), ())
    found, _ = advantages.gae(
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor(values, dtype=torch.float64),
        torch.tensor(mask, dtype=torch.bool),
        sequence_T,
        gamma=gamma,
        lam=lam,
    )
    following: dict[int, tuple[float, float]] = {}
    expected = [0.0] * len(entries)
    for i in reversed(range(len(entries))):
        row = int(sequence_T[i])
        if mask[i]:
            value, advantage = following.get(row, (0.0, 0.0))
            expected[i] = rewards[i] + gamma * value - values[i] + gamma * lam * advantage
            following[row] = (values[i], expected[i])
    assert found.tolist() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("of_groups", OF_GROUPS)
@given(groups_of_rewards())
def test_a_group_has_mean_zero(of_groups: OfGroups, entries: list[tuple[float, int]]) -> None:
    rewards_N = torch.tensor([reward for reward, _ in entries], dtype=torch.float64)
    group_N = torch.tensor([group for _, group in entries])
    found = of_groups(rewards_N, group_N)
    assert torch.isfinite(found).all()
    for group in group_N.unique():
        assert float(found[group_N == group].sum()) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("of_groups", OF_GROUPS)
@given(groups_of_rewards(), st.randoms(use_true_random=False))
def test_the_order_of_responses_does_not_matter(
    of_groups: OfGroups, entries: list[tuple[float, int]], random: Random
) -> None:
    rewards_N = torch.tensor([reward for reward, _ in entries], dtype=torch.float64)
    group_N = torch.tensor([group for _, group in entries])
    order = list(range(len(entries)))
    random.shuffle(order)
    found = of_groups(rewards_N, group_N)[order]
    torch.testing.assert_close(of_groups(rewards_N[order], group_N[order]), found)


@pytest.mark.parametrize("of_groups", OF_GROUPS)
@pytest.mark.parametrize("rewards", [[0.1] * 7, [1e6 / 3] * 7, [5.0]])
def test_equal_rewards_and_lone_members_get_nothing(
    of_groups: OfGroups, rewards: list[float]
) -> None:
    group_N = torch.zeros(len(rewards), dtype=torch.int64)
    found = of_groups(torch.tensor(rewards), group_N)
    assert found.tolist() == pytest.approx([0.0] * len(rewards), abs=1e-3)


@given(st.lists(st.tuples(st.floats(-100, 100), st.booleans()), max_size=10))
def test_whitening_sees_the_mask_alone(entries: list[tuple[float, bool]]) -> None:
    values_T = torch.tensor([value for value, _ in entries], dtype=torch.float64)
    mask_T = torch.tensor([kept for _, kept in entries], dtype=torch.bool)
    found = advantages.whiten(values_T, mask_T)
    assert not found[~mask_T].any()
    kept = found[mask_T]
    if kept.numel():
        assert float(kept.mean()) == pytest.approx(0, abs=1e-6)
    if kept.numel() > 1 and float(values_T[mask_T].std()) > 1:
        assert float(kept.std()) == pytest.approx(1, abs=1e-5)


def test_shapes_are_checked_first() -> None:
    with pytest.raises(ShapeError, match=r"group_N must be flat and as long as rewards_N \(2\)"):
        advantages.grpo(torch.zeros(2), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ShapeError, match=r"rewards_N must be flat"):
        advantages.rloo(torch.zeros(2, 2), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ShapeError, match="must rise from 0"):
        advantages.reinforce_pp(torch.zeros(3), torch.ones(3), torch.tensor([0, 1, 0]))
    with pytest.raises(ShapeError, match="names row `1` of 1 sequences"):
        advantages.reinforce_pp_baseline(
            torch.zeros(1), torch.zeros(1, dtype=torch.int64), torch.ones(2), rows([1, 1])
        )
