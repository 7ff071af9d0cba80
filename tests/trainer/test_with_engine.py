"""Trainer and engine together: they agree on every token, and the policy learns."""

from pathlib import Path

import pytest
import torch

from dora_rl.algorithms.settings import AlgorithmSettings
from dora_rl.engines.base import Sampling
from dora_rl.trainer.settings import TrainSettings
from dora_rl.trainer.trainer import Trainer
from dora_rl.transports.weights.shared_directory import WeightStore
from tests.models.random_models import FAMILIES, make_model
from tests.trainer.rollouts import Rollouts, embedded

torch.set_num_threads(1)
PROMPTS = [(3, 4, 5), (9, 8, 7, 6, 5, 4), (11,), (12, 13)]


def open_trainer(
    model: Path, store: Path, train: TrainSettings, algorithm: str, temperature: float
) -> Trainer:
    return Trainer.open(
        model,
        WeightStore(store),
        train,
        AlgorithmSettings.model_validate({"preset": algorithm}),
        max_tokens=24,
        temperature=temperature,
        total_steps=100,
        seed=0,
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("behaviour", ["engine", "recompute"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_engine_and_trainer_agree_on_logprobs(
    tmp_path: Path, family: str, behaviour: str, temperature: float
) -> None:
    model = make_model(tmp_path / "model", family, seed=3, tie_word_embeddings=family == "qwen2")
    train = TrainSettings.model_validate({"behaviour": behaviour, "learning_rate": 0.01})
    trainer = open_trainer(model, tmp_path / "store", train, "grpo", temperature)
    sampling = Sampling(temperature=temperature, max_tokens=24)
    rollouts = Rollouts(embedded(model), tmp_path / "store", sampling, group_size=3)
    for version in range(3):
        trainer.publish(version)
        samples = rollouts.generate(version, PROMPTS, lambda tokens: tokens[0] % 5)
        report = trainer.train(version, samples)
        assert report.metrics["logprob_gap_max"] < 1e-4
        assert report.metrics["entropy_mean"] > 0.1
    # Of a stale batch the version that sampled is asked, where it can be.
    stale = trainer.train(3, samples)
    assert ("logprob_gap_max" in stale.metrics) == (behaviour == "recompute")
    assert stale.metrics.get("logprob_gap_max", 0.0) < 1e-4
    trainer.close()


@pytest.mark.parametrize("algorithm", ["reinforce", "grpo"])
def test_a_bandit_is_learned(tmp_path: Path, algorithm: str) -> None:
    """The reward is the share of sevens: one in 32 by chance."""
    shape = {"vocab_size": 32, "tie_word_embeddings": False}
    model = make_model(tmp_path / "model", "llama", seed=3, **shape)
    train = TrainSettings(learning_rate=0.01)
    trainer = open_trainer(model, tmp_path / "store", train, algorithm, 1.0)
    sampling = Sampling(max_tokens=6, ignore_eos=True)
    rollouts = Rollouts(embedded(model), tmp_path / "store", sampling, group_size=16)
    rewards = []
    for version in range(16):
        trainer.publish(version)
        samples = rollouts.generate(version, PROMPTS, lambda tokens: tokens.count(7) / len(tokens))
        rewards.append(trainer.train(version, samples).metrics["reward_mean"])
    trainer.close()
    assert max(rewards[:2]) < 0.2
    assert min(rewards[-3:]) > 0.7
