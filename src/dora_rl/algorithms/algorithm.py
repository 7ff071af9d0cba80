"""What a trainer calls: rewards into targets, tokens into one loss.

The functions of the other modules, put together as the settings say. It holds no state, and
knows neither models nor optimizers. Sequence-level ratios (loss `gspo`, `importance_level`
`sequence`) need whole sequences in every micro-batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dora_rl.algorithms import advantages, aggregation, corrections, kl, losses, ratios, shaping
from dora_rl.algorithms.settings import AlgorithmSettings
from dora_rl.algorithms.shapes import (
    ShapeError,
    check_precise,
    check_same,
    check_sequences,
    sequence_sum,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Responses:
    """A whole batch, before training. All is flat; there is no padding."""

    rewards_N: Tensor
    group_N: Tensor  # int64; which entries are siblings
    truncated_N: Tensor  # bool
    sequence_T: Tensor  # int64; the row of each token, sampled or observed, never falling
    mask_T: Tensor  # 1 where sampled, 0 where observed
    values_T: Tensor | None = None
    old_logprobs_T: Tensor | None = None
    reference_logprobs_T: Tensor | None = None

    @property
    def lengths_N(self) -> Tensor:
        """Tokens of each response, sampled and observed: what `max_tokens` bounds."""
        return self._count(torch.ones_like(self.sequence_T))

    @property
    def sampled_N(self) -> Tensor:
        """Tokens of each response that the policy wrote."""
        return self._count((self.mask_T != 0).to(torch.int64))

    def _count(self, ones_T: Tensor) -> Tensor:
        return sequence_sum(ones_T, self.sequence_T, self.rewards_N.numel())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Targets:
    """What the batch is trained towards. `mask_T` leaves out what is not trained on."""

    advantages_T: Tensor
    mask_T: Tensor
    returns_T: Tensor | None
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tokens:
    """A micro-batch, during training."""

    logprobs_T: Tensor  # with gradient
    old_logprobs_T: Tensor  # of the version that sampled, as the trainer computes them
    rollout_logprobs_T: Tensor  # of the same version, as the engine recorded them
    advantages_T: Tensor
    mask_T: Tensor
    weights_T: Tensor  # a slice of `Algorithm.weights` of the mini-batch
    sequence_T: Tensor
    reference_logprobs_T: Tensor | None = None
    values_T: Tensor | None = None  # with gradient
    old_values_T: Tensor | None = None
    returns_T: Tensor | None = None
    entropy_T: Tensor | None = None  # measured only


class Algorithm:
    """One algorithm, ready for use; `max_tokens` bounds a response, observations included."""

    def __init__(self, settings: AlgorithmSettings, *, max_tokens: int) -> None:
        if max_tokens < 1:
            raise ShapeError(f"max_tokens must be >= 1: `{max_tokens}`.")
        self.settings = settings
        self.max_tokens = max_tokens

    @property
    def needs_reference(self) -> bool:
        """Whether somebody has to compute the reference's log-probabilities."""
        return self.settings.kl != "none"

    @property
    def needs_values(self) -> bool:
        """Whether the model needs a value head."""
        return self.settings.advantage == "gae"

    def targets(self, responses: Responses) -> Targets:
        """Advantages and masks of a whole batch: the baselines see every sibling."""
        _check_responses(responses)
        settings = self.settings
        rewards_N = responses.rewards_N.to(torch.float32)
        if settings.overlong_buffer > 0:
            rewards_N = shaping.overlong(
                rewards_N,
                responses.lengths_N,
                max_tokens=self.max_tokens,
                buffer=settings.overlong_buffer,
                penalty=settings.overlong_penalty,
            )
        advantages_T, returns_T = self._advantages(responses, rewards_N)
        # What is not trained on is left out now: what the others are worth does not depend on it.
        mask_T = responses.mask_T
        if settings.mask_truncated:
            mask_T = mask_T.masked_fill(responses.truncated_N.bool()[responses.sequence_T], 0)
        advantages_T = advantages_T.masked_fill(mask_T == 0, 0.0)
        metrics = _target_metrics(responses, rewards_N, advantages_T, mask_T)
        return Targets(
            advantages_T=advantages_T, mask_T=mask_T, returns_T=returns_T, metrics=metrics
        )

    def weights(self, mask_T: Tensor, sequence_T: Tensor) -> Tensor:
        """What each token of one whole mini-batch weighs; micro-batches take slices."""
        return aggregation.weights(
            mask_T, sequence_T, self.settings.aggregation, max_tokens=self.max_tokens
        )

    def loss(self, tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a micro-batch, and sums that may be added over micro-batches."""
        _check_tokens(tokens)
        settings = self.settings
        log_ratio_T = ratios.log_ratio(tokens.logprobs_T, tokens.old_logprobs_T, tokens.mask_T)
        gap_T = ratios.log_ratio(tokens.old_logprobs_T, tokens.rollout_logprobs_T, tokens.mask_T)
        token_loss = self._policy_loss(tokens, log_ratio_T)
        loss_T = token_loss.loss_T
        sums = _policy_sums(tokens, log_ratio_T.detach(), gap_T.detach(), token_loss.clipped_T)
        if settings.importance != "none":
            correction = self._correction(tokens, gap_T)
            loss_T = loss_T * correction.weights_T
            sums["importance_sum"] = _masked_sum(correction.weights_T, tokens.mask_T)
            sums["importance_cut_count"] = _masked_sum(correction.cut_T, tokens.mask_T)
        loss = (tokens.weights_T * loss_T).sum()
        sums["policy_loss"] = loss.detach()
        if settings.kl != "none" and settings.kl_in == "loss":
            loss = loss + self._reference_loss(tokens, sums)
        if self.needs_values:
            loss = loss + self._value_loss(tokens, sums)
        sums["loss"] = loss.detach()
        return loss, {name: total.double() for name, total in sums.items()}

    def _advantages(self, responses: Responses, rewards_N: Tensor) -> tuple[Tensor, Tensor | None]:
        settings, sequence_T, mask_T = self.settings, responses.sequence_T, responses.mask_T
        penalty_T = self._penalty(responses)
        if settings.advantage in ("gae", "reinforce_pp"):
            rewards_T = shaping.token_rewards(rewards_N, mask_T, sequence_T)
            if penalty_T is not None:
                rewards_T = rewards_T - penalty_T
            if settings.advantage == "gae":
                return self._gae(responses, rewards_T)
            return advantages.reinforce_pp(
                rewards_T, mask_T, sequence_T, gamma=settings.gamma
            ), None
        if penalty_T is not None:
            rewards_N = shaping.less_penalty(rewards_N, penalty_T, sequence_T)
        group_N = responses.group_N
        match settings.advantage:
            case "grpo":
                advantages_N = advantages.grpo(rewards_N, group_N)
            case "dr_grpo":
                advantages_N = advantages.dr_grpo(rewards_N, group_N)
            case "rloo":
                advantages_N = advantages.rloo(rewards_N, group_N)
            case "pass_at_k":
                advantages_N = advantages.pass_at_k(rewards_N, group_N, k=settings.pass_k)
            case "reinforce_pp_baseline":
                return advantages.reinforce_pp_baseline(
                    rewards_N, group_N, mask_T, sequence_T
                ), None
            case "reward":
                advantages_N = rewards_N
        return advantages_N[sequence_T], None

    def _gae(self, responses: Responses, rewards_T: Tensor) -> tuple[Tensor, Tensor]:
        values_T = _given(responses.values_T, "values_T", "advantage `gae`")
        advantages_T, returns_T = advantages.gae(
            rewards_T,
            values_T,
            responses.mask_T,
            responses.sequence_T,
            gamma=self.settings.gamma,
            lam=self.settings.gae_lambda,
        )
        return advantages.whiten(advantages_T, responses.mask_T), returns_T

    def _penalty(self, responses: Responses) -> Tensor | None:
        """What the KL takes off each token's reward, if it is in the reward."""
        settings = self.settings
        if settings.kl == "none" or settings.kl_in == "loss":
            return None
        why = "kl_in `reward`"
        old_T = _given(responses.old_logprobs_T, "old_logprobs_T", why)
        reference_T = _given(responses.reference_logprobs_T, "reference_logprobs_T", why)
        distance_T = ratios.log_ratio(old_T.detach(), reference_T.detach(), responses.mask_T)
        kl_T: Tensor = kl.ESTIMATORS[settings.kl](distance_T)
        return settings.kl_coefficient * kl_T

    def _policy_loss(self, tokens: Tokens, log_ratio_T: Tensor) -> losses.TokenLoss:
        settings, advantages_T = self.settings, tokens.advantages_T
        logprobs_T = tokens.logprobs_T.masked_fill(tokens.mask_T == 0, 0.0)
        low, high = settings.clip_low, settings.clip_high
        match settings.loss:
            case "ppo":
                return losses.ppo(
                    log_ratio_T, advantages_T, low=low, high=high, dual=settings.dual_clip
                )
            case "gspo":
                return losses.gspo(
                    log_ratio_T,
                    advantages_T,
                    tokens.mask_T,
                    tokens.sequence_T,
                    low=low,
                    high=high,
                )
            case "cispo":
                return losses.cispo(logprobs_T, log_ratio_T, advantages_T, low=low, high=high)
            case "sapo":
                return losses.sapo(
                    log_ratio_T,
                    advantages_T,
                    positive=settings.sapo_positive,
                    negative=settings.sapo_negative,
                )
            case "reinforce":
                return losses.reinforce(logprobs_T, advantages_T)

    def _correction(self, tokens: Tokens, gap_T: Tensor) -> corrections.Correction:
        settings = self.settings
        if settings.importance_level == "sequence":
            gap_T = ratios.sequence_log_ratio(gap_T, tokens.sequence_T)
        correct = (
            corrections.truncated if settings.importance == "truncated" else corrections.masked
        )
        return correct(gap_T, cap=settings.importance_cap)

    def _reference_loss(self, tokens: Tokens, sums: dict[str, Tensor]) -> Tensor:
        reference_T = _given(tokens.reference_logprobs_T, "reference_logprobs_T", "kl_in `loss`")
        distance_T = ratios.log_ratio(tokens.logprobs_T, reference_T.detach(), tokens.mask_T)
        kl_T: Tensor = kl.ESTIMATORS[self.settings.kl](distance_T)
        sums["reference_kl_sum"] = _masked_sum(kl_T.detach(), tokens.mask_T)
        loss: Tensor = self.settings.kl_coefficient * (tokens.weights_T * kl_T).sum()
        sums["kl_loss"] = loss.detach()
        return loss

    def _value_loss(self, tokens: Tokens, sums: dict[str, Tensor]) -> Tensor:
        why = "advantage `gae`"
        value_loss = losses.value(
            _given(tokens.values_T, "values_T", why),
            _given(tokens.old_values_T, "old_values_T", why).detach(),
            _given(tokens.returns_T, "returns_T", why),
            clip=self.settings.value_clip,
        )
        sums["value_clipped_count"] = _masked_sum(value_loss.clipped_T, tokens.mask_T)
        loss: Tensor = (
            self.settings.value_coefficient * (tokens.weights_T * value_loss.loss_T).sum()
        )
        sums["value_loss"] = loss.detach()
        return loss


def summarise(sums: Mapping[str, Tensor | float]) -> dict[str, float]:
    """Metrics from added sums: `x_sum` becomes `x_mean`, `x_count` `x_share`, both a token."""
    num_tokens = max(1.0, float(sums["tokens"]))
    summary = {}
    for name, total in sums.items():
        for ending, replacement in (("_sum", "_mean"), ("_count", "_share")):
            if name.endswith(ending):
                summary[name.removesuffix(ending) + replacement] = float(total) / num_tokens
                break
        else:
            summary[name] = float(total)
    return summary


def _policy_sums(
    tokens: Tokens, log_ratio_T: Tensor, gap_T: Tensor, clipped_T: Tensor
) -> dict[str, Tensor]:
    """The KLs are from the policy that sampled, as its samples alone can estimate."""
    mask_T = tokens.mask_T
    sums = {
        "tokens": (mask_T != 0).sum(),
        "clipped_count": _masked_sum(clipped_T, mask_T),
        "ratio_sum": _masked_sum(ratios.ratio(log_ratio_T), mask_T),
        "policy_kl_sum": _masked_sum(kl.k3(-log_ratio_T), mask_T),
        "rollout_kl_sum": _masked_sum(kl.k3(-gap_T), mask_T),
    }
    if tokens.entropy_T is not None:
        sums["entropy_sum"] = _masked_sum(tokens.entropy_T.detach(), mask_T)
    return sums


def _target_metrics(
    responses: Responses, rewards_N: Tensor, advantages_T: Tensor, mask_T: Tensor
) -> dict[str, float]:
    raw_N = responses.rewards_N.double()
    groups, row_N = torch.unique(responses.group_N, return_inverse=True)
    bound = raw_N.new_zeros(groups.numel())
    top = bound.scatter_reduce(0, row_N, raw_N, "amax", include_self=False)
    bottom = bound.scatter_reduce(0, row_N, raw_N, "amin", include_self=False)
    sampled_N = responses.sampled_N.double()
    trained_T = advantages_T[mask_T != 0].double()
    return {
        "reward_mean": float(raw_N.mean()),
        "reward_std": float(raw_N.std(correction=0)),
        "shaped_reward_mean": float(rewards_N.double().mean()),
        "length_mean": float(sampled_N.mean()),
        "length_max": float(sampled_N.max()),
        "truncated_share": float(responses.truncated_N.double().mean()),
        "no_signal_share": float((top == bottom).double().mean()),
        "advantage_abs_mean": float(trained_T.abs().mean()) if trained_T.numel() else 0.0,
        "trained_tokens": float(trained_T.numel()),
    }


def _masked_sum(values_T: Tensor, mask_T: Tensor) -> Tensor:
    return values_T.double().masked_fill(mask_T == 0, 0.0).sum()


def _given(tensor: Tensor | None, name: str, why: str) -> Tensor:
    if tensor is None:
        raise ShapeError(f"{name} is missing, which {why} needs.")
    return tensor


def _check_responses(responses: Responses) -> None:
    check_same(
        rewards_N=responses.rewards_N,
        group_N=responses.group_N,
        truncated_N=responses.truncated_N,
    )
    check_same(
        sequence_T=responses.sequence_T,
        mask_T=responses.mask_T,
        values_T=responses.values_T,
        old_logprobs_T=responses.old_logprobs_T,
        reference_logprobs_T=responses.reference_logprobs_T,
    )
    check_sequences(responses.sequence_T, responses.rewards_N.numel())
    if not responses.rewards_N.numel():
        raise ShapeError("rewards_N is empty: a batch needs at least one response.")
    if not bool(torch.isfinite(responses.rewards_N).all()):
        raise ShapeError(f"rewards_N must be finite: `{responses.rewards_N.tolist()}`.")


def _check_tokens(tokens: Tokens) -> None:
    check_same(
        logprobs_T=tokens.logprobs_T,
        old_logprobs_T=tokens.old_logprobs_T,
        rollout_logprobs_T=tokens.rollout_logprobs_T,
        advantages_T=tokens.advantages_T,
        mask_T=tokens.mask_T,
        weights_T=tokens.weights_T,
        sequence_T=tokens.sequence_T,
        reference_logprobs_T=tokens.reference_logprobs_T,
        values_T=tokens.values_T,
        old_values_T=tokens.old_values_T,
        returns_T=tokens.returns_T,
        entropy_T=tokens.entropy_T,
    )
    check_sequences(tokens.sequence_T)
    check_precise(logprobs_T=tokens.logprobs_T, values_T=tokens.values_T)
