"""vLLM's log-probabilities against the trainer's, and what the algorithms make of the gap."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from dora_rl.samples import Sample
from tests.engines.vllm.gap import GROUP_SIZE, generate, open_trainer, step_on
from tests.engines.vllm.shape import SHAPE
from tests.models.random_models import make_model, random_model
from tests.trainer.samples import all_of

pytestmark = pytest.mark.vllm
MODEL: dict[str, Any] = {**SHAPE, "tie_word_embeddings": False}
CAP = 1.02  # bfloat16 is that far off for some tokens, and not for others


class Sampled(NamedTuple):
    model: Path
    store: Path
    by_dtype: dict[str, list[Sample]]


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Sampled:
    """The same weights in vLLM, in two dtypes; the trainer publishes them in float32."""
    root = tmp_path_factory.mktemp("gap")
    model = make_model(root / "model", "llama", seed=1, **MODEL)
    trainer = open_trainer(model, root / "store")
    trainer.publish(0)
    trainer.close()
    dtypes = ("float32", "bfloat16")
    found = {dtype: generate(model, root / "store", dtype, num_groups=6) for dtype in dtypes}
    return Sampled(model, root / "store", found)


@pytest.mark.parametrize("trainer", ["float32", "bfloat16"])
@pytest.mark.parametrize("engine", ["float32", "bfloat16"])
def test_the_gap_is_rounding(engine: str, trainer: str, sampled: Sampled) -> None:
    model, store, by_dtype = sampled
    metrics = step_on(model, store, by_dtype[engine], trainer).metrics
    mean, largest = metrics["logprob_gap_mean"], metrics["logprob_gap_max"]
    if engine == trainer == "float32":
        assert mean < 1e-4 and largest < 1e-3
    else:  # of a random model, whose largest gap differs by far from one sample to the next
        assert 1e-3 < mean < 0.3


# The corrections, by plain torch and transformers


def logprobs(model: Any, sample: Sample) -> Tensor:
    """The trainer's of each token of the response, with gradient."""
    prompt, tokens = sample.trajectory.prompt, sample.trajectory.tokens
    logits = model(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


def advantages(samples: list[Sample]) -> list[float]:
    """GRPO's: by how many deviations a reward is above the mean of its group."""
    rewards = torch.tensor([sample.reward for sample in samples]).reshape(-1, GROUP_SIZE)
    centred = rewards - rewards.mean(1, keepdim=True)
    return (centred / (rewards.std(1, keepdim=True) + 1e-6)).flatten().tolist()


def weight(gap_T: Tensor, correction: dict[str, Any]) -> Tensor:
    """By which a token's loss is multiplied; `gap_T` is log p_trainer - log p_engine."""
    kind = correction.get("importance", "none")
    if kind == "none":
        return torch.ones_like(gap_T)
    if correction.get("importance_level") == "sequence":
        gap_T = gap_T.sum().expand_as(gap_T)
    ratio_T = gap_T.exp()
    return ratio_T.clamp(max=CAP) if kind == "truncated" else ratio_T * (ratio_T <= CAP)


class Expected(NamedTuple):
    loss: float
    mean_weight: float
    gradients: dict[str, Tensor]


def expected(samples: list[Sample], correction: dict[str, Any]) -> Expected:
    """Of a first step: the policy is still the one that sampled, but for the engine's rounding."""
    model = random_model("llama", seed=1, **MODEL)
    loss, weights = torch.zeros(()), []
    for sample, advantage in zip(samples, advantages(samples), strict=True):
        logprobs_T = logprobs(model, sample)
        old_T = logprobs_T.detach()
        weight_T = weight(old_T - torch.tensor(sample.trajectory.logprobs), correction)
        ratio_T = (logprobs_T - old_T).exp()
        loss = loss - (advantage * weight_T * ratio_T).mean() / len(samples)
        weights.append(weight_T)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Expected(float(loss.detach()), float(torch.cat(weights).mean()), gradients)


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Of two gradients, as a share of the second."""
    total = sum(float(tensor.square().sum()) for tensor in other.values())
    return (sum(float((one[n] - other[n]).square().sum()) for n in other) / total) ** 0.5


CORRECTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "truncated": {"importance": "truncated", "importance_cap": CAP},
    "masked": {"importance": "masked", "importance_cap": CAP},
    "sequence": {
        "importance": "truncated",
        "importance_level": "sequence",
        "importance_cap": CAP,
    },
}


@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_correction_weighs_tokens_by_trainer_over_engine(name: str, sampled: Sampled) -> None:
    """The gradient is that of a plain computation from the log-probabilities that vLLM reported."""
    model, store, by_dtype = sampled
    samples, correction = by_dtype["bfloat16"], CORRECTIONS[name]
    trainer = open_trainer(model, store, correction)
    try:
        metrics = trainer.train(0, samples).metrics
        state = all_of(trainer)
    finally:
        trainer.close()
    prefix = "exp_avg.model."  # the first moment: a tenth of the gradient
    found = {n.removeprefix(prefix): t / 0.1 for n, t in state.items() if n.startswith(prefix)}
    right, without = expected(samples, correction), expected(samples, {})
    assert difference(found, right.gradients) < 1e-3
    assert metrics["loss"] == pytest.approx(right.loss, abs=1e-5)
    if name == "none":
        assert "importance_mean" not in metrics
        return
    assert metrics["importance_mean"] == pytest.approx(right.mean_weight, abs=1e-5)
    assert 0 < metrics["importance_cut_share"] < 1
    assert difference(found, without.gradients) > 5e-3
