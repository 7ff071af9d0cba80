"""Ratios, importance weights and KL estimators: worked examples, and values without limits."""

from math import e, log

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dora_rl.algorithms import corrections, kl
from dora_rl.algorithms.ratios import log_ratio, mean_log_ratio, ratio, sequence_log_ratio
from dora_rl.algorithms.shapes import ShapeError
from tests.algorithms.batches import rows

HOSTILE = torch.tensor([1e4, -1e4, 0.0, 89.0, -104.0])


def test_observed_tokens_have_ratio_one() -> None:
    found = log_ratio(torch.tensor([-1.0, -9.0]), torch.tensor([-3.0, 0.0]), torch.tensor([1, 0]))
    assert found.tolist() == [2.0, 0.0]


def test_the_ratios_of_a_sequence_by_hand() -> None:
    # 8 and 2: 16, and √16 = 4. 3, and an observed token: 3. With nothing sampled: 1.
    log_ratio_T = torch.tensor([log(8), log(2), log(3), 0.0, 0.0])
    sequence_T = rows([2, 2, 1])
    product = sequence_log_ratio(log_ratio_T, sequence_T)
    assert product.exp().tolist() == pytest.approx([16, 16, 3, 3, 1])
    mean = mean_log_ratio(log_ratio_T, torch.tensor([1, 1, 1, 0, 0]), sequence_T)
    assert mean.exp().tolist() == pytest.approx([4, 4, 3, 3, 1])


def test_importance_weights_by_hand() -> None:
    # Weights 1/2, 2 and 3 with a cap of 2.5: the third is cut to it, or left out.
    gap_T = torch.tensor([log(0.5), log(2.0), log(3.0)])
    cut = corrections.truncated(gap_T, cap=2.5)
    assert cut.weights_T.tolist() == pytest.approx([0.5, 2.0, 2.5])
    assert cut.cut_T.tolist() == [False, False, True]
    left_out = corrections.masked(gap_T, cap=2.5)
    assert left_out.weights_T.tolist() == pytest.approx([0.5, 2.0, 0.0])
    assert left_out.cut_T.tolist() == [False, False, True]


@given(st.lists(st.floats(-1e4, 1e4, width=32), max_size=6), st.floats(1, 10, width=32))
def test_importance_weights_stay_below_the_cap(gaps: list[float], cap: float) -> None:
    gap_T = torch.tensor(gaps, requires_grad=True)
    for correct in (corrections.truncated, corrections.masked):
        found = correct(gap_T, cap=cap)
        assert (found.weights_T <= cap).all() and (found.weights_T >= 0).all()
        assert not found.weights_T.requires_grad


def test_kl_estimators_by_hand() -> None:
    # p = e q: log-ratio 1. k1 = 1; k2 = 1/2; k3 = 1/e - 1 + 1 = 1/e. p = q: all 0.
    x = torch.tensor([1.0, 0.0])
    assert kl.k1(x).tolist() == [1.0, 0.0]
    assert kl.k2(x).tolist() == [0.5, 0.0]
    assert kl.k3(x).tolist() == pytest.approx([1 / e, 0.0])


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_unbiased_estimators_average_to_the_kl(name: str) -> None:
    # KL of (3/4, 1/4) from (1/2, 1/2) = 3/4 log(3/2) + 1/4 log(1/2), the mean under p.
    p, q = torch.tensor([0.75, 0.25]), torch.tensor([0.5, 0.5])
    mean = float((p * kl.ESTIMATORS[name]((p / q).log())).sum())
    assert mean == pytest.approx(0.75 * log(1.5) + 0.25 * log(0.5), abs=1e-6)


def test_as_a_loss_k2_has_the_gradient_of_the_kl_and_k1_none() -> None:
    logits = torch.tensor([0.7, -0.4, 0.1], dtype=torch.float64, requires_grad=True)
    q = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    logprobs = logits.log_softmax(0)
    true = torch.autograd.grad(
        (logprobs.exp() * (logprobs - q.log())).sum(), logits, retain_graph=True
    )[0]
    for name, expected in (("k1", torch.zeros(3, dtype=torch.float64)), ("k2", true)):
        # The mean over samples of the estimator's gradient: p itself is held constant.
        mean = (logprobs.exp().detach() * kl.ESTIMATORS[name](logprobs - q.log())).sum()
        found = torch.autograd.grad(mean, logits, retain_graph=True)[0]
        torch.testing.assert_close(found, expected)


@given(st.floats(-1e4, 1e4, width=32))
def test_k3_is_never_negative_and_never_pulls_the_wrong_way(x: float) -> None:
    log_ratio_T = torch.tensor([x], requires_grad=True)
    found = kl.k3(log_ratio_T)
    (slope,) = torch.autograd.grad(found.sum(), log_ratio_T)
    assert 0 <= float(found.detach()) < float("inf")
    assert float(slope) * x >= 0


def test_hostile_differences_stay_finite() -> None:
    x = HOSTILE.clone().requires_grad_()
    for found in (ratio(x), kl.k1(x), kl.k2(x), kl.k3(x)):
        (slope,) = torch.autograd.grad(found.sum(), x)
        assert torch.isfinite(found).all() and torch.isfinite(slope).all()


def test_half_precision_is_refused() -> None:
    half = torch.zeros(1, dtype=torch.bfloat16)
    with pytest.raises(ShapeError, match=r"logprobs_T must be float32 or float64: `.*bfloat16`"):
        log_ratio(half, torch.zeros(1), torch.ones(1))
