"""Log-probabilities of given tokens from hidden states, without ever holding all logits.

The head is applied to a chunk of positions at a time. Backward computes a chunk's logits again,
unless one chunk was all there is.
"""

from typing import Any, cast

import torch
from torch import Tensor


def token_logprobs(
    hidden_MD: Tensor,
    weight_VD: Tensor,
    targets_M: Tensor,
    *,
    temperature: float,
    chunk: int,
    bias_V: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The log-probability of each target, and the entropy of each distribution, in float32.

    Matmuls are in the dtype of `hidden_MD`. The entropy carries no gradient.
    """
    logprobs_M, entropy_M = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_MD, weight_VD, bias_V, targets_M, temperature, chunk
    )
    return cast(Tensor, logprobs_M), cast(Tensor, entropy_M)


def _logits(
    hidden_mD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, temperature: float, room_MV: Tensor
) -> Tensor:
    """Logits in float32, in memory that is used again for every chunk."""
    logits_mV = room_MV[: len(hidden_mD)]
    if hidden_mD.dtype == torch.float32:
        torch.mm(hidden_mD, weight_VD.t(), out=logits_mV)
    else:
        logits_mV.copy_(torch.mm(hidden_mD, weight_VD.t()))
    if bias_V is not None:
        logits_mV += bias_V
    return logits_mV if temperature == 1 else logits_mV.div_(temperature)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_MD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_M: Tensor,
        temperature: float,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        weight = weight_VD.to(hidden_MD.dtype)
        total = len(hidden_MD)
        logprobs_M = hidden_MD.new_empty(total, dtype=torch.float32)
        entropy_M, normaliser_M = torch.empty_like(logprobs_M), torch.empty_like(logprobs_M)
        rooms = [logprobs_M.new_empty(min(chunk, total), len(weight)) for _ in range(2)]
        for start in range(0, total, chunk):
            part = slice(start, start + chunk)
            logits = _logits(hidden_MD[part], weight, bias_V, temperature, rooms[0])
            largest = logits.amax(1, keepdim=True)
            probs = torch.exp(logits.sub_(largest), out=rooms[1][: len(logits)])
            total_m1 = probs.sum(1, keepdim=True)
            probs.div_(total_m1)
            normaliser = total_m1.log().squeeze(1)
            logprobs_M[part] = logits.gather(1, targets_M[part, None]).squeeze(1) - normaliser
            # As a product of matrices: no third array of this size.
            expected = torch.bmm(probs[:, None], logits[:, :, None]).flatten()
            entropy_M[part] = normaliser - expected
            normaliser_M[part] = normaliser + largest.squeeze(1)
        ctx.save_for_backward(hidden_MD, weight_VD, bias_V, targets_M, normaliser_M)
        alone = 0 < total <= chunk and any(ctx.needs_input_grad[:3])
        ctx.probs_MV = rooms[1] if alone else None
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.mark_non_differentiable(entropy_M)
        return logprobs_M, entropy_M

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        hidden_MD, weight_VD, bias_V, targets_M, normaliser_M = ctx.saved_tensors
        dtype, total, chunk = hidden_MD.dtype, len(hidden_MD), ctx.chunk
        weight = weight_VD.to(dtype)
        grad_hidden = torch.empty_like(hidden_MD)
        grad_weight = torch.zeros_like(weight_VD)
        grad_bias = None if bias_V is None else torch.zeros_like(bias_V)
        probs_MV, ctx.probs_MV = ctx.probs_MV, None
        room = (
            probs_MV if probs_MV is not None else grads[0].new_empty(min(chunk, total), len(weight))
        )
        for start in range(0, total, chunk):
            part = slice(start, start + chunk)
            probs = room
            if probs_MV is None:
                logits = _logits(hidden_MD[part], weight, bias_V, ctx.temperature, room)
                probs = logits.sub_(normaliser_M[part, None]).exp_()
            scale = grads[0][part, None] / ctx.temperature
            # d logprob / d logits = one at the target, less the probabilities.
            grad_logits = probs.mul_(-scale).scatter_add_(1, targets_M[part, None], scale)
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0).to(grad_bias.dtype)
            grad_logits = grad_logits.to(dtype)
            torch.mm(grad_logits, weight, out=grad_hidden[part])
            if dtype == weight_VD.dtype:
                grad_weight.addmm_(grad_logits.t(), hidden_MD[part])
            else:
                grad_weight += torch.mm(grad_logits.t(), hidden_MD[part])
        return grad_hidden, grad_weight, grad_bias, None, None, None
