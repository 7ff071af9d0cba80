"""Log-probabilities are those of transformers on the same tokens, however they came about."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dora_rl.engines.base import ParkReason, Request, Sampled, Sampling
from dora_rl.engines.embedded import EmbeddedEngine, EngineSettings
from dora_rl.models.linear import Layout
from dora_rl.models.packaged import find
from dora_rl.transports.weights.shared_directory import WeightStore
from tests.models.kernels import dots_everywhere, needs_kernels
from tests.models.random_models import model_shapes, random_model

FP32 = 1e-4
# Against the same bf16 weights in fp32 arithmetic; rounding to 8 bits in each product of few
# rows, as any bf16 model does. transformers' own bf16 is checked to be no closer.
BF16 = 0.15
TOKENS = 10


class Checked:
    """Runs requests through an engine and compares every log-probability."""

    def __init__(self, model: Any, root: Path, **overrides: Any) -> None:
        self.model = model
        directory = root / "model"
        model.save_pretrained(directory)
        self.directory = directory
        self.store = WeightStore(root / "store")
        self.store.publish_directory(0, directory)
        self.engine = self.make(**overrides)

    def make(self, **overrides: Any) -> EmbeddedEngine:
        chosen = {"slots": 8, "block_tokens": 4, "kv_budget_tokens": 4096, **overrides}
        engine = EmbeddedEngine.for_model(self.directory, EngineSettings(**chosen))
        engine.install(0, self.store.path(0))
        return engine

    def run(self, engine: EmbeddedEngine, tokens: dict[int, list[int]]) -> dict[int, list[float]]:
        raw: dict[int, list[float]] = {trajectory: [] for trajectory in tokens}
        while not engine.idle:
            for output in engine.step():
                if isinstance(output, Sampled):
                    assert output.raw_logprobs is not None
                    tokens[output.trajectory] += output.tokens
                    raw[output.trajectory] += output.raw_logprobs
        return raw

    def worst(self, prompt: tuple[int, ...], tokens: list[int], raw: list[float]) -> float:
        expected = reference(self.model, prompt, tokens)[-len(raw) :]
        return max(abs(a - b) for a, b in zip(raw, expected, strict=True))


def reference(model: Any, prompt: tuple[int, ...], tokens: list[int]) -> list[float]:
    ids = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        logits = model(ids).logits[0].float()
    logprobs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return logprobs.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1).tolist()


def sampling(**overrides: Any) -> Sampling:
    return Sampling(**{"max_tokens": TOKENS, "ignore_eos": True, "raw_logprobs": True, **overrides})


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    shape=model_shapes(),
    seed=st.integers(0, 1000),
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    chunk=st.sampled_from([3, 16, 512]),
    layout=st.sampled_from([None, Layout.MAPPED, Layout.PACKED, Layout.TILED]),
    deterministic=st.booleans(),
)
@pytest.mark.slow
def test_fp32_of_every_family_and_shape(
    shape: dict[str, Any],
    seed: int,
    lengths: list[int],
    chunk: int,
    layout: Layout | None,
    deterministic: bool,
) -> None:
    model = random_model(seed=seed, **shape)
    with tempfile.TemporaryDirectory() as root:
        checked = Checked(
            model,
            Path(root),
            prefill_chunk=chunk,
            layout=None if deterministic else layout,
            deterministic=deterministic,
        )
        vocabulary = checked.engine.config.vocab_size
        generator = torch.Generator().manual_seed(seed)
        prompts = [
            tuple(torch.randint(vocabulary, (n,), generator=generator).tolist()) for n in lengths
        ]
        tokens: dict[int, list[int]] = {i: [] for i in range(2 * len(prompts))}
        for i in tokens:  # two members of each group share a prompt
            checked.engine.submit(Request(i, 0, prompts[i // 2], sampling(), seed=seed))
        for i, raw in checked.run(checked.engine, tokens).items():
            assert len(raw) == TOKENS
            assert checked.worst(prompts[i // 2], tokens[i], raw) < FP32


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Checked:
    return Checked(random_model("qwen3", seed=5), tmp_path_factory.mktemp("small"))


PROMPT = tuple(range(3, 20))


@pytest.mark.parametrize("deterministic", [True, False])
def test_after_a_move_and_one_that_was_undone(small: Checked, deterministic: bool) -> None:
    source, target = (small.make(deterministic=deterministic, slots=n) for n in (8, 3))
    tokens: dict[int, list[int]] = {i: [] for i in range(4)}
    for i in tokens:
        source.submit(Request(i, 0, PROMPT, sampling(), seed=1))
    raw: dict[int, list[float]] = {i: [] for i in tokens}

    def take(engine: EmbeddedEngine) -> None:
        for output in engine.step():
            if isinstance(output, Sampled):
                assert output.raw_logprobs is not None
                tokens[output.trajectory] += output.tokens
                raw[output.trajectory] += output.raw_logprobs

    for _ in range(4):
        take(source)
    source.export_trajectory(0)  # leaves it parked
    target.import_trajectory(source.export_trajectory(1))
    source.cancel(1)
    take(source)
    source.resume(0)
    while not (source.idle and target.idle):
        take(source)
        take(target)
    for i in tokens:
        assert len(tokens[i]) == TOKENS
        assert small.worst(PROMPT, tokens[i], raw[i]) < FP32


def test_after_parking_for_room(small: Checked) -> None:
    engine = small.make(kv_budget_tokens=48)
    tokens: dict[int, list[int]] = {i: [] for i in range(4)}
    raw: dict[int, list[float]] = {i: [] for i in tokens}
    for i in tokens:
        engine.submit(Request(i, 0, PROMPT, sampling(), seed=1))
    parked = 0
    while not engine.idle:
        for output in engine.step():
            if isinstance(output, Sampled):
                assert output.raw_logprobs is not None
                tokens[output.trajectory] += output.tokens
                raw[output.trajectory] += output.raw_logprobs
            parked += getattr(output, "reason", None) is ParkReason.KV_BUDGET
    assert parked
    for i in tokens:
        assert small.worst(PROMPT, tokens[i], raw[i]) < FP32


FORMS = pytest.mark.parametrize(
    "form",
    [
        {"layout": Layout.PACKED},
        {"layout": Layout.MAPPED},
        pytest.param({"native_kernels": True}, marks=needs_kernels),
    ],
    ids=["packed", "mapped", "native"],
)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@FORMS
def test_bf16_weights_without_bf16_products_are_multiplied_in_fp32(
    family: str, form: dict[str, Any], tmp_path: Path
) -> None:
    model = random_model(family, seed=3, dtype="bfloat16")
    with dots_everywhere():
        checked = Checked(model, tmp_path, bf16_products=False, **form)
    tokens: dict[int, list[int]] = {0: [], 1: []}
    for i in tokens:
        checked.engine.submit(Request(i, 0, PROMPT[: 5 + i], sampling(), seed=2))
    checked.model = random_model(family, seed=3)  # whose rope was never rounded
    checked.model.load_state_dict(model.state_dict())
    for i, raw in checked.run(checked.engine, tokens).items():
        assert checked.worst(PROMPT[: 5 + i], tokens[i], raw) < FP32


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@FORMS
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_bf16_is_as_close_as_bf16_allows(
    family: str, form: dict[str, Any], kv_dtype: str, tmp_path: Path
) -> None:
    # Tame weights: with large ones bf16 has no meaningful bound at all.
    model = random_model(family, seed=3, dtype="bfloat16")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(0.5)
    with dots_everywhere():
        checked = Checked(model, tmp_path, kv_dtype=kv_dtype, **form)
    tokens: dict[int, list[int]] = {i: [] for i in range(6)}
    for i in tokens:
        checked.engine.submit(Request(i, 0, PROMPT[: 5 + i], sampling(), seed=2))
    raw = checked.run(checked.engine, tokens)
    theirs = {i: reference(model, PROMPT[: 5 + i], tokens[i]) for i in tokens}
    model.float()
    exact = {i: reference(model, PROMPT[: 5 + i], tokens[i]) for i in tokens}
    ours = _mean_gap(raw, exact)
    assert max(abs(a - b) for i in tokens for a, b in zip(raw[i], exact[i], strict=True)) < BF16
    assert ours < 1.5 * _mean_gap(theirs, exact)


def _mean_gap(a: dict[int, list[float]], b: dict[int, list[float]]) -> float:
    gaps = [abs(x - y) for i in a for x, y in zip(a[i], b[i], strict=True)]
    return sum(gaps) / len(gaps)


@pytest.mark.smollm2
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_smollm2(dtype: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = find("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))
    checked = Checked(model, tmp_path, block_tokens=64, kv_budget_tokens=8192)
    texts = ["The capital of France is", "Once upon a time", "def fibonacci(n):\n    "]
    prompts = [tuple(tokenizer(text).input_ids) for text in texts]
    tokens: dict[int, list[int]] = {i: [] for i in range(6)}
    for i in tokens:
        checked.engine.submit(Request(i, 0, prompts[i // 2], sampling(max_tokens=24), seed=3))
    raw = checked.run(checked.engine, tokens)
    model.float()
    bound = FP32 if dtype == "float32" else BF16
    for i in tokens:
        assert checked.worst(prompts[i // 2], tokens[i], raw[i]) < bound
