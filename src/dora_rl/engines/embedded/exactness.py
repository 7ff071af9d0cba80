"""Whether the deterministic mode holds here: a row has the same bits wherever it stands.

Tiles and blocks are laid out so that it does, as long as the library that multiplies them rounds
alike what is laid out alike. No library promises that, so it is tried, on the weights themselves.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from dora_rl.engines.embedded.attention import ExactAttention, Reading
from dora_rl.engines.errors import VersionRefused
from dora_rl.models.decoder import Decoder
from dora_rl.models.linear import TILE_ROWS, Linear

_ROWS = TILE_ROWS + 1  # every place in a tile, and another tile


def check_exact(decoder: Decoder, block_tokens: int) -> None:
    """Refuse a model whose rows depend on each other on this machine. Takes some products."""
    noise = torch.Generator().manual_seed(0)
    for name, linear, inputs in _products(decoder):
        row = torch.randn(1, inputs, generator=noise)
        if not _repeats(linear(row), linear(row.repeat(_ROWS, 1))):
            raise _refused(f"the product `{name}` of {inputs} inputs")
    alone, together = (_attended(decoder, block_tokens, rows) for rows in (1, _ROWS))
    if not _repeats(alone, together):
        heads = f"{decoder.config.num_heads} heads on {decoder.config.num_kv_heads}"
        raise _refused(f"attention of {heads} with the width {decoder.config.head_dim}")


def _products(decoder: Decoder) -> Iterator[tuple[str, Linear, int]]:
    """One of each shape, with its inputs."""
    config, layer = decoder.config, decoder.layers[0]
    yield "qkv", layer.qkv, config.hidden_size
    yield "out", layer.out, config.num_heads * config.head_dim
    yield "gate_up", layer.gate_up, config.hidden_size
    yield "down", layer.down, config.intermediate_size
    yield "head", decoder.head, config.hidden_size


def _attended(decoder: Decoder, block_tokens: int, rows: int) -> Tensor:
    """The same row so many times, each over its own copies of two blocks."""
    config, noise = decoder.config, torch.Generator().manual_seed(1)

    def copies(count: int, *shape: int) -> Tensor:
        return torch.randn(1, *shape, generator=noise).repeat(count, *[1] * len(shape))

    q = copies(rows, config.num_heads, config.head_dim)
    keys = copies(2 * rows, config.num_kv_heads, config.head_dim, block_tokens)
    values = copies(2 * rows, config.num_kv_heads, block_tokens, config.head_dim)
    reads = [
        [Reading(row, 2 * row, block_tokens), Reading(row, 2 * row + 1, 1)] for row in range(rows)
    ]
    return ExactAttention(reads, block_tokens)(q, keys, values, config.head_dim**-0.5)


def _repeats(one: Tensor, many: Tensor) -> bool:
    return torch.equal(one.expand_as(many), many)


def _refused(what: str) -> VersionRefused:
    return VersionRefused(
        f"the deterministic mode cannot be kept on this machine: {what} rounds a row by its place "
        "in a batch. Set rollout.deterministic to false."
    )
