"""The algorithm as the trainer calls it: worked examples, and what no split or order changes."""

from dataclasses import replace
from math import e, log
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dora_rl.algorithms.algorithm import Algorithm, Responses, Tokens, summarise
from dora_rl.algorithms.shapes import ShapeError
from tests.algorithms.batches import (
    VARIANTS,
    algorithm,
    build,
    gradient,
    responses,
    rows,
    tokens,
    with_gradient,
)

algorithms = st.sampled_from(VARIANTS).map(lambda keys: algorithm(**keys))


def two_responses(**changes: Any) -> Responses:
    """One group of rewards 1 and 0: two tokens, then one observed between two; it was cut off."""
    batch = Responses(
        rewards_N=torch.tensor([1.0, 0.0]),
        group_N=torch.tensor([4, 4]),
        truncated_N=torch.tensor([False, True]),
        sequence_T=rows([2, 3]),
        mask_T=torch.tensor([1, 1, 1, 0, 1]),
    )
    return replace(batch, **changes)


def test_targets_by_hand() -> None:
    # dr_grpo: mean 1/2.
    found = algorithm(preset="dr_grpo").targets(two_responses())
    assert found.advantages_T.tolist() == [0.5, 0.5, -0.5, 0.0, -0.5]
    assert found.mask_T.tolist() == [1, 1, 1, 0, 1]
    assert found.returns_T is None
    assert found.metrics["reward_mean"] == 0.5
    assert found.metrics["reward_std"] == 0.5
    assert found.metrics["truncated_share"] == 0.5
    assert found.metrics["no_signal_share"] == 0.0
    assert found.metrics["trained_tokens"] == 4


def test_truncated_responses_count_in_the_baseline_but_are_not_trained() -> None:
    found = algorithm(preset="dr_grpo", mask_truncated=True).targets(two_responses())
    assert found.advantages_T.tolist() == [0.5, 0.5, 0.0, 0.0, 0.0]
    assert found.mask_T.tolist() == [1, 1, 0, 0, 0]
    # The rewards at the ends, 1 1 | 0 0: mean 1/2, squares 4 · 1/4, over 3 is 1/3. Over the first
    # response alone it would be 0. With the mean of the group gone first, it is the same.
    for preset in ("reinforce_pp", "reinforce_pp_baseline"):
        found = algorithm(preset=preset, mask_truncated=True).targets(two_responses())
        half = 3**0.5 / 2
        assert found.advantages_T.tolist() == pytest.approx([half, half, 0, 0, 0], abs=1e-5)


@given(algorithms, responses())
def test_what_is_not_trained_on_does_not_change_what_the_others_are_worth(
    found: Algorithm, batch: Responses
) -> None:
    settings = found.settings.model_dump()
    every = algorithm(**{**settings, "mask_truncated": False}).targets(batch)
    some = algorithm(**{**settings, "mask_truncated": True}).targets(batch)
    truncated_T = batch.truncated_N[batch.sequence_T]
    assert torch.equal(some.advantages_T, every.advantages_T.masked_fill(truncated_T, 0.0))
    assert torch.equal(some.mask_T, every.mask_T.masked_fill(truncated_T, False))


def test_long_responses_are_worth_less() -> None:
    # 8 tokens at most, the last 4 the buffer. The first has 6, of which 4 were observed: half of
    # the penalty, so 1 - 1/2 against 0. The second has 2, below the buffer.
    found = algorithm(preset="dr_grpo", overlong_buffer=0.5).targets(
        two_responses(
            sequence_T=rows([6, 2]),
            mask_T=torch.tensor([1, 0, 0, 0, 0, 1, 1, 1]),
        )
    )
    assert found.advantages_T.tolist() == [0.25, 0, 0, 0, 0, 0.25, -0.25, -0.25]
    assert found.metrics["reward_mean"] == 0.5
    assert found.metrics["shaped_reward_mean"] == 0.25
    # The metrics of lengths stay those of what was sampled.
    assert found.metrics["length_mean"] == found.metrics["length_max"] == 2


def test_the_kl_takes_off_the_reward() -> None:
    # k1 of 1, 2 | 3, (observed), 0, times 1/10: 1 - 0.3 and 0 - 0.3, so the mean is 0.2.
    found = algorithm(preset="dr_grpo", kl="k1", kl_in="reward", kl_coefficient=0.1).targets(
        two_responses(
            old_logprobs_T=torch.tensor([-1.0, -1.0, -1.0, 0.0, -1.0]),
            reference_logprobs_T=torch.tensor([-2.0, -3.0, -4.0, -50.0, -1.0]),
        )
    )
    assert found.advantages_T.tolist() == pytest.approx([0.5, 0.5, -0.5, 0.0, -0.5])
    # In gae it comes at the token that it belongs to: with gamma and lambda 1 and values 0 the
    # returns are what follows: 1 - 0.3, 1 - 0.2 | -0.3, 0.
    found = algorithm(
        preset="ppo", kl="k1", kl_in="reward", kl_coefficient=0.1, gae_lambda=1.0
    ).targets(
        two_responses(
            old_logprobs_T=torch.tensor([-1.0, -1.0, -1.0, 0.0, -1.0]),
            reference_logprobs_T=torch.tensor([-2.0, -3.0, -4.0, -50.0, -1.0]),
            values_T=torch.zeros(5),
        )
    )
    assert found.returns_T is not None
    assert found.returns_T.tolist() == pytest.approx([0.7, 0.8, -0.3, 0.0, 0.0])


