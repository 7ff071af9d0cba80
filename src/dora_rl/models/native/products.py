"""One product by the kernels: weights in panels, and the trials whether that is worth it here."""

from ctypes import byref, pointer

import torch
import torch.nn.functional as F
from torch import Tensor

from dora_rl.machine.fast_paths import Unavailable, fast_path
from dora_rl.models.linear import best_time, filled_up
from dora_rl.models.native.library import library
from dora_rl.models.native.structures import LoneProduct, Matrix, Stored

_TRIAL_SHAPE = (576, 1536)  # inputs and outputs of SmolLM2-135M's widest products
_TRIAL_ROWS = 8
_DOTS_TRIAL_ROWS = 32  # so many that arithmetic is the limit, where they are to win


def pack(weight_OI: Tensor) -> Tensor:
    """Weights [outputs, inputs], in fp32 or bf16, as the kernels want them."""
    outputs, inputs = weight_OI.shape
    weight_OI = weight_OI.contiguous()
    bf16 = weight_OI.dtype == torch.bfloat16
    filled = inputs + inputs % 2 if bf16 else inputs  # bf16 lies in pairs
    panels = weight_OI.new_empty(padded(outputs) * filled)
    library().dora_pack(weight_OI.data_ptr(), int(bf16), outputs, inputs, panels.data_ptr())
    return panels


def padded(size: int) -> int:
    """Up to a whole number of panels."""
    panel: int = library().dora_panel()
    return -(-size // panel) * panel


def stored_as(dtype: torch.dtype, *, dots: bool) -> Stored:
    """How weights of this dtype are multiplied: with `dots`, those of bf16 by products of bf16."""
    if dtype != torch.bfloat16:
        return Stored.FLOATS
    return Stored.DOTS if dots else Stored.PAIRS


class PackedProduct:
    """Weights in panels, to be multiplied by themselves."""

    def __init__(
        self, weight_OI: Tensor, bias_O: Tensor | None = None, *, dots: bool = False
    ) -> None:
        outputs, inputs = weight_OI.shape
        self._kept = panels, _ = pack(weight_OI), bias_O
        bias = None if bias_O is None else bias_O.data_ptr()
        stored = stored_as(weight_OI.dtype, dots=dots)
        self._matrix = Matrix(panels.data_ptr(), bias, inputs, outputs, stored)
        self._padded_outputs = padded(outputs)

    def __call__(self, x_RI: Tensor, threads: int = 1) -> Tensor:
        """In fp32, with the columns that fill up the last panel."""
        x_RI = filled_up(x_RI, 2).contiguous()
        rows, stride = x_RI.shape
        narrow_RI = x_RI.new_empty(rows, stride, dtype=torch.bfloat16)
        out_RO = x_RI.new_empty(rows, self._padded_outputs)
        lone = LoneProduct(
            pointer(self._matrix),
            *(x_RI.data_ptr(), narrow_RI.data_ptr(), stride, rows),
            *(out_RO.data_ptr(), self._padded_outputs),
        )
        if library().dora_product(byref(lone), threads):
            raise MemoryError("no memory for a product")
        return out_RO


@fast_path("native-kernels")
def native_kernels() -> tuple[str, int]:
    """Whether the kernels can be compiled here, are right, and are faster than torch's products."""
    weight_OI, x_RI = _trial(_TRIAL_ROWS)
    native, wide_IO = PackedProduct(weight_OI), weight_OI.t().contiguous()
    if not torch.allclose(native(x_RI), torch.mm(x_RI, wide_IO), rtol=1e-4, atol=1e-3):
        raise Unavailable("a product was wrong")
    here, by_torch = best_time([lambda: native(x_RI)]), best_time([lambda: torch.mm(x_RI, wide_IO)])
    return _faster(here, by_torch, f"as torch with {_TRIAL_ROWS} rows")


@fast_path("bf16-dots")
def bf16_dots() -> tuple[str, int]:
    """Whether the kernels multiply bf16 faster by the processor's instructions for it."""
    if not library().dora_dots_in_hardware():
        raise Unavailable("the processor has no avx512_bf16")
    weight_OI, x_RI = (tensor.bfloat16() for tensor in _trial(_DOTS_TRIAL_ROWS))
    x_RI = x_RI.float()
    dots, widened = (PackedProduct(weight_OI, dots=dots) for dots in (True, False))
    if not torch.allclose(dots(x_RI), F.linear(x_RI, weight_OI.float()), rtol=1e-4, atol=1e-3):
        raise Unavailable("a product was wrong")
    here, otherwise = best_time([lambda: dots(x_RI)]), best_time([lambda: widened(x_RI)])
    return _faster(here, otherwise, f"as products in fp32 with {_DOTS_TRIAL_ROWS} rows")


def _trial(rows: int) -> tuple[Tensor, Tensor]:
    """Weights and inputs of the trials."""
    inputs, outputs = _TRIAL_SHAPE
    noise = torch.Generator().manual_seed(0)
    return (
        torch.randn(outputs, inputs, generator=noise),
        torch.randn(rows, inputs, generator=noise),
    )


def _faster(here: float, otherwise: float, than: str) -> tuple[str, int]:
    found = f"{otherwise / here:.1f} x as fast {than}"
    if here > otherwise:
        raise Unavailable(found)
    return found, 0
