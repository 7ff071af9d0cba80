"""Rows of several versions through all layers of a decoder, in one call of the kernels."""

from array import array
from collections.abc import Sequence
from ctypes import POINTER, byref, cast, pointer
from dataclasses import dataclass

import torch
from torch import Tensor

from dora_rl.models.config import ModelConfig
from dora_rl.models.native.library import library
from dora_rl.models.native.products import padded
from dora_rl.models.native.structures import (
    AdapterSpan,
    AdapterTile,
    Batch,
    Delta,
    Shape,
    Span,
    array_of,
)
from dora_rl.models.native.weights import NativeAdapter, NativeDecoder
from dora_rl.models.rope import RopeTable


class RowWeights:
    """Whose weights the rows of a batch have, as C has it: most steps have the rows of the last.

    `decoders` from the first row to the last, each with its rows start to stop, and adapters over
    them. It holds their memory.
    """

    def __init__(
        self,
        decoders: Sequence[tuple[NativeDecoder, int, int]],
        adapters: Sequence[tuple[NativeAdapter, int, int]] = (),
    ) -> None:
        self._held = (decoders, adapters)
        height: int = library().dora_tile_rows()
        self.spans = array_of(
            Span, [Span(start, stop, pointer(one.struct)) for one, start, stop in decoders]
        )
        self.adapters = array_of(
            AdapterSpan,
            [
                AdapterSpan(start, stop, cast(one.deltas, POINTER(Delta)))
                for one, start, stop in adapters
            ],
        )
        self.tiles = array_of(
            AdapterTile,
            [
                AdapterTile(row, min(row + height, stop), index)
                for index, (_, start, stop) in enumerate(adapters)
                for row in range(start, stop, height)
            ],
        )
        self.dots = any(one.dots for one, _, _ in decoders)
        self.rank = max((one.rank for one, _, _ in adapters), default=0)


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a pass: what each feeds, where its key and value go, and what it reads.

    A row reads `shared` tokens in the first of its blocks, then `own` ones in the rest, its own
    token last. A row that another row of the pass feeds stands in those blocks already.
    """

    tokens: list[int]
    positions: list[int]
    places: list[int]  # block * block_tokens + offset
    shared: list[int]
    own: list[int]
    first: list[int]  # where its blocks begin in `blocks`
    blocks: list[int]


class NativePasses:
    """Passes over one pool of KV. Their buffers are kept: one pass at a time."""

    def __init__(self, config: ModelConfig, keys_LNKDT: Tensor, values_LNKTD: Tensor) -> None:
        _, blocks, _, _, block_tokens = keys_LNKDT.shape
        self._kept = (keys_LNKDT, values_LNKTD)
        self._vocabulary = config.vocab_size
        self._block_tokens = block_tokens
        self._shape = Shape(
            *(config.num_layers, config.hidden_size, config.intermediate_size),
            *(config.num_heads, config.num_kv_heads, config.head_dim),
            config.norm_eps,
            *(keys_LNKDT.data_ptr(), values_LNKTD.data_ptr()),
            *(blocks, block_tokens, int(keys_LNKDT.dtype == torch.bfloat16)),
        )
        self._rope = RopeTable(config)
        self._workspace = torch.empty(0)
        self._logits = torch.empty(0)

    def run(self, weights: RowWeights, rows: Rows, *, logits: bool) -> Tensor | None:
        """Keys and values of the rows go into the pool. The next pass overwrites the logits."""
        kernels, threads = library(), torch.get_num_threads()
        cosines, sines = self._rope.tables(max(rows.positions))
        kept = [array("q", numbers) for numbers in _in_order(rows)]  # until the call returns
        tokens, positions, places, first, shared, own, blocks = (
            numbers.buffer_info()[0] for numbers in kept
        )
        num_rows = len(rows.tokens)
        longest = max(map(int.__add__, rows.shared, rows.own)) + 2 * self._block_tokens
        stride = padded(self._vocabulary)
        out = _grown(self._logits, num_rows * stride) if logits else None
        batch = Batch(
            *(num_rows, len(weights.spans), len(weights.adapters), len(weights.tiles)),
            *(weights.dots, weights.rank),
            cast(weights.spans, POINTER(Span)),
            cast(weights.adapters, POINTER(AdapterSpan)),
            cast(weights.tiles, POINTER(AdapterTile)),
            *(tokens, positions, cosines.data_ptr(), sines.data_ptr(), places),
            *(first, shared, own, blocks),
            *(None if out is None else out.data_ptr(), stride),
            padded(longest),
            None,
        )
        needed = kernels.dora_workspace(byref(self._shape), byref(batch), threads)
        self._workspace = _grown(self._workspace, needed)
        batch.workspace = self._workspace.data_ptr()
        if kernels.dora_pass(byref(self._shape), byref(batch), threads):
            raise MemoryError("no memory for a pass of the decoder")
        if out is None:
            return None
        self._logits = out
        return out[: num_rows * stride].view(num_rows, stride)[:, : self._vocabulary]


def _in_order(rows: Rows) -> tuple[Sequence[int], ...]:
    """As `Batch` has them."""
    return (
        *(rows.tokens, rows.positions, rows.places),
        *(rows.first, rows.shared, rows.own, rows.blocks),
    )


def _grown(buffer: Tensor, size: int) -> Tensor:
    """The buffer, or a larger one: allocating megabytes anew at each pass would take longer."""
    return buffer if buffer.numel() >= size else torch.empty(size + size // 4)
