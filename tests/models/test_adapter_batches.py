"""Rows of several adapters compute what each adapter computes by itself, together or in turn."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dora_rl.models.adapter_batches import (
    AdaptedTogether,
    AdapterSpan,
    adapted,
    stack_adapters,
)
from dora_rl.models.adapters import PRODUCTS, AdapterWeights, build_adapter
from dora_rl.models.config import ModelConfig, read_config
from dora_rl.models.decoder import Decoder, RowSpan, build, forward, logits
from dora_rl.models.linear import Layout
from dora_rl.weights.adapter import Adapter, tensor_names
from tests.models.random_models import make_model, random_model
from tests.models.test_stacking import values_alone

MODULES = [module.rpartition(".")[2] for modules in PRODUCTS.values() for module in modules]


class Base(NamedTuple):
    config: ModelConfig
    decoder: Decoder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    directory: Path = make_model(tmp_path_factory.mktemp("base"), "qwen3", seed=1)
    config = read_config(directory)
    tensors = dict(random_model("qwen3", seed=1).state_dict())
    return Base(config, build(config, tensors, Layout.PACKED))


def adapter(
    config: ModelConfig,
    seed: int,
    targets: tuple[str, ...],
    rank: int = 2,
    layout: Layout = Layout.PACKED,
) -> AdapterWeights:
    noise = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (outputs, inputs) in config.linears().items():
        if name.rpartition(".")[2] in targets:
            down, up = tensor_names(name)
            tensors[down] = torch.randn(rank, inputs, generator=noise)
            tensors[up] = torch.randn(outputs, rank, generator=noise)
    return build_adapter(config, Adapter("base", rank, 2.0, targets), tensors, layout)


def spans_of(adapters: list[AdapterWeights], rows: list[int]) -> list[AdapterSpan]:
    """So many rows of each; of none, no span."""
    found, stop = [], 0
    for weights, count in zip(adapters, rows, strict=True):
        if count:
            found.append(AdapterSpan(weights, stop, stop + count))
            stop += count
    return found


def computed(decoder: Decoder, rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(decoder.config.vocab_size, (rows,), generator=generator)
    cos, sin = (torch.randn(rows, decoder.config.head_dim, generator=generator) for _ in range(2))
    spans = [RowSpan(decoder, 0, rows)]
    with torch.inference_mode():
        return logits(spans, forward(spans, tokens, cos, sin, values_alone))


def together(decoder: Decoder) -> bool:
    return isinstance(decoder.layers[0].out, AdaptedTogether)


@given(
    rows=st.lists(st.integers(0, 5), min_size=2, max_size=4).filter(any),
    targets=st.sets(st.sampled_from(MODULES), min_size=1).map(sorted).map(tuple),
)
def test_together_is_as_in_turn(base: Base, rows: list[int], targets: tuple[str, ...]) -> None:
    adapters = [adapter(base.config, seed, targets) for seed in range(len(rows))]
    spans = spans_of(adapters, rows)
    expected = computed(adapted(base.decoder, spans), sum(rows))
    stack = stack_adapters(adapters)
    assert stack is not None
    found = computed(adapted(base.decoder, spans, stack), sum(rows))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    # The stack has the only copy of the weights: each by itself is still what it was.
    again = computed(adapted(base.decoder, spans), sum(rows))
    assert torch.equal(again, expected)


@pytest.mark.parametrize(
    ("rows", "one_product"),
    [([3, 3, 3], True), ([3, 2, 3], True), ([6, 1, 1], False), ([4, 0, 0], False),
     ([64, 64, 64], True), ([65, 65, 65], False)],
)  # fmt: skip
def test_where_it_pays(base: Base, rows: list[int], one_product: bool) -> None:
    adapters = [adapter(base.config, seed, ("o_proj",)) for seed in range(3)]
    stack = stack_adapters(adapters)
    decoder = adapted(base.decoder, spans_of(adapters, rows), stack)
    assert together(decoder) is one_product


@pytest.mark.parametrize(
    "other",
    [{"rank": 3}, {"targets": ("q_proj",)}, {"layout": Layout.TILED}],
    ids=["another rank", "another target", "exact"],
)
def test_what_cannot_be_multiplied_together(base: Base, other: dict[str, object]) -> None:
    given = {"targets": ("o_proj",), **other}
    one = adapter(base.config, 1, ("o_proj",))
    assert stack_adapters([one, adapter(base.config, 2, **given)]) is None  # type: ignore[arg-type]
