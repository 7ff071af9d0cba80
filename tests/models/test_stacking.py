"""Versions in one batched product compute what each computes by itself."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dora_rl.models.decoder import Decoder, RowSpan, build, forward, logits
from dora_rl.models.linear import Layout
from dora_rl.models.stacking import stack
from tests.models.random_models import make_model, random_model

ROWS = 3


def decoder(family: str, tmp_path: Any, seed: int) -> Decoder:
    from dora_rl.models.config import read_config

    config = read_config(make_model(tmp_path / str(seed), family, seed=seed))
    tensors = dict(random_model(family, seed=seed).state_dict())
    return build(config, tensors, Layout.PACKED)


def values_alone(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of rows that see themselves alone, but not only their own layer's input."""
    return (v.repeat_interleave(q.shape[1] // v.shape[1], 1) * q.sigmoid()).flatten(1)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_each_version_gets_its_own_rows(family: str, tmp_path: Any) -> None:
    decoders = [decoder(family, tmp_path, seed) for seed in (1, 2, 3)]
    rows = ROWS * len(decoders)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(decoders[0].config.vocab_size, (rows,), generator=generator)
    width = decoders[0].config.head_dim
    cos, sin = (torch.randn(rows, width, generator=generator) for _ in range(2))
    apart = [RowSpan(d, i * ROWS, (i + 1) * ROWS) for i, d in enumerate(decoders)]
    together = [RowSpan(stack(decoders), 0, rows)]
    with torch.inference_mode():
        expected = logits(apart, forward(apart, tokens, cos, sin, values_alone))
        found = logits(together, forward(together, tokens, cos, sin, values_alone))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(expected[:ROWS], expected[ROWS : 2 * ROWS], atol=0.1)
