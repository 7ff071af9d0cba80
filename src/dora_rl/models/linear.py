"""Matrix products of a decoder on a CPU: which form of the weights serves which batch best.

Activations are fp32 everywhere; a form decides for itself in which precision it multiplies.

    mapped   the file's own memory: no second copy, and the slowest
    packed   an fp32 copy for many rows and, for bf16 weights, an oneDNN-ordered bf16 copy for
             few: reading half the bytes wins while the product is bound by memory
    tiled    an fp32 copy, always multiplied in tiles of the same number of rows, so that a
             row's result does not depend on how many others there are

Decoding is bound by these products; docs/engine.md has the measurements behind the forms.
"""

import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

TILE_ROWS = 16  # a tile of fewer wastes the cores, of more a lone row's time
_NARROW_CANDIDATES = (64, 32, 16, 8, 1)


class Layout(StrEnum):
    MAPPED = "mapped"
    PACKED = "packed"
    TILED = "tiled"


class Linear(Protocol):
    """`x_RI` times the transposed weights, plus the bias; fp32 in and out."""

    def __call__(self, x_RI: Tensor) -> Tensor: ...


class Mapped:
    """The weights as they lie in the file, several side by side (q, k and v, say)."""

    def __init__(self, weights_OI: Sequence[Tensor], biases_O: Sequence[Tensor] | None) -> None:
        self._weights = list(weights_OI)
        self._biases = list(biases_O) if biases_O else [None] * len(self._weights)

    def __call__(self, x_RI: Tensor) -> Tensor:
        x_RI = x_RI.to(self._weights[0].dtype)
        parts = [F.linear(x_RI, w, b) for w, b in zip(self._weights, self._biases, strict=True)]
        return (parts[0] if len(parts) == 1 else torch.cat(parts, -1)).float()


class Packed:
    """fp32 for many rows, oneDNN's bf16 order for at most `narrow_rows`."""

    def __init__(
        self, weights_OI: Sequence[Tensor], biases_O: Sequence[Tensor] | None, narrow_rows: int
    ) -> None:
        weight_OI = _joined(weights_OI)
        self.wide_IO = weight_OI.float().t().contiguous()
        self.bias_O = _joined(biases_O).float() if biases_O else None
        self._narrow_rows = narrow_rows
        self._narrow = _onednn_order(weight_OI) if narrow_rows else None

    def __call__(self, x_RI: Tensor) -> Tensor:
        if self._narrow is not None and x_RI.shape[0] <= self._narrow_rows:
            out_RO = _narrow_product(x_RI, self._narrow)
            return out_RO if self.bias_O is None else out_RO.add_(self.bias_O)
        if self.bias_O is None:
            return torch.mm(x_RI, self.wide_IO)
        return torch.addmm(self.bias_O, x_RI, self.wide_IO)


class Tiled:
    """fp32 in tiles of `TILE_ROWS` rows, the last one filled up with zeros."""

    def __init__(self, weights_OI: Sequence[Tensor], biases_O: Sequence[Tensor] | None) -> None:
        self._weight_IO = _joined(weights_OI).float().t().contiguous()
        self._bias_O = _joined(biases_O).float() if biases_O else None

    def __call__(self, x_RI: Tensor) -> Tensor:
        rows = x_RI.shape[0]
        padded_RI = F.pad(x_RI, (0, 0, 0, -rows % TILE_ROWS))
        out_RO = x_RI.new_empty(padded_RI.shape[0], self._weight_IO.shape[1])
        for start in range(0, padded_RI.shape[0], TILE_ROWS):
            tile = slice(start, start + TILE_ROWS)
            torch.mm(padded_RI[tile], self._weight_IO, out=out_RO[tile])
        out_RO = out_RO[:rows]
        return out_RO if self._bias_O is None else out_RO.add_(self._bias_O)


def make_linear(
    layout: Layout,
    weights_OI: Sequence[Tensor],
    biases_O: Sequence[Tensor] | None = None,
    *,
    narrow_rows: int = 0,
) -> Linear:
    """The weights (joined along their outputs) in the form that `layout` names."""
    match layout:
        case Layout.MAPPED:
            return Mapped(weights_OI, biases_O)
        case Layout.PACKED:
            bf16 = weights_OI[0].dtype == torch.bfloat16
            return Packed(weights_OI, biases_O, narrow_rows if bf16 else 0)
        case Layout.TILED:
            return Tiled(weights_OI, biases_O)


def narrow_rows_of_this_machine(inputs: int, outputs: int) -> int:
    """Up to how many rows bf16 beats fp32 here, for weights of this shape. Takes ~50 ms.

    Depends on the machine by an order of magnitude: with AMX bf16 always wins, without any
    bf16 instruction it never does.
    """
    generator = torch.Generator().manual_seed(0)
    # Several, so that they come from memory and not from the cache, as in a decoder.
    copies = max(1, min(8, (64 << 20) // (inputs * outputs * 4)))
    weights = [torch.randn(outputs, inputs, generator=generator).bfloat16() for _ in range(copies)]
    wide = [w.float().t().contiguous() for w in weights]
    narrow = [_onednn_order(w) for w in weights]
    for rows in _NARROW_CANDIDATES:
        x = torch.randn(rows, inputs, generator=generator)
        in_bf16 = _best_time([partial(_narrow_product, x, w) for w in narrow])
        in_fp32 = _best_time([partial(torch.mm, x, w) for w in wide])
        if in_bf16 < in_fp32:
            return rows
    return 0


def _best_time(calls: Sequence[Callable[[], Tensor]], repeats: int = 3) -> float:
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        for call in calls:
            call()
        best = min(best, time.perf_counter() - start)
    return best


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def _onednn_order(weight_OI: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous(), TILE_ROWS)
    return packed


def _narrow_product(x_RI: Tensor, packed: Tensor) -> Tensor:
    x_RI = x_RI.bfloat16()
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x_RI, packed, None, "none", [], "")
    return out.float()
