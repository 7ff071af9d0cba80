"""The deterministic mode is exact for every shape of a model, or refuses it by name."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from dora_rl.engines.base import Sampled
from dora_rl.engines.embedded import EmbeddedEngine, EngineSettings, exactness
from dora_rl.engines.embedded.attention import ExactAttention
from dora_rl.engines.errors import VersionRefused
from dora_rl.models.decoder import _gated, _gated_exactly
from dora_rl.models.linear import Layout, Tiled, make_linear
from tests.engines.driving import OLD, ask
from tests.engines.embedded.harness import EmbeddedHarness
from tests.engines.random_versions import Models
from tests.models.kernels import dots_everywhere, needs_kernels, on_threads


class Shape(NamedTuple):
    family: str
    kv_heads: int
    queries: int  # to each
    width: int
    hidden: int  # to each head
    intermediate: int
    block_tokens: int

    def models(self, root: Path, **overrides: Any) -> Models:
        heads = self.kv_heads * self.queries
        return Models(
            root,
            self.family,
            num_attention_heads=heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.width,
            hidden_size=heads * self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=1,
            **overrides,
        )


shapes = st.builds(
    Shape,
    family=st.sampled_from(["llama", "qwen2", "qwen3"]),
    kv_heads=st.integers(1, 3),
    queries=st.integers(1, 7),
    width=st.integers(1, 12).map(lambda half: 2 * half),
    hidden=st.integers(2, 12),
    intermediate=st.integers(3, 60),
    block_tokens=st.sampled_from([1, 3, 4, 16, 32]),
)
Bits = dict[int, list[tuple[int, float]]]


def generate(models: Models, shape: Shape, **settings: Any) -> Bits:
    """Tokens and log-probabilities of a few requests, by trajectory."""
    engine = EmbeddedEngine(
        models.config,
        EngineSettings(
            block_tokens=shape.block_tokens,
            kv_budget_tokens=1024,
            **{"deterministic": True, **settings},
        ),
        models.tokenizer,
    )
    engine.install(OLD, models.path(0))
    harness = EmbeddedHarness(models)
    for trajectory in range(5):
        engine.submit(ask(harness, trajectory, length=4 + 3 * trajectory))
    found: Bits = {}
    while engine.load().running or engine.load().waiting:
        for output in engine.step():
            assert isinstance(output, Sampled)
            found.setdefault(output.trajectory, []).extend(
                zip(output.tokens, output.logprobs, strict=True)
            )
    return found


@hypothesis_settings(max_examples=15)
@given(shapes)
@example(Shape("qwen2", 1, 3, 6, 6, 48, 16))
@example(Shape("qwen2", 1, 3, 10, 6, 48, 16))
@example(Shape("llama", 2, 1, 20, 3, 47, 4))
@example(Shape("llama", 1, 1, 2, 5, 20, 4))
@example(Shape("qwen2", 1, 3, 4, 3, 50, 32))
@example(Shape("qwen3", 1, 2, 2, 5, 33, 1))
def test_alone_together_and_in_chunks_are_the_same_bits(shape: Shape) -> None:
    with tempfile.TemporaryDirectory() as root:
        models = shape.models(Path(root))
        alone = generate(models, shape, slots=1)
        assert generate(models, shape, slots=5) == alone
        assert generate(models, shape, slots=5, prefill_chunk=3) == alone
        assert generate(models, shape, slots=1, prefill_chunk=1) == alone


@needs_kernels
@hypothesis_settings(max_examples=15)
@given(shapes, st.sampled_from(["float32", "bfloat16"]))
@example(Shape("llama", 3, 3, 32, 12, 60, 32), "float32")
@example(Shape("qwen3", 1, 7, 64, 5, 33, 16), "bfloat16")
def test_so_are_those_of_the_native_kernels(shape: Shape, kv_dtype: str) -> None:
    with tempfile.TemporaryDirectory() as root:
        models = shape.models(Path(root))
        fixed: dict[str, Any] = {"native_kernels": True, "kv_dtype": kv_dtype}
        alone = generate(models, shape, slots=1, **fixed)
        assert generate(models, shape, slots=5, **fixed) == alone
        assert generate(models, shape, slots=5, prefill_chunk=3, **fixed) == alone
        with on_threads(3):
            assert generate(models, shape, slots=1, prefill_chunk=1, **fixed) == alone
        for block_tokens in {1, 5, 16, 32} - {shape.block_tokens}:
            other = shape._replace(block_tokens=block_tokens)
            assert generate(models, other, slots=5, **fixed) == alone


@needs_kernels
@hypothesis_settings(max_examples=15)
@given(shapes)
@example(Shape("qwen3", 3, 3, 32, 12, 61, 32))
def test_and_those_of_their_products_in_bf16(shape: Shape) -> None:
    with tempfile.TemporaryDirectory() as root, dots_everywhere():
        models = shape.models(Path(root), dtype="bfloat16")
        fixed: dict[str, Any] = {"native_kernels": True, "deterministic": False}
        alone = generate(models, shape, slots=1, **fixed)
        assert generate(models, shape, slots=5, **fixed) == alone
        with on_threads(3):
            assert generate(models, shape, slots=1, prefill_chunk=1, **fixed) == alone
        assert generate(models, shape, slots=1, bf16_products=False, **fixed) != alone


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@given(st.integers(1, 70), st.integers(1, 70), st.integers(1, 40))
def test_a_row_of_a_product_is_the_same_in_every_place(
    inputs: int, outputs: int, rows: int
) -> None:
    linear = make_linear(Layout.TILED, [noise(outputs, inputs)])
    x = noise(1, inputs, seed=1)
    out = linear(x.repeat(rows, 1))
    assert out.shape == (rows, outputs)
    assert torch.equal(out, linear(x).expand_as(out))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_activations_are_the_same_in_every_place(count: int) -> None:
    """Threads share out the numbers, and not by rows."""
    with on_threads(count):
        for width in (777, 1000, 1001):
            gate_up = 3 * noise(301, 2 * width)
            rows = [_gated_exactly(*row.chunk(2, -1)) for row in gate_up.split(1)]
            together = _gated_exactly(*gate_up.chunk(2, -1))
            assert torch.equal(together, torch.cat(rows))
            torch.testing.assert_close(together, _gated(*gate_up.chunk(2, -1)))


# Where a library rounds rows by their places


def test_a_product_that_is_not_exact_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    product = Tiled.__call__

    def rounded(self: Tiled, x_RI: Tensor) -> Tensor:
        out = product(self, x_RI)
        out[1::2] *= 1 + 1e-6
        return out

    monkeypatch.setattr(Tiled, "__call__", rounded)
    assert_refused(tmp_path, "the product `qkv` of 6 inputs")


def test_attention_that_is_not_exact_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Rounded(ExactAttention):
        def __call__(self, q_RHD: Tensor, *pool: Any) -> Tensor:
            return super().__call__(q_RHD, *pool) * (1 + 1e-6 * (len(q_RHD) > 1))

    monkeypatch.setattr(exactness, "ExactAttention", Rounded)
    assert_refused(tmp_path, "attention of 3 heads on 1 with the width 4")


def assert_refused(root: Path, what: str) -> None:
    models = Shape("llama", 1, 3, 4, 2, 8, 4).models(root)
    settings: Sequence[EngineSettings] = (
        EngineSettings(deterministic=True, kv_budget_tokens=64, block_tokens=4),
        EngineSettings(kv_budget_tokens=64, block_tokens=4),
    )
    exact, normal = (EmbeddedEngine(models.config, one, models.tokenizer) for one in settings)
    with pytest.raises(VersionRefused, match=f"cannot be kept on this machine: {what} rounds"):
        exact.install(OLD, models.path(0))
    assert not exact.load().versions
    normal.install(OLD, models.path(0))
