"""Several adapters in one batch of the embedded engine: each as transformers with PEFT has it."""

from pathlib import Path
from typing import Any

import pytest
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dora_rl.engines.base import Request, Sampled, Sampling
from dora_rl.engines.embedded import EmbeddedEngine, EngineSettings
from dora_rl.models import adapters
from dora_rl.models.linear import Layout
from dora_rl.transports.weights.shared_directory import WeightStore
from dora_rl.weights.errors import WeightsError
from tests.engines.random_versions import AdapterModels, Models, logprobs_of
from tests.models.kernels import needs_kernels

SAMPLING = Sampling(max_tokens=8, ignore_eos=True, raw_logprobs=True)
VERSIONS = (0, 1, 2)


class SomeTargets(AdapterModels):
    """Modules that are multiplied side by side have an adapter, or not."""

    ADAPTER_TARGETS = ("k_proj", "o_proj", "up_proj")


def with_peft(models: Models, n: int) -> Any:
    base = AutoModelForCausalLM.from_pretrained(models.directory)
    return PeftModel.from_pretrained(base, str(models.path(n)))


def engine_of(models: Models, **settings: Any) -> EmbeddedEngine:
    engine = EmbeddedEngine.for_model(
        models.directory, EngineSettings(slots=16, block_tokens=8, **settings), lora=True
    )
    for version in VERSIONS:
        engine.install(version, models.path(version))
    return engine


@pytest.mark.parametrize(
    "settings",
    [
        {"layout": Layout.PACKED},
        {"layout": Layout.MAPPED},
        pytest.param({"native_kernels": True}, marks=needs_kernels),
        {"deterministic": True},
    ],
    ids=["packed", "mapped", "native", "exact"],
)
@pytest.mark.parametrize("kind", [AdapterModels, SomeTargets])
@pytest.mark.parametrize("joined", [0, 1 << 20], ids=["apart", "joined"])
def test_each_of_a_batch_has_its_own_adapter(
    joined: int,
    kind: type[AdapterModels],
    settings: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    family = "qwen2" if joined else "llama"  # with biases, and without
    monkeypatch.setattr(adapters, "_JOINED_NUMBERS", joined)
    models = kind(tmp_path, family)
    engine = engine_of(models, **settings)
    requests = [Request(i, i % 3, (3 + i, 4, 5), SAMPLING) for i in range(12)]
    for request in requests:
        engine.submit(request)
    tokens: dict[int, list[int]] = {i: [] for i in range(12)}
    raw: dict[int, list[float]] = {i: [] for i in range(12)}
    while not engine.idle:
        for output in engine.step():
            assert isinstance(output, Sampled) and output.raw_logprobs is not None
            tokens[output.trajectory] += output.tokens
            raw[output.trajectory] += output.raw_logprobs
    references = [with_peft(models, n) for n in VERSIONS]
    for i, request in enumerate(requests):
        whole = (*request.prompt, *tokens[i])
        own, other = (
            logprobs_of(references[n], whole)[len(request.prompt) - 1 :]
            for n in (i % 3, (i + 1) % 3)
        )
        assert raw[i] == pytest.approx(own, abs=1e-3)
        assert raw[i] != pytest.approx(other, abs=0.05)


def test_files_may_have_a_tied_head_as_well(tmp_path: Path) -> None:
    """As many published models do; it is no tensor of its own."""
    models = AdapterModels(tmp_path, "qwen3", tie_word_embeddings=True)
    path = models.directory / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, path)
    engine = engine_of(models)
    engine.submit(Request(1, 1, (3, 4, 5), SAMPLING))
    while not engine.idle:
        engine.step()


def test_what_is_not_of_this_base_is_refused(tmp_path: Path) -> None:
    models = AdapterModels(tmp_path / "ours", "llama")
    engine = engine_of(models)
    full = Models(tmp_path / "full", "llama")
    with pytest.raises(WeightsError, match=r"full set of weights, .* serves LoRA adapters"):
        engine.install(7, full.path(1))
    other = AdapterModels(tmp_path / "other", "llama", intermediate_size=96)
    with pytest.raises(WeightsError, match="adapter of another base"):
        engine.install(7, other.path(1))
    store = WeightStore(tmp_path / "store")
    store.publish(7, {k: v[:2] for k, v in models.tensors(1).items()}, adapter=models.adapter)
    with pytest.raises(WeightsError, match=r"has the shape `\(2, .*with rank 3 this model has"):
        engine.install(7, store.path(7))
    fewer = dict(list(models.tensors(1).items())[2:])
    store.publish(8, fewer, adapter=models.adapter)
    with pytest.raises(WeightsError, match=r"has the shape `none`"):
        engine.install(8, store.path(8))
    plain = EmbeddedEngine.for_model(models.directory)
    with pytest.raises(WeightsError, match=r"LoRA adapter, .* serves full sets of weights"):
        plain.install(0, models.path(0))
    assert set(engine.load().versions) == set(VERSIONS)