def micro(**changes: Any) -> Tokens:
    """Ratio 2 with A = 1, ratio 1 with A = -1, and an observed token of the second sequence."""
    batch = Tokens(
        logprobs_T=torch.tensor([log(0.5), -1.0, -9.0]),
        old_logprobs_T=torch.tensor([log(0.25), -1.0, 0.0]),
        rollout_logprobs_T=torch.tensor([log(0.25), -1.0 - log(4), 0.0]),
        advantages_T=torch.tensor([1.0, -1.0, 0.0]),
        mask_T=torch.tensor([1, 1, 0]),
        weights_T=torch.tensor([0.5, 0.5, 0.0]),
        sequence_T=rows([1, 2]),
    )
    return replace(batch, **changes)


def test_the_loss_by_hand() -> None:
    # -min(2, 1.2) and +1, half each: -0.1.
    loss, sums = algorithm(preset="grpo").loss(micro())
    assert float(loss) == pytest.approx(-0.1)
    assert float(sums["tokens"]) == 2
    assert float(sums["clipped_count"]) == 1
    assert float(sums["ratio_sum"]) == pytest.approx(3)
    summary = summarise(sums)
    assert summary["clipped_share"] == 0.5
    assert summary["ratio_mean"] == pytest.approx(1.5)
    # k3 from the sampling policy: r - 1 - log r is 1 - log 2, and 0.
    assert summary["policy_kl_mean"] == pytest.approx((1 - log(2)) / 2)
    # Trainer over engine is 4 at the second token: 4 - 1 - log 4.
    assert summary["rollout_kl_mean"] == pytest.approx((3 - log(4)) / 2)
    assert summary["loss"] == summary["policy_loss"] == pytest.approx(-0.1)


def test_importance_weights_multiply_the_loss() -> None:
    # The second token's weight is 4: cut to 2, or left out.
    loss, sums = algorithm(preset="grpo", importance="truncated").loss(micro())
    assert float(loss) == pytest.approx((-1.2 + 2) / 2)
    assert summarise(sums)["importance_cut_share"] == 0.5
    assert summarise(sums)["importance_mean"] == 1.5
    loss, _ = algorithm(preset="grpo", importance="masked").loss(micro())
    assert float(loss) == pytest.approx(-0.6)


def test_at_the_sequence_level_tokens_share_a_weight() -> None:
    # One sequence of weights 1 and 4: the product is 4, above a cap of 3 and below one of 5.
    settings = {"preset": "grpo", "importance": "masked", "importance_level": "sequence"}
    both = micro(sequence_T=rows([3]))
    loss, sums = algorithm(**settings, importance_cap=3.0).loss(both)
    assert float(loss) == 0
    assert summarise(sums)["importance_cut_share"] == 1
    loss, sums = algorithm(**settings, importance_cap=5.0).loss(both)
    assert float(loss) == pytest.approx(4 * (-1.2 + 1) / 2)
    assert summarise(sums)["importance_cut_share"] == 0


def test_the_kl_adds_to_the_loss() -> None:
    # log p/q = 1 and 0: k3 = 1/e and 0, half each, times 0.1.
    reference_T = torch.tensor([log(0.5) - 1, -1.0, -99.0])
    found = algorithm(preset="grpo", kl="k3", kl_coefficient=0.1)
    loss, sums = found.loss(micro(reference_logprobs_T=reference_T))
    assert float(loss) == pytest.approx(-0.1 + 0.1 * 0.5 / e)
    assert summarise(sums)["reference_kl_mean"] == pytest.approx(0.5 / e)


def test_the_value_loss_adds_to_the_loss() -> None:
    # Errors 1 and 2, half their squares, half each: (0.5 + 2) / 2, times 0.1. No clipping.
    loss, sums = algorithm(preset="ppo", value_coefficient=0.1, value_clip=0.0).loss(
        micro(
            values_T=torch.tensor([1.0, 2.0, 50.0]),
            old_values_T=torch.zeros(3),
            returns_T=torch.zeros(3),
            entropy_T=torch.tensor([1.0, 2.0, 70.0]),
        )
    )
    assert float(loss) == pytest.approx(-0.1 + 0.125)
    assert summarise(sums)["value_loss"] == pytest.approx(0.125)
    assert summarise(sums)["entropy_mean"] == 1.5


