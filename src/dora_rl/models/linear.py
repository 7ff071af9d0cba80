"""Matrix products of a decoder on a CPU: which form of the weights serves which batch best.

Activations are fp32 everywhere; a form decides for itself in which precision it multiplies.

    mapped   the file's own memory: no second copy, and the slowest; where bf16 products are slow,
             slices of the weights are converted on their way
    packed   an fp32 copy for many rows and, for bf16 weights, an oneDNN-ordered bf16 copy for
             few: reading half the bytes wins while the product is bound by memory
    native   a copy in panels, for passes that are one call of our own kernels: see `models.native`
    tiled    an fp32 copy, always multiplied in tiles of the same number of rows, filled up with
             zeros to whole cache lines, so that a row's result depends neither on how many
             others there are nor on its place among them

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

from dora_rl.machine.fast_paths import Unavailable, fast_path

TILE_ROWS = 16  # a tile of fewer wastes the cores, of more a lone row's time
LINE = 16  # fp32 numbers of a cache line: where rows begin within one, products round by it
_NARROW_CANDIDATES = (64, 32, 16, 8, 1)
_ANY_ROWS = 1 << 31
_SLICE_NUMBERS = 1 << 18  # of a mapped weight converted at once: 1 MB in fp32, which a cache holds
_TRIAL_SHAPE = (576, 3072)  # inputs and outputs of the trials: the widest product of SmolLM2-135M


class Layout(StrEnum):
    MAPPED = "mapped"
    PACKED = "packed"
    NATIVE = "native"
    TILED = "tiled"


class Linear(Protocol):
    """`x_RI` times the transposed weights, plus the bias; fp32 in and out."""

    def __call__(self, x_RI: Tensor) -> Tensor: ...


class Mapped:
    """The weights as they lie in the file, several side by side (q, k and v, say).

    Those in bf16 are multiplied as they are with at most `narrow_rows`, else converted.
    """

    def __init__(
        self, weights_OI: Sequence[Tensor], biases_O: Sequence[Tensor] | None, narrow_rows: int
    ) -> None:
        self._weights = list(weights_OI)
        self._biases = list(biases_O) if biases_O else [None] * len(self._weights)
        bf16 = self._weights[0].dtype == torch.bfloat16
        self._rows_as_they_are = narrow_rows if bf16 else _ANY_ROWS

    def __call__(self, x_RI: Tensor) -> Tensor:
        pairs = zip(self._weights, self._biases, strict=True)
        if x_RI.shape[0] <= self._rows_as_they_are:
            x_RI = x_RI.to(self._weights[0].dtype)
            parts = [F.linear(x_RI, weight, bias) for weight, bias in pairs]
        else:
            parts = [_converted_product(x_RI, weight, bias) for weight, bias in pairs]
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
        weight_OI = _joined(weights_OI).float()
        self._outputs = weight_OI.shape[0]
        self._weight_IO = filled_up(weight_OI, LINE, LINE).t().contiguous()
        self._bias_O = _joined(biases_O).float() if biases_O else None

    def __call__(self, x_RI: Tensor) -> Tensor:
        rows = x_RI.shape[0]
        padded_RI = filled_up(x_RI, TILE_ROWS, LINE)
        out_RO = x_RI.new_empty(padded_RI.shape[0], self._weight_IO.shape[1])
        for start in range(0, padded_RI.shape[0], TILE_ROWS):
            tile = slice(start, start + TILE_ROWS)
            torch.mm(padded_RI[tile], self._weight_IO, out=out_RO[tile])
        out_RO = out_RO[:rows, : self._outputs].contiguous()
        return out_RO if self._bias_O is None else out_RO.add_(self._bias_O)


def filled_up(x: Tensor, *multiples: int) -> Tensor:
    """Zeros at the ends of the last dimensions, up to a multiple of each number."""
    sizes = zip(x.shape[::-1], reversed(multiples), strict=False)
    pads = [pad for size, multiple in sizes for pad in (0, -size % multiple)]
    return F.pad(x, pads) if any(pads) else x


def make_linear(
    layout: Layout,
    weights_OI: Sequence[Tensor],
    biases_O: Sequence[Tensor] | None = None,
    *,
    narrow_rows: int = 0,
) -> Linear:
    """The weights (joined along their outputs) in the form that `layout` names.

    With at most `narrow_rows`, those in bf16 may be multiplied in bf16.
    """
    match layout:
        case Layout.MAPPED:
            return Mapped(weights_OI, biases_O, narrow_rows)
        case Layout.PACKED:
            bf16 = weights_OI[0].dtype == torch.bfloat16
            return Packed(weights_OI, biases_O, narrow_rows if bf16 else 0)
        case Layout.TILED:
            return Tiled(weights_OI, biases_O)
        case Layout.NATIVE:
            raise AssertionError("native weights are a whole decoder's")


@fast_path("onednn-order")
def onednn_order(inputs: int = _TRIAL_SHAPE[0], outputs: int = _TRIAL_SHAPE[1]) -> tuple[str, int]:
    """Up to how many rows bf16 beats fp32 here, for weights of this shape. Takes ~50 ms.

    Depends on the machine by an order of magnitude: with AMX bf16 always wins, without any
    bf16 instruction it never does.
    """
    weights = _trial_weights(inputs, outputs)
    narrow = [_onednn_order(weight) for weight in weights]
    wide = [weight.float().t().contiguous() for weight in weights]
    for rows in _NARROW_CANDIDATES:
        x_RI = torch.ones(rows, inputs)
        in_bf16 = best_time([partial(_narrow_product, x_RI, weight) for weight in narrow])
        in_fp32 = best_time([partial(torch.mm, x_RI, weight) for weight in wide])
        if in_bf16 < in_fp32:
            gain = in_fp32 / in_bf16
            return f"up to {rows} rows, {gain:.1f} x as fast as fp32 there", rows
    raise Unavailable(f"slower than fp32: {in_fp32 / in_bf16:.1f} x as fast with one row")


@fast_path("bf16-products")
def bf16_products() -> tuple[str, int]:
    """Up to how many rows bf16 weights are multiplied faster as they are than converted."""
    weights = _trial_weights(*_TRIAL_SHAPE)[:2]  # where bf16 is slow, it is by far
    gains: list[float] = []
    for rows in reversed(_NARROW_CANDIDATES):
        x_RI = torch.ones(rows, _TRIAL_SHAPE[0])
        in_bf16 = best_time([partial(F.linear, x_RI.bfloat16(), weight) for weight in weights])
        in_fp32 = best_time([partial(_converted_product, x_RI, w, None) for w in weights])
        gains.append(in_fp32 / in_bf16)
        if in_bf16 > in_fp32:
            break
    else:
        return f"{gains[-1]:.1f} x as fast as converted to fp32", _ANY_ROWS
    found = f"{gains[-1]:.2f} x as fast as converted to fp32, rows: {rows}"
    if len(gains) == 1:
        raise Unavailable(found)
    best = _NARROW_CANDIDATES[1 - len(gains)]
    return f"rows: up to {best}; {found}", best


def _trial_weights(inputs: int, outputs: int) -> list[Tensor]:
    """Several, so that they come from memory and not from the cache, as in a decoder."""
    copies = max(1, min(8, (64 << 20) // (inputs * outputs * 4)))
    return [torch.ones(outputs, inputs, dtype=torch.bfloat16) for _ in range(copies)]


def best_time(
    calls: Sequence[Callable[[], object]],
    repeats: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Seconds that all of the calls take on one thread, the best of a few times.

    One, since threads that wait for each other on a busy machine measure its other work.
    """
    best, threads = float("inf"), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(repeats):
            start = clock()
            for call in calls:
                call()
            best = min(best, clock() - start)
    finally:
        torch.set_num_threads(threads)
    return best


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def _onednn_order(weight_OI: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous(), TILE_ROWS)
    return packed


def _converted_product(x_RI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """The product in fp32, the weights converted by slices that stay in the cache."""
    height = max(1, _SLICE_NUMBERS // weight_OI.shape[1])
    starts = range(0, weight_OI.shape[0], height)
    slices = [torch.mm(x_RI, weight_OI[at : at + height].float().t()) for at in starts]
    out_RO = torch.cat(slices, -1)
    return out_RO if bias_O is None else out_RO.add_(bias_O)


def _narrow_product(x_RI: Tensor, packed: Tensor) -> Tensor:
    x_RI = x_RI.bfloat16()
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x_RI, packed, None, "none", [], "")
    return out.float()
