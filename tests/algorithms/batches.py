"""Flat batches for the tests: random ones with the corners in, and one micro-batch by hand."""

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from dora_rl.algorithms.algorithm import Algorithm, Responses, Tokens
from dora_rl.algorithms.settings import AlgorithmSettings

MAX_TOKENS = 8
EVERY_PRESET = (
    *("grpo", "dapo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "ppo"),
    *("gspo", "cispo", "sapo", "longcat", "reinforce", "pass_at_k"),
)
# What no preset turns on.
VARIANTS: tuple[dict[str, Any], ...] = (
    *({"preset": preset} for preset in EVERY_PRESET),
    {"preset": "grpo", "kl": "k3", "kl_coefficient": 0.1},
    {"preset": "dapo", "kl": "k2", "importance": "masked", "mask_truncated": True},
    {"preset": "gspo", "importance": "truncated"},
    {"preset": "rloo", "importance": "masked", "importance_level": "sequence"},
    {"preset": "ppo", "kl": "k1", "kl_in": "reward", "value_clip": 0.0},
)


def algorithm(**settings: Any) -> Algorithm:
    return Algorithm(AlgorithmSettings(**settings), max_tokens=MAX_TOKENS)


def rows(lengths: list[int]) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


@st.composite
def responses(draw: st.DrawFn, min_sequences: int = 1) -> Responses:
    """Groups of unequal sizes, observed tokens, sequences without a sampled token."""
    lengths = draw(st.lists(st.integers(0, MAX_TOKENS), min_size=min_sequences, max_size=8))
    number, total = len(lengths), sum(lengths)
    reward = st.sampled_from((-1.0, 0.0, 0.1, 0.5, 1.0, 100.0))
    mask = torch.tensor(draw(_many(st.booleans(), total)), dtype=torch.bool)
    return Responses(
        rewards_N=torch.tensor(draw(_many(reward, number))),
        group_N=torch.tensor(draw(_many(st.integers(0, 2), number))),
        truncated_N=torch.tensor(draw(_many(st.booleans(), number)), dtype=torch.bool),
        sequence_T=rows(lengths),
        mask_T=mask,
        values_T=_floats(draw, total),
        old_logprobs_T=-_floats(draw, total).abs(),
        reference_logprobs_T=-_floats(draw, total).abs(),
    )


@st.composite
def tokens(draw: st.DrawFn, spread: float = 2.0) -> dict[str, Tensor]:
    """The parts of a mini-batch as `Tokens` names them, without weights; float64."""
    batch = draw(responses())
    total = batch.mask_T.numel()
    assert batch.old_logprobs_T is not None
    old = batch.old_logprobs_T.double()
    parts = {
        name: _floats(draw, total).double()
        for name in ("advantages_T", "values_T", "old_values_T", "returns_T", "entropy_T")
    }
    moved = {
        name: old + spread * _floats(draw, total).double()
        for name in ("logprobs_T", "rollout_logprobs_T", "reference_logprobs_T")
    }
    return {
        **parts,
        **moved,
        "old_logprobs_T": old,
        "mask_T": batch.mask_T,
        "sequence_T": batch.sequence_T,
    }


def build(parts: dict[str, Tensor], chosen: Tensor | slice = slice(None)) -> Tokens:
    """`Tokens` of some entries; gradients go to the tensors in `parts`."""
    return Tokens(**{name: tensor[chosen] for name, tensor in parts.items()})


def with_gradient(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    copies = {name: tensor.detach().clone() for name, tensor in parts.items()}
    for name in ("logprobs_T", "values_T"):
        copies[name].requires_grad_()
    return copies


def gradient(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def _many(element: st.SearchStrategy[Any], number: int) -> st.SearchStrategy[list[Any]]:
    return st.lists(element, min_size=number, max_size=number)


def _floats(draw: st.DrawFn, number: int) -> Tensor:
    """Normal, from a seed: drawing every entry would take long and shrink no better."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    return torch.randn(number, generator=generator)
