"""Rotary embeddings: frequencies equal those of transformers to the last bit.

Cosines and sines are held to 1e-6, as a library's cosine may differ in its last bits.
"""

import math
import tempfile
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from dora_rl.models.config import ROPE_KINDS, ModelConfig, Rope, read_config
from dora_rl.models.rope import RopeTable, rope_frequencies
from tests.models.random_models import make_config, rope_parameters

EMBEDDINGS = {"llama": LlamaRotaryEmbedding, "qwen3": Qwen3RotaryEmbedding}


def written_and_read(config: Any) -> ModelConfig:
    with tempfile.TemporaryDirectory() as directory:
        config.save_pretrained(directory)
        return read_config(directory)


PLAIN = written_and_read(make_config("llama"))


@pytest.mark.parametrize("kind", ROPE_KINDS)
@settings(max_examples=60)
@given(
    st.sampled_from(sorted(EMBEDDINGS)),
    st.integers(2, 64).map(lambda half: 2 * half),
    st.sampled_from([64, 5000, 131_072]),
    st.data(),
)
def test_every_kind_equals_transformers(
    kind: str, family: str, head_dim: int, context: int, data: st.DataObject
) -> None:
    rope = data.draw(rope_parameters(kind))
    theirs = make_config(
        family, head_dim=head_dim, max_position_embeddings=context, rope_parameters=dict(rope)
    )
    ours = written_and_read(theirs)
    assert ours.rope.kind == kind
    embedding = EMBEDDINGS[family](theirs)
    frequencies, factor = rope_frequencies(ours)
    assert torch.equal(frequencies, embedding.inv_freq)
    assert factor == embedding.attention_scaling

    positions = torch.tensor(data.draw(st.lists(st.integers(0, min(context, 3000) - 1))))
    positions = positions.long()
    cos, sin = RopeTable(ours).cos_sin(positions)
    assert cos.shape == sin.shape == (len(positions), head_dim // 2)
    assert cos.dtype == sin.dtype == torch.float32
    if len(positions):
        their_cos, their_sin = embedding(torch.empty(0), positions[None])
        for mine, their in ((cos, their_cos[0]), (sin, their_sin[0])):
            torch.testing.assert_close(torch.cat((mine, mine), -1), their, rtol=0, atol=1e-6)


def test_plain_numbers_by_hand() -> None:
    config = replace(PLAIN, head_dim=4, rope=Rope("default", 100.0))
    cos, sin = RopeTable(config).cos_sin(torch.tensor([3, 0]))
    expected = [[math.cos(3), math.cos(0.3)], [1, 1]], [[math.sin(3), math.sin(0.3)], [0, 0]]
    torch.testing.assert_close((cos, sin), tuple(map(torch.tensor, expected)))


def test_the_attention_factor_is_in_the_table() -> None:
    doubled = replace(PLAIN, rope=Rope("yarn", 1e4, original_context=256, attention_factor=2.0))
    positions = torch.arange(8)
    for one, two in zip(
        RopeTable(PLAIN).cos_sin(positions), RopeTable(doubled).cos_sin(positions), strict=True
    ):
        assert torch.equal(2 * one, two)


@settings(max_examples=30)
@given(st.lists(st.lists(st.integers(0, 2999), min_size=1, max_size=4), min_size=1, max_size=6))
def test_growth_never_changes_a_position(asked: list[list[int]]) -> None:
    config = replace(PLAIN, context=3000)
    whole, grown = RopeTable(config), RopeTable(config)
    whole.cos_sin(torch.tensor([2999]))
    for positions in map(torch.tensor, asked):
        for mine, other in zip(grown.cos_sin(positions), whole.cos_sin(positions), strict=True):
            assert torch.equal(mine, other)


def test_a_long_context_costs_nothing_until_it_is_used() -> None:
    table = RopeTable(replace(PLAIN, context=1 << 40))
    cos, _ = table.cos_sin(torch.tensor([0, 5000]))
    assert cos.shape[0] == 2
    assert len(table._cos_PE) == 8192


@pytest.mark.parametrize("position", [100, 255, 256, -1])
def test_positions_end_with_the_context(position: int) -> None:
    table = RopeTable(replace(PLAIN, context=100))
    table.cos_sin(torch.tensor([99]))
    with pytest.raises((AssertionError, IndexError)):
        table.cos_sin(torch.tensor([position]))


def test_dynamic_is_default_within_its_context() -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}
    dynamic = written_and_read(make_config("llama", rope_parameters=rope))
    assert dynamic.context == 256
    assert torch.equal(rope_frequencies(dynamic)[0], rope_frequencies(PLAIN)[0])
