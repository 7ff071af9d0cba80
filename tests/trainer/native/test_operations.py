"""The kernels of a layer against torch's own operations: values, gradients, threads."""

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from dora_rl.trainer.native.operations import Packing, add_norm, attend, gated, norm
from tests.models.kernels import needs_kernels, on_threads

pytestmark = needs_kernels

Groups = list[tuple[int, list[int]]]


@st.composite
def some_groups(draw: st.DrawFn) -> Groups:
    """A prefix and segments that continue it, or one sequence alone."""
    groups: Groups = []
    for _ in range(draw(st.integers(1, 3))):
        first = draw(st.integers(1, 40))
        more = draw(st.lists(st.integers(1, 40), max_size=3))
        groups.append((first if more else 0, [first, *more]))
    return groups


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    noise = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=noise).to(dtype).requires_grad_()


def with_gradients(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The result and the gradients of a sum of it with weights that differ."""
    out = function(*inputs)
    weights = torch.linspace(-1, 1, out.numel()).view_as(out).to(out.dtype)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), inputs)]


def check_like(
    ours: Callable[..., Tensor], theirs: Callable[..., Tensor], inputs: Sequence[Tensor]
) -> None:
    """In float32 up to rounding; in bfloat16 as near to float64 as torch's own are, nearly."""
    found = with_gradients(ours, inputs)
    exact = with_gradients(theirs, [x.detach().double().requires_grad_() for x in inputs])
    for mine, right in zip(found, exact, strict=True):
        bound = 2e-2 if mine.dtype == torch.bfloat16 else 2e-5
        scale = max(1.0, float(right.abs().max()))
        assert (mine.double() - right).abs().max() <= bound * scale


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@DTYPES
@given(rows=st.integers(1, 150), width=st.integers(1, 80))
@example(rows=64, width=64)
def test_norm(dtype: torch.dtype, rows: int, width: int) -> None:
    def theirs(x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        found = norm(x, weight, 1e-5, dtype)
        assert found.dtype == dtype
        return found

    inputs = [drawn(rows, width), drawn(width, seed=1)]
    if dtype == torch.float32:
        check_like(ours, theirs, inputs)
    else:  # a norm's gradients add up: bounds as for the result
        assert torch.allclose(ours(*inputs).float(), theirs(*inputs), rtol=1e-2, atol=1e-2)


@DTYPES
@given(rows=st.integers(1, 150), width=st.integers(1, 80))
def test_sum_and_norm(dtype: torch.dtype, rows: int, width: int) -> None:
    def theirs(x: Tensor, delta: Tensor, weight: Tensor) -> Tensor:
        total = x + delta
        return total + total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-5) * weight

    def ours(x: Tensor, delta: Tensor, weight: Tensor) -> Tensor:
        total, normed = add_norm(x, delta, weight, 1e-5, torch.float32)
        assert total.dtype == torch.float32
        return total + normed

    inputs = [drawn(rows, width), drawn(rows, width, seed=2, dtype=dtype), drawn(width, seed=1)]
    check_like(ours, theirs, inputs)


def test_a_sum_whose_norm_nobody_uses_has_the_gradient_of_a_sum() -> None:
    x, delta, weight = drawn(3, 20), drawn(3, 20, seed=1), drawn(20, seed=2)
    total, _ = add_norm(x, delta, weight, 1e-5, torch.float32)
    grads = torch.autograd.grad(total.sum(), [x, delta])
    assert all(torch.equal(grad, torch.ones(3, 20)) for grad in grads)


@DTYPES
@given(rows=st.integers(1, 60), width=st.integers(1, 600))
@example(rows=60, width=600)
def test_gate(dtype: torch.dtype, rows: int, width: int) -> None:
    def theirs(gate: Tensor, up: Tensor) -> Tensor:
        return functional.silu(gate) * up

    inputs = [drawn(rows, width, dtype=dtype), drawn(rows, width, seed=1, dtype=dtype)]
    check_like(gated, theirs, inputs)


def test_a_gate_far_from_zero_is_shut_or_open() -> None:
    gate, up = torch.tensor([[-200.0, 200.0]]), torch.ones(1, 2)
    assert gated(gate, up).tolist() == [[pytest.approx(0.0, abs=1e-30), 200.0]]


def rope_of(packing: Packing, half: int) -> tuple[Tensor, Tensor]:
    angles = packing.positions_T[:, None] * 100.0 ** (-torch.arange(half) / half)
    return angles.cos(), angles.sin()


def by_sequence(
    q: Tensor, k: Tensor, v: Tensor, groups: Groups, size: int, cos: Tensor, sin: Tensor
) -> Tensor:
    """Each sequence by itself, its prefix included, by torch's attention."""

    def heads(x: Tensor, rows: Tensor, rotate: bool) -> Tensor:
        x = x[rows].view(len(rows), -1, size).transpose(0, 1)
        if not rotate:
            return x
        c, s = (torch.cat([part[rows], part[rows]], -1).to(x.dtype) for part in (cos, sin))
        low, high = x.chunk(2, -1)
        return x * c + torch.cat([-high, low], -1) * s

    out, begin = torch.zeros_like(q), 0
    for prefix, lengths in groups:
        common, at = torch.arange(begin, begin + prefix), begin
        for number, length in enumerate(lengths):
            own = torch.arange(at, at + length)
            rows = own if number == 0 else torch.cat([common, own])
            repeat = q.shape[1] // k.shape[1]
            mixed = functional.scaled_dot_product_attention(
                heads(q, rows, True),
                heads(k, rows, True).repeat_interleave(repeat, 0),
                heads(v, rows, False).repeat_interleave(repeat, 0),
                is_causal=True,
            )
            found = mixed.transpose(0, 1).reshape(len(rows), -1)[-length:]
            out = out.index_copy(0, own, found)
            at += length
        begin = at
    return out


@DTYPES
@given(
    groups=some_groups(),
    kv_heads=st.integers(1, 2),
    repeat=st.integers(1, 3),
    half=st.sampled_from([1, 3, 8, 16, 20, 32]),
)
@example(groups=[(33, [33, 40, 1, 17])], kv_heads=2, repeat=2, half=16)
def test_attention(
    dtype: torch.dtype, groups: Groups, kv_heads: int, repeat: int, half: int
) -> None:
    packing, size = Packing.of(groups), 2 * half
    rows, rope = int(packing.segments[-1]), rope_of(packing, half)
    inputs = [
        drawn(rows, heads * size, seed=seed, dtype=dtype)
        for seed, heads in enumerate((kv_heads * repeat, kv_heads, kv_heads))
    ]

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, rope, packing, size=size, scale=size**-0.5)

    def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return by_sequence(q, k, v, groups, size, *rope)

    check_like(ours, theirs, inputs)


def test_bits_do_not_depend_on_the_threads() -> None:
    packing = Packing.of([(20, [20, 33, 7]), (0, [70]), (5, [5, 1, 90])])
    rows = int(packing.segments[-1])
    q, k, v = (drawn(rows, heads * 32, seed=heads) for heads in (4, 2, 2))
    wide, weight = drawn(rows, 128, seed=9), drawn(128, seed=8)

    def everything() -> list[Tensor]:
        def mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(q, k, v, rope_of(packing, 16), packing, size=32, scale=0.2)

        return [
            *with_gradients(mix, [q, k, v]),
            *with_gradients(lambda x, w: norm(x, w, 1e-5, torch.float32), [wide, weight]),
            *with_gradients(gated, [wide, q]),
        ]

    with on_threads(1):
        alone = everything()
    with on_threads(3):
        together = everything()
    assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))
