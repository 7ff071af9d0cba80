"""One product by the kernels: weights in panels, and the trial whether that is worth it here."""

from ctypes import byref, pointer

import torch
from torch import Tensor

from dora_rl.machine.fast_paths import Unavailable, fast_path
from dora_rl.models.linear import best_time
from dora_rl.models.native.library import library
from dora_rl.models.native.structures import LoneProduct, Matrix

_TRIAL_SHAPE = (576, 1536)  # inputs and outputs of SmolLM2-135M's widest products
_TRIAL_ROWS = 8


def pack(weight_OI: Tensor) -> Tensor:
    """Weights [outputs, inputs], in fp32 or bf16, as the kernels want them."""
    outputs, inputs = weight_OI.shape
    weight_OI = weight_OI.contiguous()
    panels = weight_OI.new_empty(padded(outputs) * inputs)
    bf16 = int(weight_OI.dtype == torch.bfloat16)
    library().dora_pack(weight_OI.data_ptr(), bf16, outputs, inputs, panels.data_ptr())
    return panels


def padded(size: int) -> int:
    """Up to a whole number of panels."""
    panel: int = library().dora_panel()
    return -(-size // panel) * panel


@fast_path("native-kernels")
def native_kernels() -> tuple[str, int]:
    """Whether the kernels can be compiled here, are right, and are faster than torch's products."""
    kernels = library()
    inputs, outputs = _TRIAL_SHAPE
    noise = torch.Generator().manual_seed(0)
    weight_OI = torch.randn(outputs, inputs, generator=noise)
    x_RI = torch.randn(_TRIAL_ROWS, inputs, generator=noise)
    panels, wide_IO = pack(weight_OI), weight_OI.t().contiguous()
    out_RO = torch.empty(_TRIAL_ROWS, outputs)
    matrix = Matrix(panels.data_ptr(), None, inputs, outputs, 0)
    lone = LoneProduct(
        pointer(matrix),
        *(x_RI.data_ptr(), inputs, _TRIAL_ROWS),
        *(out_RO.data_ptr(), outputs),
    )

    def native() -> Tensor:
        kernels.dora_product(byref(lone), 1)
        return out_RO

    if not torch.allclose(native(), torch.mm(x_RI, wide_IO), rtol=1e-4, atol=1e-3):
        raise Unavailable("a product was wrong")
    here, by_torch = best_time([native]), best_time([lambda: torch.mm(x_RI, wide_IO)])
    found = f"{by_torch / here:.1f} x as fast as torch with {_TRIAL_ROWS} rows"
    if here > by_torch:
        raise Unavailable(found)
    return found, 0
