"""The table of conventions in docs/algorithms.md: every row against a restatement of the peers'.

A case computes something with our code, by hand, and by each peer's convention in plain Python. A
cell of a peer that begins with "the same" must be equal to ours, any other must differ; "—" stands
for what a peer does not have.
"""

from collections.abc import Callable, Sequence
from math import exp, log, sqrt
from pathlib import Path
from statistics import fmean, stdev, variance
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from dora_rl.algorithms import advantages, kl, losses, ratios
from dora_rl.algorithms.aggregation import weights
from dora_rl.algorithms.algorithm import Tokens
from dora_rl.algorithms.settings import AlgorithmSettings
from tests.algorithms.batches import algorithm, rows
from tests.algorithms.test_algorithm import micro, two_responses

PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"
HEADING = "## Conventions, and how they differ from TRL and verl\n"

Numbers = Sequence[float]


class Case(NamedTuple):
    ours: Tensor
    by_hand: Numbers
    trl: Numbers | None
    verl: Numbers | None


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def clipped(ratio: float, low: float = 0.2, high: float = 0.2) -> float:
    return min(max(ratio, 1 - low), 1 + high)


def whitening() -> Case:
    # 3 0 0 0: squares 27/4, over 3 is 9/4. 0.0002 and 0: squares 2e-8, over 1, and 1e-8 more.
    batches = [[3.0, 0.0, 0.0, 0.0], [2e-4, 0.0]]
    ours = [advantages.whiten(numbers(*batch), torch.ones(len(batch))) for batch in batches]
    peers = [(x - fmean(batch)) / sqrt(variance(batch) + 1e-8) for batch in batches for x in batch]
    small = 1e-4 / sqrt(3e-8)
    return Case(torch.cat(ours), [1.5, -0.5, -0.5, -0.5, small, -small], peers, peers)


def deviation_of_a_group() -> Case:
    # 0.001 and 0: the deviation is 0.001/√2, so the epsilon of TRL is a seventh of it.
    rewards = [1e-3, 0.0]
    ours = advantages.grpo(numbers(*rewards), torch.tensor([4, 4]))

    def peer(epsilon: float) -> list[float]:
        return [(r - fmean(rewards)) / (stdev(rewards) + epsilon) for r in rewards]

    value = 5e-4 / (1e-3 / sqrt(2) + 1e-6)
    return Case(ours, [value, -value], peer(1e-4), peer(1e-6))


def member_left_alone() -> Case:
    alone = numbers(3.0), torch.tensor([4])
    ours = torch.cat([advantages.grpo(*alone), advantages.rloo(*alone)])
    # verl takes 0 for the mean of one reward, and 1 for its deviation.
    return Case(ours, [0.0, 0.0], [0.0, 0.0], [3.0, 3.0])


def truncated_responses() -> Case:
    # Rewards 1 and 0 of two sampled tokens each; the second is cut off, the observed token is not
    # trained on anyway.
    found = algorithm(preset="dr_grpo", mask_truncated=True).targets(two_responses())
    trl = [r - fmean([1.0, 0.0]) for r in (1.0, 1.0)] + [0.0, 0.0, 0.0]
    return Case(found.advantages_T, [0.5, 0.5, 0, 0, 0], trl, None)


def overlong_length() -> Case:
    # Rewards 1 and 0. 8 tokens at most, the last 4 the buffer: 2 sampled and 4 observed are 6,
    # half the penalty; the other has 2.
    responses = two_responses(
        sequence_T=rows([6, 2]), mask_T=torch.tensor([1, 0, 0, 0, 0, 1, 1, 1])
    )
    found = algorithm(preset="reinforce", overlong_buffer=0.5).targets(responses)
    over = [(6 - (8 - 4)) / 4, (2 - (8 - 4)) / 4]
    trl = [1 - min(max(over[0], 0), 1), 0 - min(max(over[1], 0), 1)]
    verl = [1 + min(-over[0], 0), 0 + min(-over[1], 0)]
    return Case(found.advantages_T[[0, 6]], [0.5, 0.0], trl, verl)


# Losses of three sequences: 1 2, 3, and one that is left out.
LOSSES = [[1.0, 2.0], [3.0], []]


def weighted(mode: str) -> Tensor:
    mask_T = torch.tensor([1, 1, 1, 0])
    found = weights(mask_T, rows([2, 1, 1]), mode, max_tokens=8)  # type: ignore[arg-type]
    return (found * torch.tensor([1.0, 2.0, 3.0, 99.0])).sum().reshape(1)


def sequence_aggregation() -> Case:
    # Means 3/2 and 3, and nothing of the third.
    means = [sum(row) / max(len(row), 1) for row in LOSSES]
    left = [fmean(row) for row in LOSSES if row]
    return Case(weighted("sequence"), [4.5 / 3], [fmean(means)], [fmean(left)])


def constant_aggregation() -> Case:
    total = sum(map(sum, LOSSES))
    return Case(weighted("constant"), [6 / 24], [total / (len(LOSSES) * 8)], [total / 8])


def slopes(loss: Callable[[Tensor], Tensor], log_ratio: float) -> Tensor:
    """The gradient of two tokens of one sequence, of this log-ratio each."""
    log_ratio_T = numbers(log_ratio, log_ratio).requires_grad_()
    return torch.autograd.grad(loss(log_ratio_T).sum(), log_ratio_T)[0]


