"""A LoRA adapter: what it adds to which product of a decoder.

The adapters of matrices that are multiplied side by side (q, k and v, say) are joined like them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from dora_rl.models.config import ModelConfig
from dora_rl.models.linear import Layout, Tiled
from dora_rl.weights.adapter import Adapter, tensor_names

# Numbers of a B that is one matrix for modules side by side, zeros between them: fewer products, as
# long as they stay in a cache. Where memory is what a product waits for, the zeros are not read.
_JOINED_NUMBERS = 1 << 15

# The products of a layer, and the modules whose outputs each has side by side.
PRODUCTS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


class Delta(Protocol):
    """What an adapter adds to one product."""

    def add_to(self, out_RO: Tensor, x_RI: Tensor) -> None: ...


class Plain:
    """By the fastest products, in float32."""

    def __init__(self, downs_AI: Sequence[Tensor], ups_OA: Sequence[Tensor]) -> None:
        self.down_IA = torch.cat(list(downs_AI)).t().contiguous()
        joined_OA = _block_diagonal(ups_OA)
        if joined_OA.numel() <= _JOINED_NUMBERS:
            downs_AI, ups_OA = [self.down_IA.t()], [joined_OA]
        outputs, ranks = [len(up) for up in ups_OA], [len(down) for down in downs_AI]
        self.ups = [
            (columns, rank, up.t().contiguous())
            for columns, rank, up in zip(_places(outputs), _places(ranks), ups_OA, strict=True)
            if up.numel()
        ]

    def add_to(self, out_RO: Tensor, x_RI: Tensor) -> None:
        h_RA = torch.mm(x_RI, self.down_IA)
        for columns, rank, up_AO in self.ups:
            out_RO[:, columns].addmm_(h_RA[:, rank], up_AO)


class _Exact:
    """Bit by bit the same for a row, whatever rows there are beside it."""

    def __init__(self, downs_AI: Sequence[Tensor], ups_OA: Sequence[Tensor]) -> None:
        self._down, self._up = Tiled(downs_AI, None), Tiled([_block_diagonal(ups_OA)], None)

    def add_to(self, out_RO: Tensor, x_RI: Tensor) -> None:
        out_RO += self._up(self._down(x_RI))


@dataclass(frozen=True, slots=True, eq=False)
class AdapterWeights:
    """One version: for each layer, what it adds to which product."""

    layers: tuple[Mapping[str, Delta], ...]


def _block_diagonal(ups_OA: Sequence[Tensor]) -> Tensor:
    joined: Tensor = torch.block_diag(*ups_OA)  # type: ignore[no-untyped-call]
    return joined


def _places(sizes: Sequence[int]) -> list[slice]:
    """Where each of so many begins and ends, side by side."""
    ends = list(accumulate(sizes))
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def build_adapter(
    config: ModelConfig, adapter: Adapter, tensors: Mapping[str, Tensor], layout: Layout
) -> AdapterWeights:
    """An adapter of checked tensors."""
    kind = _Exact if layout is Layout.TILED else Plain
    linears = config.linears()

    def delta(layer: int, modules: Sequence[str]) -> Delta | None:
        names = [f"model.layers.{layer}.{module}" for module in modules]
        if not any(name.rpartition(".")[2] in adapter.targets for name in names):
            return None
        downs, ups = [], []
        for name in names:
            outputs, inputs = linears[name]
            down, up = tensor_names(name)
            if down in tensors:
                downs.append(tensors[down].float())
                ups.append(tensors[up].float() * adapter.scale)
            else:  # a neighbour has one: nothing of rank 0
                downs.append(torch.zeros(0, inputs))
                ups.append(torch.zeros(outputs, 0))
        return kind(downs, ups)

    def deltas(layer: int) -> dict[str, Delta]:
        found = {product: delta(layer, modules) for product, modules in PRODUCTS.items()}
        return {product: one for product, one in found.items() if one is not None}

    return AdapterWeights(tuple(deltas(layer) for layer in range(config.num_layers)))