def whole(found: Algorithm, parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """With the weights of the mini-batch, and as leaves of their own."""
    weights_T = found.weights(parts["mask_T"], parts["sequence_T"])
    return with_gradient({**parts, "weights_T": weights_T})


@given(algorithms, tokens(), st.lists(st.integers(0, 3), max_size=8))
def test_splitting_a_mini_batch_changes_nothing(
    found: Algorithm, parts: dict[str, Tensor], places: list[int]
) -> None:
    once, often = whole(found, parts), whole(found, parts)
    loss, sums = found.loss(build(once))
    loss.backward()
    place_N = torch.tensor([*places, *[0] * 8])
    total, added = torch.zeros((), dtype=torch.float64), dict.fromkeys(sums, 0.0)
    for place in range(4):
        part, some = found.loss(build(often, place_N[parts["sequence_T"]] == place))
        part.backward()
        total += part.detach()
        added = {name: added[name] + float(some[name]) for name in sums}
    torch.testing.assert_close(total, loss.detach())
    for name in ("logprobs_T", "values_T"):
        torch.testing.assert_close(gradient(often[name]), gradient(once[name]))
    assert added == pytest.approx({name: float(value) for name, value in sums.items()}, abs=1e-9)


@given(algorithms, tokens(), st.randoms(use_true_random=False))
def test_the_order_of_sequences_changes_nothing(
    found: Algorithm, parts: dict[str, Tensor], random: Random
) -> None:
    order = list(range(8))
    random.shuffle(order)
    new_row_T = torch.tensor(order)[parts["sequence_T"]]
    by_row = torch.argsort(new_row_T, stable=True)
    moved = {name: tensor[by_row] for name, tensor in parts.items()}
    moved["sequence_T"] = new_row_T[by_row]
    first, second = whole(found, parts), whole(found, moved)
    loss, _ = found.loss(build(first))
    other, _ = found.loss(build(second))
    loss.backward()
    other.backward()
    torch.testing.assert_close(loss, other)
    torch.testing.assert_close(
        gradient(first["logprobs_T"])[by_row], gradient(second["logprobs_T"])
    )


@given(algorithms, tokens())
def test_what_was_observed_has_no_say(found: Algorithm, parts: dict[str, Tensor]) -> None:
    observed = parts["mask_T"] == 0
    keep = ("mask_T", "sequence_T")
    noisy = {
        name: tensor if name in keep else tensor.masked_fill(observed, -77.0)
        for name, tensor in parts.items()
    }
    first, second = whole(found, parts), whole(found, noisy)
    loss, sums = found.loss(build(first))
    other, others = found.loss(build(second))
    other.backward()
    torch.testing.assert_close(loss, other)
    assert not gradient(second["logprobs_T"])[observed].any()
    for name, total in sums.items():
        torch.testing.assert_close(total, others[name])


@given(algorithms, tokens(spread=1e4))
def test_hostile_differences_give_finite_losses(found: Algorithm, parts: dict[str, Tensor]) -> None:
    single = {
        name: tensor.float() if tensor.is_floating_point() else tensor
        for name, tensor in parts.items()
    }
    leaves = whole(found, single)
    loss, sums = found.loss(build(leaves))
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(gradient(leaves["logprobs_T"])).all()
    assert all(torch.isfinite(total) for total in sums.values())


@given(algorithms, responses())
def test_targets_are_finite_and_keep_to_the_mask(found: Algorithm, batch: Responses) -> None:
    targets = found.targets(batch)
    assert torch.isfinite(targets.advantages_T).all()
    assert not targets.advantages_T[~targets.mask_T].any()
    assert (targets.mask_T <= batch.mask_T).all()
    if found.settings.mask_truncated:
        assert not targets.mask_T[batch.truncated_N[batch.sequence_T]].any()
    else:
        assert torch.equal(targets.mask_T, batch.mask_T)
    assert (targets.returns_T is not None) == found.needs_values
    assert all(abs(value) < float("inf") for value in targets.metrics.values())


def test_needs() -> None:
    assert not algorithm(preset="grpo").needs_reference
    assert algorithm(preset="grpo", kl="k2").needs_reference
    assert not algorithm(preset="grpo").needs_values
    assert algorithm(preset="ppo").needs_values


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ShapeError, match="values_T is missing, which advantage `gae` needs"):
        algorithm(preset="ppo").targets(two_responses())
    with pytest.raises(ShapeError, match="old_logprobs_T is missing, which kl_in `reward` needs"):
        algorithm(kl="k1", kl_in="reward").targets(two_responses())
    with pytest.raises(ShapeError, match="reference_logprobs_T is missing, which kl_in `loss`"):
        algorithm(kl="k2").loss(micro())
    with pytest.raises(ShapeError, match="rewards_N must be finite"):
        algorithm().targets(two_responses(rewards_N=torch.tensor([1.0, float("nan")])))
    with pytest.raises(ShapeError, match="weights_T must be flat and as long as logprobs_T"):
        algorithm().loss(micro(weights_T=torch.ones(2)))
    with pytest.raises(ShapeError, match="max_tokens must be >= 1: `0`"):
        Algorithm(algorithm().settings, max_tokens=0)
