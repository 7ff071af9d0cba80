"""Layers with kernels compute what transformers' do: values and gradients, in every mode."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from dora_rl.machine.fast_paths import Trial
from dora_rl.samples import Sample, Span
from dora_rl.trainer.batches import Batch, collate, collate_shared, make_batch
from dora_rl.trainer.errors import TrainerError
from dora_rl.trainer.model import Policy, load
from dora_rl.trainer.native import layers
from dora_rl.trainer.settings import LoraSettings, TrainSettings
from tests.models.kernels import needs_kernels
from tests.models.random_models import FAMILIES, make_model, random_model
from tests.trainer.samples import VOCAB, all_of, opened, sample

torch.set_num_threads(1)
_CPU = torch.device("cpu")


def siblings(seed: int, groups: int = 3) -> tuple[Sample, ...]:
    """Samples that share prompts, some of one token, some with an observation."""
    draw = random.Random(seed)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(VOCAB) for _ in range(count))

    samples = []
    for group in range(groups):
        prompt = tokens(draw.randint(1, 20))
        for member in range(4):
            response = tokens(draw.choice([1, 2, 7, 19]))
            observed = (Span(1, 3),) if len(response) > 3 and draw.random() < 0.5 else ()
            samples.append(
                sample(4 * group + member, prompt, response, observed=observed, version=0)
            )
    return tuple(samples)


def policy_of(directory: Path, native: bool, **other: Any) -> Policy:
    lora = other.pop("lora", None)
    train = TrainSettings(logprob_chunk=16, native_kernels=native, **other)
    return load(directory, train, 0.7, seed=3, value_head=True, lora=lora)[0]


def outcome(policy: Policy, batch: Batch, rows: Sequence[int]) -> list[Tensor]:
    """Log-probabilities, entropies and values in the flat layout, then all gradients."""
    micro = (collate_shared if policy.native else collate)(batch, tuple(rows))
    found = policy(
        micro.input_BT,
        micro.positions_T,
        micro.targets_T,
        micro.sampled_T,
        micro.lengths,
        micro.packing,
    )
    flat = [torch.zeros(len(batch.mask_T)).index_copy(0, micro.flat_T, part) for part in found]
    weights = torch.linspace(-1, 1, len(batch.mask_T))
    trained = [p for p in policy.parameters() if p.requires_grad]
    grads = torch.autograd.grad((weights * (flat[0] + flat[2])).sum(), trained)
    return [*(part.detach() for part in flat), *grads]


def check_alike(ours: Policy, theirs: Policy, seed: int, bound: float) -> None:
    batch = make_batch(siblings(seed), vocab_size=VOCAB)
    rows = random.Random(seed).sample(range(12), 9)
    assert ours.native and not theirs.native
    for mine, right in zip(outcome(ours, batch, rows), outcome(theirs, batch, rows), strict=True):
        scale = max(1.0, float(right.abs().max()))
        assert (mine - right).abs().max() <= bound * scale


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: make_model(root / family, family, seed=1) for family in FAMILIES}


@needs_kernels
@pytest.mark.parametrize("family", FAMILIES)
def test_shared_prompts_are_what_separate_ones_are(models: dict[str, Path], family: str) -> None:
    ours, theirs = (policy_of(models[family], native) for native in (True, False))

    @settings(max_examples=10)
    @given(seed=st.integers(0, 99))
    def check(seed: int) -> None:
        check_alike(ours, theirs, seed, 1e-4)

    check()


@needs_kernels
@pytest.mark.parametrize(
    "other",
    [{"activation_checkpointing": True}, {"lora": LoraSettings(rank=4)}],
    ids=["checkpointing", "lora"],
)
def test_and_with_what_a_run_may_add(models: dict[str, Path], other: dict[str, Any]) -> None:
    ours, theirs = (policy_of(models["llama"], native, **other) for native in (True, False))
    check_alike(ours, theirs, 5, 1e-4)


@needs_kernels
def test_in_bfloat16_they_are_as_near_to_float32_as_torch_is(models: dict[str, Path]) -> None:
    batch = make_batch(siblings(5), vocab_size=VOCAB)
    kinds = ({"native": False}, *({"native": n, "dtype": "bfloat16"} for n in (True, False)))
    exact, ours, theirs = (
        torch.cat([t.flatten() for t in outcome(policy_of(models["llama"], **kind), batch, (0, 5))])
        for kind in kinds
    )
    assert (ours - exact).norm() <= 1.5 * (theirs - exact).norm()
    assert ours.dtype == torch.float32 and not torch.equal(ours, exact)


@needs_kernels
@pytest.mark.parametrize("budget", [25, 4096])
def test_a_step_is_the_same_step(models: dict[str, Path], tmp_path: Path, budget: int) -> None:
    found = {}
    for native in (True, False):
        directory = tmp_path / str(native)
        with opened(
            models["qwen3"], directory, token_budget=budget, native_kernels=native
        ) as trainer:
            report = trainer.train(0, siblings(2))
            found[native] = all_of(trainer)
        assert not native or report.metrics["padding_share"] == 0
    for name, right in found[False].items():
        if not name.startswith("exp_avg"):
            continue  # a first step of Adam is a sign
        scale = max(1e-6, float(right.abs().max()))
        assert (found[True][name] - right).abs().max() <= 1e-3 * scale, name


def test_other_layers_are_left_alone(models: dict[str, Path]) -> None:
    gemma = Gemma2ForCausalLM(
        Gemma2Config(num_hidden_layers=1, hidden_size=32, intermediate_size=32, vocab_size=20)
    )
    sliding = random_model("qwen2", seed=1)
    sliding.model.layers[0].self_attn.sliding_window = 8
    small = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "vocab_size": 20}
    windowed = MistralForCausalLM(MistralConfig(**small, num_attention_heads=4, sliding_window=8))
    turning = random_model("llama", seed=1)
    turning.config.rope_parameters["rope_type"] = "dynamic"
    for model in (gemma, sliding, windowed, turning):
        assert not layers.supported(model) and not layers.install(model, None, _CPU)
    assert layers.supported(random_model("llama", seed=1))


def test_the_dropout_of_an_adapter_needs_prompts_of_their_own(models: dict[str, Path]) -> None:
    lora = LoraSettings(rank=4, dropout=0.5)
    assert not load(models["llama"], TrainSettings(), 1.0, lora=lora)[0].native


def test_without_kernels_torch_does_it_unless_they_were_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layers, "native_training", lambda: Trial(False, "no C compiler"))
    model = random_model("llama", seed=1)
    assert not layers.install(model, None, _CPU) and not layers.install(model, False, _CPU)
    with pytest.raises(TrainerError, match="cannot be `true` on this machine: no C compiler"):
        layers.install(model, True, _CPU)


@needs_kernels
def test_kernels_that_compute_something_else_are_not_used(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model whose layers are not what their class says is trained by its own code."""
    wrong = layers.gated
    monkeypatch.setattr(layers, "gated", lambda gate, up: wrong(gate, up) * 2)
    monkeypatch.setattr(layers, "native_training", lambda: Trial(True, "whatever"))
    assert not load(models["llama"], TrainSettings(), 1.0)[0].native
