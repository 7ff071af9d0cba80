"""Train steps: exact accumulation, determinism, rejection without a trace, versions."""

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from dora_rl.samples import Sample, Span
from dora_rl.trainer.errors import StepRejected, TrainerError
from dora_rl.trainer.trainer import Trainer
from dora_rl.transports.weights.shared_directory import WeightStore
from tests.models.random_models import make_model
from tests.trainer.samples import batch_of, opened, sample, weights_of
from tests.weights.samples import identical

torch.set_num_threads(1)
ALGORITHMS: list[dict[str, Any]] = [
    {"preset": "grpo"},
    {"preset": "grpo", "kl": "k3"},
    {"preset": "ppo"},
    {"preset": "gspo"},
    {"preset": "dapo"},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("model")
    return make_model(root, "qwen3", seed=1, tie_word_embeddings=True)


def state_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """All that a step changes."""
    moments = trainer._replica._optimizer.state()
    heads = {
        name: parameter.detach().clone()
        for name, parameter in trainer._replica.policy.named_parameters()
        if name.startswith("value_head")
    }
    return weights_of(trainer) | {n: t.clone() for n, t in moments.items()} | heads


def trained(model: Path, store: Path, steps: int = 2, **settings: Any) -> dict[str, torch.Tensor]:
    with opened(model, store, **settings) as trainer:
        for step in range(steps):
            trainer.train(step, batch_of(step))
        return state_of(trainer)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
def test_the_same_batch_gives_the_same_bits(
    model: Path, tmp_path: Path, algorithm: dict[str, Any]
) -> None:
    one, other = (
        trained(model, tmp_path / name, algorithm=algorithm, minibatches=2) for name in "ab"
    )
    assert identical(one, other)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
def test_micro_batches_add_up_to_the_mini_batch(
    model: Path, tmp_path: Path, algorithm: dict[str, Any]
) -> None:
    gradients = []
    for budget in (1, 10_000):
        with opened(model, tmp_path / "store", algorithm, token_budget=budget) as trainer:
            # The first moment after one update is a tenth of the gradient.
            trainer.train(0, batch_of(5))
            gradients.append(trainer._replica._optimizer.state())
    for name, one in gradients[0].items():
        other = gradients[1][name]
        assert float((one - other).norm()) <= 1e-4 * float(one.norm()) + 1e-9, name


@pytest.mark.parametrize("change", [{"activation_checkpointing": True}, {"logprob_chunk": 7}])
def test_saving_memory_changes_nothing_else(
    model: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    plain = trained(model, tmp_path / "a")
    saving = trained(model, tmp_path / "b", **change)
    for name, tensor in plain.items():
        torch.testing.assert_close(saving[name], tensor, rtol=1e-3, atol=1e-5)


def test_bf16_computes_and_float32_remembers(model: Path, tmp_path: Path) -> None:
    with opened(model, tmp_path / "store", dtype="bfloat16") as trainer:
        before = weights_of(trainer)
        report = trainer.train(0, batch_of(1))
        after = weights_of(trainer)
    assert math.isfinite(report.metrics["loss"])
    assert all(tensor.dtype == torch.float32 for tensor in after.values())
    # A step of 1e-3 on weights of size 1 is below what bf16 could show.
    assert all(not torch.equal(before[n], t) for n, t in after.items() if t.dim() > 1)


def test_a_step_asked_for_again_is_not_taken_again(model: Path, tmp_path: Path) -> None:
    with opened(model, tmp_path / "store") as trainer:
        report = trainer.train(0, batch_of(1))
        state = state_of(trainer)
        assert trainer.train(0, batch_of(1)) == report
        assert identical(state, state_of(trainer))
        assert trainer.step == 1
        for step in (-1, 2):
            with pytest.raises(TrainerError, match=f"step `{step}` was asked for"):
                trainer.train(step, batch_of(1))
        trainer.train(1, batch_of(2))
        with pytest.raises(TrainerError, match="step `0` was asked for"):
            trainer.train(0, batch_of(1))


def poisoned(samples: tuple[Sample, ...], group: int, reward: float = 3e38) -> tuple[Sample, ...]:
    """One reward so large that the loss is no number; it passes every check before."""
    return tuple(
        msgspec.structs.replace(s, reward=reward if s.trajectory.group == group else s.reward)
        for s in samples
    )


@pytest.mark.parametrize("minibatches", [1, 3])
def test_a_rejected_step_leaves_no_trace(model: Path, tmp_path: Path, minibatches: int) -> None:
    algorithm = {"preset": "reinforce"}
    settings: dict[str, Any] = {"algorithm": algorithm, "minibatches": minibatches}
    with opened(model, tmp_path / "a", **settings) as trainer:
        trainer.train(0, batch_of(0))
        before, step = state_of(trainer), trainer.step
        with pytest.raises(StepRejected, match="of a mini-batch is not finite") as caught:
            trainer.train(1, poisoned(batch_of(1), group=2))
        assert set(range(8, 12)) <= set(caught.value.trajectories)
        assert (len(caught.value.trajectories) == 12) == (minibatches == 1)
        assert identical(before, state_of(trainer))
        assert trainer.step == step
        trainer.train(1, batch_of(1))
        after = state_of(trainer)
    assert identical(after, trained(model, tmp_path / "b", **settings))


def test_the_poison_comes_after_an_update(model: Path, tmp_path: Path) -> None:
    """Else the test above would not see whether an update was taken back."""
    with opened(model, tmp_path, {"preset": "reinforce"}, minibatches=3) as trainer:
        optimizer = trainer._replica._optimizer
        taken = []
        update = optimizer.update
        optimizer.update = lambda *args: taken.append(update(*args))  # type: ignore[method-assign]
        with pytest.raises(StepRejected):
            trainer.train(0, poisoned(batch_of(1), group=2))
        assert taken


def test_a_broken_sample_changes_nothing(model: Path, tmp_path: Path) -> None:
    with opened(model, tmp_path) as trainer:
        before = state_of(trainer)
        broken = msgspec.structs.replace(batch_of(1)[3], reward=float("inf"))
        with pytest.raises(StepRejected) as caught:
            trainer.train(0, (*batch_of(1)[:3], broken))
        assert caught.value.trajectories == (3,)
        assert identical(before, state_of(trainer))


def test_the_report_counts(model: Path, tmp_path: Path) -> None:
    samples = batch_of(4)
    with opened(model, tmp_path, minibatches=2) as trainer:
        report = trainer.train(0, samples)
    assert report.step == 0
    assert report.updates == 2
    assert report.sampled_tokens == sum(s.trajectory.num_sampled for s in samples)
    prompts = sum(len(s.trajectory.prompt) for s in samples)
    assert report.tokens == report.sampled_tokens + prompts
    assert all(math.isfinite(value) for value in report.metrics.values())
    assert 0 <= report.metrics["padding_share"] < 0.1
    assert report.metrics["reward_mean"] == pytest.approx(sum(s.reward for s in samples) / 12)
    wanted = {
        "loss",
        "grad_norm",
        "learning_rate",
        "entropy_mean",
        "clipped_share",
        "policy_kl_mean",
    }
    assert wanted <= report.metrics.keys()


def test_an_episode_that_fills_max_tokens_has_the_whole_overlong_penalty(
    model: Path, tmp_path: Path
) -> None:
    """Of 64 tokens at most it has 64: 16 that it sampled, 48 that its environment said."""
    observed = (Span(4, 28), Span(32, 56))
    tokens = tuple(range(10, 74))
    episodes = [sample(i, tokens=tokens, observed=observed, reward=1.0) for i in range(3)]
    short = sample(3, reward=1.0)  # 4 tokens: nothing of it
    with opened(model, tmp_path / "store", {"preset": "dapo"}) as trainer:
        metrics = trainer.train(0, (*episodes, short)).metrics
    assert metrics["reward_mean"] == 1.0
    assert metrics["shaped_reward_mean"] == pytest.approx(1 - 3 / 4)
    assert metrics["length_max"] == 16


def test_versions_are_published_in_their_order(model: Path, tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    with opened(model, tmp_path) as trainer:
        first = trainer.publish(0)
        assert trainer.publish(0) == first
        assert store.publish_directory(0, model).digest == first
        with pytest.raises(TrainerError, match="version `1` was asked for"):
            trainer.publish(1)
        trainer.train(0, batch_of(1))
        with pytest.raises(TrainerError, match="version `0` was asked for"):
            trainer.publish(0)
        assert trainer.publish(1) == store.load(1).digest != first
        assert identical(store.load(1).tensors, weights_of(trainer))


@pytest.mark.parametrize(
    ("own", "wished", "published"),
    [
        ("bfloat16", None, torch.bfloat16),
        ("bfloat16", "float32", torch.float32),
        ("float32", "bfloat16", torch.bfloat16),
    ],
)
def test_the_dtype_of_what_is_published(
    tmp_path: Path, own: str, wished: str | None, published: torch.dtype
) -> None:
    model = make_model(tmp_path / "model", "llama", seed=1, dtype=own)
    with opened(model, tmp_path / "store", publish_dtype=wished) as trainer:
        trainer.publish(0)
    tensors = WeightStore(tmp_path / "store").load(0).tensors
    assert {tensor.dtype for tensor in tensors.values()} == {published}


def test_recomputed_logprobs_are_those_of_the_version_that_sampled(
    model: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"behaviour": "recompute", "learning_rate": 0.05}
    with opened(model, tmp_path, **settings) as trainer:
        trainer.publish(0)
        trainer.train(0, batch_of(0))
        trainer.publish(1)
        stepper = trainer._replica._stepper
        weights = weights_of(trainer)
        exact = {}
        for version in (0, 1):
            batch = trainer._replica.batch(batch_of(3, version=version))
            exact[version] = stepper._recompute(batch, batch.versions)
        assert identical(weights, weights_of(trainer))
        assert (exact[0] - exact[1]).abs().max() > 0.01
        now, _ = stepper._pass(batch)
        torch.testing.assert_close(exact[1], now)
        # Both in one batch: each token has that of its own version.
        mixed = tuple(
            msgspec.structs.replace(
                s, trajectory=msgspec.structs.replace(s.trajectory, version=i % 2, segments=())
            )
            for i, s in enumerate(batch_of(3))
        )
        batch = trainer._replica.batch(mixed)
        found = stepper._recompute(batch, batch.versions)
        wanted = torch.where(batch.version_T == 0, exact[0], exact[1])
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_the_gap_is_measured_only_where_it_means_something(model: Path, tmp_path: Path) -> None:
    with opened(model, tmp_path) as trainer:
        assert "logprob_gap_mean" in trainer.train(0, batch_of(0)).metrics
        stale = trainer.train(1, batch_of(1))
        assert "logprob_gap_mean" not in stale.metrics
        assert stale.metrics["staleness_max"] == 1
        assert trainer.train(2, batch_of(2, version=2)).metrics["logprob_gap_max"] > 0


def test_the_reference_is_the_initial_policy(model: Path, tmp_path: Path) -> None:
    with opened(model, tmp_path, {"preset": "grpo", "kl": "k3"}) as trainer:
        first = trainer.train(0, batch_of(0)).metrics["reference_kl_mean"]
        assert first == pytest.approx(0, abs=1e-9)
        assert trainer.train(1, batch_of(1)).metrics["reference_kl_mean"] > 1e-6


@pytest.mark.parametrize(
    ("settings", "passes"),
    [
        ({}, 1),
        ({"minibatches": 3}, 1),
        ({"algorithm": {"preset": "ppo", "kl": "k3"}}, 3),  # values and the reference first
        ({"behaviour": "recompute"}, 2),
    ],
    ids=str,
)
def test_progress_is_told_after_every_pass_and_around_updates(
    model: Path, tmp_path: Path, settings: dict[str, Any], passes: int
) -> None:
    with opened(model, tmp_path, token_budget=1, **settings) as trainer:
        trainer.publish(0)
        ticks = []
        trainer.progress = lambda: ticks.append(trainer.step)
        report = trainer.train(0, batch_of(0))
    # Each of the 12 samples is a micro-batch; one version is loaded to recompute with it.
    loads = int("behaviour" in settings)
    assert ticks == [0] * (12 * passes + 2 * report.updates + loads)


def test_progress_is_told_between_the_tensors_of_a_checkpoint(model: Path, tmp_path: Path) -> None:
    with opened(model, tmp_path / "store") as trainer:
        trainer.train(0, batch_of(0))
        for action in (trainer.save, trainer.restore):
            ticks = []
            trainer.progress = lambda ticks=ticks: ticks.append(1)
            action(tmp_path / "saved")
            assert len(ticks) >= len(dict(trainer._replica.policy.named_parameters()))


def test_greedy_sampling_cannot_be_trained(model: Path, tmp_path: Path) -> None:
    from dora_rl.algorithms.settings import AlgorithmSettings
    from dora_rl.trainer.settings import TrainSettings

    with pytest.raises(TrainerError, match="temperature must be > 0 and finite to train: `0`"):
        Trainer.open(
            model,
            WeightStore(tmp_path),
            TrainSettings(),
            AlgorithmSettings(),
            max_tokens=8,
            temperature=0,
            total_steps=1,
            seed=0,
        )
