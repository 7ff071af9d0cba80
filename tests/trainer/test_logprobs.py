"""Chunked log-probabilities: the plain computation, forward and backward."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dora_rl.trainer import logprobs
from dora_rl.trainer.logprobs import token_logprobs


def plain(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """All logits at once."""
    logits = torch.nn.functional.linear(hidden, weight, bias).float() / temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(1, targets[:, None]).squeeze(1), entropy.detach()


def inputs(seed: int, rows: int, bias: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    source = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, 6, generator=source, requires_grad=True)
    weight = torch.randn(11, 6, generator=source, requires_grad=True)
    offset = torch.randn(11, generator=source, requires_grad=True) if bias else None
    return hidden, weight, offset, torch.randint(11, (rows,), generator=source)


@given(
    st.integers(0, 99),
    st.integers(0, 20),
    st.integers(1, 24),
    st.booleans(),
    st.sampled_from([1.0, 0.6, 2.0]),
)
def test_it_is_the_plain_computation(
    seed: int, rows: int, chunk: int, bias: bool, temperature: float
) -> None:
    hidden, weight, offset, targets = inputs(seed, rows, bias)
    leaves = [t for t in (hidden, weight, offset) if t is not None]
    upstream = torch.randn(rows, generator=torch.Generator().manual_seed(seed + 1))
    found, entropy = token_logprobs(
        hidden, weight, targets, temperature=temperature, chunk=chunk, bias_V=offset
    )
    wanted, wanted_entropy = plain(hidden, weight, offset, targets, temperature)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, wanted_entropy, rtol=1e-5, atol=1e-5)
    assert not entropy.requires_grad
    ours = torch.autograd.grad((found * upstream).sum(), leaves)
    theirs = torch.autograd.grad((wanted * upstream).sum(), leaves)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk", [3, 64])
def test_bf16_hidden_states_keep_float32_weights_and_sums(chunk: int) -> None:
    hidden, weight, _, targets = inputs(1, 40, False)
    narrow = hidden.detach().bfloat16().requires_grad_()
    found, _ = token_logprobs(narrow, weight, targets, temperature=1.0, chunk=chunk)
    wanted, _ = plain(hidden, weight, None, targets, 1.0)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.05)
    grad_hidden, grad_weight = torch.autograd.grad(found.sum(), [narrow, weight])
    assert (grad_hidden.dtype, grad_weight.dtype) == (torch.bfloat16, torch.float32)
    (wanted_grad,) = torch.autograd.grad(wanted.sum(), [weight])
    torch.testing.assert_close(grad_weight, wanted_grad, rtol=0.05, atol=0.3)


def test_logits_never_exist_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, _, targets = inputs(1, 50, False)
    seen = []
    logits = logprobs._logits

    def watched(*args: Any) -> Tensor:
        seen.append(args[-1].shape)
        return logits(*args)

    monkeypatch.setattr(logprobs, "_logits", watched)
    found, _ = token_logprobs(hidden, weight, targets, temperature=1.0, chunk=8)
    found.sum().backward()
    assert seen == [(8, 11)] * 14


def test_a_second_backward_gives_the_same() -> None:
    hidden, weight, _, targets = inputs(1, 5, False)
    found, _ = token_logprobs(hidden, weight, targets, temperature=1.0, chunk=8)
    first = torch.autograd.grad(found.sum(), [hidden, weight], retain_graph=True)
    second = torch.autograd.grad(found.sum(), [hidden, weight])
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other)
