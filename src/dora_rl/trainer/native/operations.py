"""The kernels as functions that autograd knows.

Numbers are contiguous, on the CPU, in float32 or bfloat16; gradients have the dtype of what they
are the gradients of.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dora_rl.trainer.native.structures import call, library


@dataclass(frozen=True)
class Packing:
    """How sequences stand in a packed row, and what they share.

    The segments of a group stand one after another. Each but the first continues the first
    `prefixes` tokens of the group, as if it stood right behind them and all others were not there.
    """

    groups: Tensor  # [groups + 1]: the first segment of each
    segments: Tensor  # [segments + 1]: the first row of each
    prefixes: Tensor  # [groups]
    positions_T: Tensor  # of each row in its sequence
    most_keys: int  # that any row may see

    @classmethod
    def of(cls, groups: Sequence[tuple[int, Sequence[int]]]) -> "Packing":
        """From the prefix and the rows of each segment, group by group.

        The first segment of a group has the prefix in it; one segment alone has none.
        """
        rows = [length for _, lengths in groups for length in lengths]
        positions: list[int] = []
        most = 1
        for prefix, lengths in groups:
            positions += range(lengths[0])
            for length in lengths[1:]:
                positions += range(prefix, prefix + length)
            most = max(most, lengths[0], *(prefix + length for length in lengths[1:]))
        return cls(
            groups=torch.tensor([0, *accumulate(len(lengths) for _, lengths in groups)]),
            segments=torch.tensor([0, *accumulate(rows)]),
            prefixes=torch.tensor([prefix for prefix, _ in groups]),
            positions_T=torch.tensor(positions),
            most_keys=most,
        )


def _bf16(tensor: Tensor) -> int:
    return int(tensor.dtype == torch.bfloat16)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
    ) -> Any:
        rows, width = x.shape
        sum_, scale = x if delta is None else torch.empty_like(x), x.new_empty(rows)
        out = torch.empty_like(x, dtype=dtype)
        shape = {"rows": rows, "width": width, "eps": eps, "out_bf16": _bf16(out)}
        if delta is not None:
            shape |= {"delta": delta.data_ptr(), "delta_bf16": _bf16(delta)}
        call(
            "dora_norm",
            torch.get_num_threads(),
            **{"x": x, "weight": weight, "sum": sum_, "scale": scale, "out": out, **shape},
        )
        ctx.save_for_backward(sum_, scale, weight)
        ctx.delta_dtype = None if delta is None else delta.dtype
        ctx.set_materialize_grads(False)
        return out if delta is None else (sum_, out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        sum_, scale, weight = ctx.saved_tensors
        grad_sum, grad_out = (None, *grads) if len(grads) == 1 else grads
        if grad_out is None:
            return grad_sum, _as(grad_sum, ctx.delta_dtype), None, None, None
        grad_out = grad_out.contiguous()
        rows, width = sum_.shape
        grad = torch.empty_like(sum_)
        partial = sum_.new_empty(library().dora_norm_partials(rows), width)
        call(
            "dora_norm_back",
            torch.get_num_threads(),
            sum=sum_,
            weight=weight,
            scale=scale,
            grad_sum=None if grad_sum is None else grad_sum.contiguous(),
            grad_out=grad_out,
            grad=grad,
            partial=partial,
            rows=rows,
            width=width,
            out_bf16=_bf16(grad_out),
        )
        return grad, _as(grad, ctx.delta_dtype), partial.sum(0), None, None


def _as(grad: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    return None if dtype is None or grad is None else grad.to(dtype)


def norm(x_TD: Tensor, weight_D: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """The root mean square norm of float32 rows, in `dtype`."""
    out = _Norm.apply(x_TD.contiguous(), None, weight_D, eps, dtype)  # type: ignore[no-untyped-call]
    return cast(Tensor, out)


def add_norm(
    x_TD: Tensor, delta_TD: Tensor, weight_D: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The sum of both in float32, and its norm in `dtype`."""
    delta_TD = delta_TD.contiguous()
    out = _Norm.apply(x_TD.contiguous(), delta_TD, weight_D, eps, dtype)  # type: ignore[no-untyped-call]
    return cast("tuple[Tensor, Tensor]", out)


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        out = torch.empty_like(gate)
        size = {"numbers": gate.numel(), "bf16": _bf16(gate)}
        call("dora_gate", torch.get_num_threads(), gate=gate, up=up, out=out, **size)
        ctx.save_for_backward(gate, up)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        call(
            "dora_gate_back",
            torch.get_num_threads(),
            gate=gate,
            up=up,
            grad_out=grads[0].contiguous(),
            grad_gate=grad_gate,
            grad_up=grad_up,
            numbers=gate.numel(),
            bf16=_bf16(gate),
        )
        return grad_gate, grad_up


def gated(gate_TI: Tensor, up_TI: Tensor) -> Tensor:
    """SwiGLU: silu(gate) * up."""
    out = _Gate.apply(gate_TI.contiguous(), up_TI.contiguous())  # type: ignore[no-untyped-call]
    return cast(Tensor, out)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rope: tuple[Tensor, Tensor],
        packing: Packing,
        size: int,
        scale: float,
    ) -> Tensor:
        rows, heads = len(q), q.shape[1] // size
        out, normaliser = torch.empty_like(q), q.new_empty(rows, heads, dtype=torch.float32)
        ctx.fields = {
            "cos": rope[0],
            "sin": rope[1],
            "groups": packing.groups,
            "segments": packing.segments,
            "prefixes": packing.prefixes,
            "num_groups": len(packing.prefixes),
            "heads": heads,
            "kv_heads": k.shape[1] // size,
            "size": size,
            "most_keys": packing.most_keys,
            "scale": scale,
            "bf16": _bf16(q),
        }
        threads = torch.get_num_threads()
        call("dora_attend", threads, q=q, k=k, v=v, out=out, normaliser=normaliser, **ctx.fields)
        ctx.save_for_backward(q, k, v, out, normaliser)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, out, normaliser = ctx.saved_tensors
        grad_q, grad_k, grad_v = map(torch.empty_like, (q, k, v))
        call(
            "dora_attend_back",
            torch.get_num_threads(),
            q=q,
            k=k,
            v=v,
            out=out,
            normaliser=normaliser,
            grad_out=grads[0].contiguous(),
            grad_q=grad_q,
            grad_k=grad_k,
            grad_v=grad_v,
            **ctx.fields,
        )
        return grad_q, grad_k, grad_v, None, None, None, None


def attend(
    q_TE: Tensor,
    k_TE: Tensor,
    v_TE: Tensor,
    rope: tuple[Tensor, Tensor],
    packing: Packing,
    *,
    size: int,
    scale: float,
) -> Tensor:
    """Causal attention of the sequences of a packed row, queries and keys rotated first.

    Rows are heads of `size`, one after another. `rope` is cosine and sine of each row, for half of
    a head.
    """
    parts = (part.contiguous() for part in (q_TE, k_TE, v_TE))
    out = _Attention.apply(*parts, rope, packing, size, scale)  # type: ignore[no-untyped-call]
    return cast(Tensor, out)