def rloo(log_ratio_T: Tensor) -> Tensor:
    """A = 1; each token weighs 1."""
    nothing_T, one_T = torch.zeros_like(log_ratio_T), torch.ones_like(log_ratio_T)
    tokens = Tokens(
        logprobs_T=log_ratio_T,
        old_logprobs_T=nothing_T,
        rollout_logprobs_T=nothing_T,
        advantages_T=one_T,
        mask_T=one_T,
        weights_T=one_T,
        sequence_T=rows([2]),
    )
    return algorithm(preset="rloo").loss(tokens)[0]


def surrogate(ratio: Tensor) -> Tensor:
    return -torch.minimum(ratio, ratio.clamp(0.8, 1.2))


def rloo_of_trl(log_ratio_T: Tensor) -> Tensor:
    return surrogate(log_ratio_T.sum().exp())


def ratio_of_rloo() -> Case:
    # Ratio 1.15: within the bounds. The product of two is 1.3225: clipped, and without gradient.
    point = log(1.15)
    verl = slopes(lambda log_ratio_T: surrogate(log_ratio_T.exp()), point)
    return Case(
        slopes(rloo, point),
        [-1.15, -1.15],
        slopes(rloo_of_trl, point).tolist(),
        verl.tolist(),
    )


def test_at_ratio_one_rloo_has_the_gradient_of_the_product() -> None:
    assert slopes(rloo, 0.0).tolist() == slopes(rloo_of_trl, 0.0).tolist() == [-1.0, -1.0]


def sequence_importance() -> Case:
    # One sequence whose tokens have the weights 1 and 4, the loss -1.2 and 1, and count half each.
    found = algorithm(
        preset="grpo", importance="truncated", importance_level="sequence", importance_cap=3.0
    )
    loss, _ = found.loss(micro(sequence_T=rows([3])))
    product = exp(log(1.0) + log(4.0))
    peers = [min(product, 3.0) * (-1.2 + 1) / 2]
    return Case(loss.reshape(1), [-0.3], peers, peers)


def bound_of_a_ratio() -> Case:
    ours = ratios.ratio(numbers(30.0, -30.0))
    verl = [exp(min(max(x, -20), 20)) for x in (30, -30)]
    return Case(ours, [exp(20), exp(-20)], [exp(30), exp(-30)], verl)


def bound_of_gspo() -> Case:
    # One token of log-ratio 30 and A = -1: the lower bound does not hold it.
    one = torch.tensor([1])
    ours = losses.gspo(numbers(30.0), numbers(-1.0), one, one - 1, low=3e-4, high=4e-4).loss_T
    return Case(ours, [exp(20)], [exp(30)], [exp(10)])


def bound_of_k3() -> Case:
    def k3(x: float) -> float:
        return exp(-x) - 1 + x

    ours = kl.k3(numbers(-5.0, -30.0))
    verl = [min(k3(-5), 10), min(k3(-20), 10)]
    return Case(ours, [exp(5) - 6, exp(20) - 21], [k3(-5), k3(-30)], verl)


def bounds_of_cispo() -> Case:
    # Ratio 6, A = 1 and log p = -1 with 4 for the upper bound.
    ours = losses.cispo(numbers(-1.0), numbers(log(6)), numbers(1.0), low=1.0, high=4.0).loss_T
    return Case(ours, [5.0], [min(6, 4)], [clipped(6, 1.0, 4.0)])


def dual_clip() -> Case:
    # By default, ratio 10 and A = -1.
    cap = AlgorithmSettings().dual_clip
    ours = losses.ppo(numbers(log(10)), numbers(-1.0), low=0.2, high=0.2, dual=cap).loss_T
    return Case(ours, [10.0], [max(10, clipped(10))], [min(3, max(10, clipped(10)))])


CASES: dict[str, Callable[[], Case]] = {
    "whitening": whitening,
    "deviation of a group": deviation_of_a_group,
    "member left alone": member_left_alone,
    "truncated responses": truncated_responses,
    "overlong length": overlong_length,
    "`sequence` aggregation": sequence_aggregation,
    "`constant` aggregation": constant_aggregation,
    "ratio of `rloo`": ratio_of_rloo,
    '`importance_level = "sequence"`': sequence_importance,
    "bound of a ratio": bound_of_a_ratio,
    "bound of `gspo`": bound_of_gspo,
    "bound of `k3`": bound_of_k3,
    "bounds of `cispo`": bounds_of_cispo,
    "dual clip": dual_clip,
}


def table() -> dict[str, dict[str, str]]:
    """The rows by their names, each with its cells by their columns."""
    section = PAGE.read_text().partition(HEADING)[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    head, _, *body = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return {row[0]: dict(zip(head, row, strict=True)) for row in body}


def test_every_row_has_a_case_and_every_case_a_row() -> None:
    assert list(table()) == list(CASES)


@pytest.mark.parametrize("name", CASES)
def test_a_row_says_what_is_so(name: str) -> None:
    row, case = table()[name], CASES[name]()
    ours = case.ours.tolist()
    assert ours == pytest.approx(case.by_hand, rel=1e-5, abs=1e-9)
    for column, values in (("TRL", case.trl), ("verl", case.verl)):
        if values is None:
            assert row[column] == "—"
            continue
        same = ours == pytest.approx(values, rel=1e-5, abs=1e-9)
        assert same == row[column].startswith("the same"), (column, ours, values)
    assert row["why"]
