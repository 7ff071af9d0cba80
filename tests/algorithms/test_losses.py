"""Losses: worked examples on both sides of each bound, and what clipping may and may not do."""

from math import exp, log

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dora_rl.algorithms import losses
from dora_rl.algorithms.shapes import ShapeError
from tests.algorithms.batches import rows

ONE_TOKEN = {"low": 0.2, "high": 0.28}


def logs(*ratios: float) -> Tensor:
    return torch.tensor([log(r) for r in ratios], dtype=torch.float64, requires_grad=True)


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def gradient(loss_T: Tensor, parameter: Tensor) -> list[float]:
    (found,) = torch.autograd.grad(loss_T.sum(), parameter)
    return found.tolist()


def test_ppo_by_hand() -> None:
    # A = 2:  r 1.1 counts as it is, -2.2; r 1.5 counts as 1.28, -2.56; r 0.5 as it is, -1.
    # A = -1: r 0.5 counts as 0.8, 0.8; r 1.5 as it is, 1.5.
    ratios_T = logs(1.1, 1.5, 0.5, 0.5, 1.5)
    found = losses.ppo(ratios_T, numbers(2, 2, 2, -1, -1), **ONE_TOKEN)
    assert found.loss_T.tolist() == pytest.approx([-2.2, -2.56, -1.0, 0.8, 1.5])
    assert found.clipped_T.tolist() == [False, True, False, True, False]
    # d(-rA)/d log r = -rA where it counts as it is, 0 where a bound took over.
    expected = [-2.2, 0.0, -1.0, 0.0, 1.5]
    assert gradient(found.loss_T, ratios_T) == pytest.approx(expected)


def test_triplet_clipping_by_hand() -> None:
    # The cap of 3 holds for A < 0 alone: r 5 counts as 3; with A > 0 it counts as 1.28.
    ratios_T = logs(5.0, 2.9, 5.0, 0.1)
    found = losses.ppo(ratios_T, numbers(-1, -1, 1, -1), **ONE_TOKEN, dual=3.0)
    assert found.loss_T.tolist() == pytest.approx([3.0, 2.9, -1.28, 0.8])
    assert found.clipped_T.tolist() == [True, False, True, True]
    assert gradient(found.loss_T, ratios_T) == pytest.approx([0.0, 2.9, 0.0, 0.0])


def test_gspo_by_hand() -> None:
    # Sequence 0: ratios 4 and 1, geometric mean 2, clipped to 1.28: A = 1 gives -1.28 for both.
    # Sequence 1: ratios 0.25 and 1 (the third is observed): 0.5, A = 1: -0.5, gradient shared:
    # each token's loss -0.5 depends on both by half, twice: -0.5 each.
    ratios_T = logs(4.0, 1.0, 0.25, 1.0, 100.0)
    found = losses.gspo(
        ratios_T, torch.ones(5), torch.tensor([1, 1, 1, 1, 0]), rows([2, 3]), **ONE_TOKEN
    )
    assert found.loss_T[:4].tolist() == pytest.approx([-1.28, -1.28, -0.5, -0.5])
    assert found.clipped_T[:4].tolist() == [True, True, False, False]
    assert gradient(found.loss_T[:4], ratios_T) == pytest.approx([0.0, 0.0, -0.5, -0.5, 0.0])


def test_cispo_by_hand() -> None:
    # -clip(r) A log p with log p = -2: r 3 counts as 1.28 and r 0.5 as 0.8, both as constants,
    # so the gradient is -clip(r) A and no token loses it.
    logprobs_T = numbers(-2.0, -2.0, -2.0).requires_grad_()
    found = losses.cispo(logprobs_T, logs(3.0, 0.5, 1.1), numbers(1, 1, -1), **ONE_TOKEN)
    assert found.loss_T.tolist() == pytest.approx([2.56, 1.6, -2.2])
    assert found.clipped_T.tolist() == [True, True, False]
    assert gradient(found.loss_T, logprobs_T) == pytest.approx([-1.28, -0.8, 1.1])


