"""Which numbers the trainer computes in, where that is left to the machine."""

from functools import partial

import torch
from torch import Tensor

from dora_rl.machine.fast_paths import Unavailable, fast_path
from dora_rl.models import cpu
from dora_rl.models.linear import best_time

_SHAPE = (256, 576, 1536)  # rows, inputs and outputs of the trial: a layer of a small model


@fast_path("bf16-training")
def bf16_training() -> tuple[str, int]:
    """Whether a layer's forward and backward products are faster in bfloat16."""
    if torch.cuda.is_available():
        if not torch.cuda.is_bf16_supported():
            raise Unavailable("the GPU has no bfloat16")
        return torch.cuda.get_device_name(), 0
    cpu.guard()
    rows, inputs, outputs = _SHAPE
    x_RI, weight_OI = torch.ones(rows, inputs), torch.ones(outputs, inputs, requires_grad=True)

    def step(bf16: bool) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            out_RO = torch.nn.functional.linear(x_RI, weight_OI)
        (gradient,) = torch.autograd.grad(out_RO.float().sum(), weight_OI)
        return gradient

    in_fp32, in_bf16 = (best_time([partial(step, bf16)]) for bf16 in (False, True))
    found = f"{in_fp32 / in_bf16:.1f} x as fast as float32"
    if in_bf16 > in_fp32:
        raise Unavailable(found)
    return found, 0