def test_sapo_by_hand() -> None:
    # r = 1: sigmoid(0) = 1/2, so 2/τ A: 2 with τ = 1, 1 with τ = 2.
    # r = 1 + log 3, τ = 1: sigmoid(log 3) = 3/4, so 3.
    # Gradient at r = 1: 4/τ · τ/4 · r A = A, whatever τ.
    ratios_T = logs(1.0, 1.0, 1 + log(3))
    found = losses.sapo(ratios_T, numbers(1, -1, 1), positive=1.0, negative=2.0)
    assert found.loss_T.tolist() == pytest.approx([-2.0, 1.0, -3.0])
    assert gradient(found.loss_T, ratios_T)[:2] == pytest.approx([-1.0, 1.0])
    assert not found.clipped_T.any()


def test_reinforce_by_hand() -> None:
    logprobs_T = numbers(-2.0, -3.0).requires_grad_()
    found = losses.reinforce(logprobs_T, numbers(1.0, -2.0))
    assert found.loss_T.tolist() == [2.0, -6.0]
    assert gradient(found.loss_T, logprobs_T) == [-1.0, 2.0]


def test_the_value_loss_by_hand() -> None:
    # Returns 1, old values 0, bound 0.2. Value 0.1: 0.81 / 2 either way. Value 0.9: 0.01 as it
    # is, 0.64 at the bound of 0.2; the worse counts, without a gradient. Value -1: 4 as it is.
    values_T = numbers(0.1, 0.9, -1.0).requires_grad_()
    found = losses.value(values_T, numbers(0, 0, 0), numbers(1, 1, 1), clip=0.2)
    assert found.loss_T.tolist() == pytest.approx([0.405, 0.32, 2.0])
    assert found.clipped_T.tolist() == [False, True, False]
    assert gradient(found.loss_T, values_T) == pytest.approx([-0.9, 0.0, -2.0])
    free = losses.value(values_T, numbers(0, 0, 0), numbers(1, 1, 1), clip=0.0)
    assert free.loss_T.tolist() == pytest.approx([0.405, 0.005, 2.0])


advantage = st.floats(-5, 5).filter(lambda a: abs(a) > 1e-3)


@given(st.lists(st.tuples(st.floats(-8, -0.1), advantage), min_size=1, max_size=6))
def test_at_ratio_one_every_loss_has_the_gradient_of_reinforce(
    entries: list[tuple[float, float]],
) -> None:
    old_T = numbers(*(logprob for logprob, _ in entries))
    advantages_T = numbers(*(a for _, a in entries))
    logprobs_T = old_T.clone().requires_grad_()
    ratio_T = logprobs_T - old_T
    sequence_T = torch.arange(len(entries))
    mask_T = torch.ones_like(old_T)
    reinforce = gradient(losses.reinforce(logprobs_T, advantages_T).loss_T, logprobs_T)
    for found in (
        losses.ppo(ratio_T, advantages_T, **ONE_TOKEN),
        losses.ppo(ratio_T, advantages_T, **ONE_TOKEN, dual=3.0),
        losses.gspo(ratio_T, advantages_T, mask_T, sequence_T, **ONE_TOKEN),
        losses.cispo(logprobs_T, ratio_T, advantages_T, **ONE_TOKEN),
        losses.sapo(ratio_T, advantages_T, positive=1.0, negative=1.05),
    ):
        assert not found.clipped_T.any()
        assert gradient(found.loss_T, logprobs_T) == pytest.approx(reinforce)


@given(st.floats(-3, 3), advantage, st.floats(0, 1), st.floats(0, 2), st.floats(1.01, 5))
def test_clipping_never_increases_the_objective(
    log_ratio: float, a: float, low: float, high: float, dual: float
) -> None:
    ratios_T, advantages_T = numbers(log_ratio), numbers(a)
    plain = exp(log_ratio) * a
    once = -float(losses.ppo(ratios_T, advantages_T, low=low, high=high).loss_T)
    assert once <= plain + 1e-12
    # The cap can only give back what a negative advantage loses beyond it.
    twice = -float(losses.ppo(ratios_T, advantages_T, low=low, high=high, dual=dual).loss_T)
    assert once <= twice + 1e-12
    assert twice >= dual * a - 1e-12 if a < 0 else twice == once


def test_shapes_are_checked_first() -> None:
    with pytest.raises(ShapeError, match="advantages_T must be flat and as long as log_ratio_T"):
        losses.ppo(torch.zeros(2), torch.zeros(1), **ONE_TOKEN)
    with pytest.raises(ShapeError, match="returns_T must be flat and as long as values_T"):
        losses.value(torch.zeros(2), torch.zeros(2), torch.zeros(2, 1), clip=0.0)
