"""Rotary embeddings: the frequencies of each kind, and a table of cosines and sines.

The sums are done in fp32 and in the order of transformers, as one last bit of a frequency is
visible at position 100 000. A position's numbers depend on the position alone, so cached keys
stay valid while a sequence grows.
"""

import math

import torch
from torch import Tensor

from dora_rl.models.config import ModelConfig, Rope

_FIRST_ROWS = 256  # a table that starts smaller would only grow more often


def rope_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Radians per position of each pair, and what cosines and sines are multiplied by.

    `dynamic` equals `default`: it scales only beyond the original context, where
    `ModelConfig.context` ends.
    """
    rope = config.rope
    periods_E = rope.theta ** (
        torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    )
    if rope.kind == "yarn":
        return _yarn(periods_E, config.head_dim, rope), rope.attention_factor
    frequencies_E = 1.0 / periods_E
    if rope.kind == "linear":
        frequencies_E /= rope.factor
    elif rope.kind == "llama3":
        frequencies_E = _llama3(frequencies_E, rope)
    return frequencies_E, rope.attention_factor


def _llama3(frequencies_E: Tensor, rope: Rope) -> Tensor:
    """Short waves stay, long ones are stretched, those between are blended."""
    waves_E = 2 * math.pi / frequencies_E
    stretched_E = frequencies_E / rope.factor
    share_E = (rope.original_context / waves_E - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended_E = (1 - share_E) * frequencies_E / rope.factor + share_E * frequencies_E
    short = waves_E < rope.original_context / rope.high_freq_factor
    long = waves_E > rope.original_context / rope.low_freq_factor
    return torch.where(long, stretched_E, torch.where(short, frequencies_E, blended_E))


def _yarn(periods_E: Tensor, head_dim: int, rope: Rope) -> Tensor:
    """Pairs that turn often within the original context stay, the others are stretched."""

    def pair_that_turns(times: float) -> float:
        return (head_dim * math.log(rope.original_context / (times * 2 * math.pi))) / (
            2 * math.log(rope.theta)
        )

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp_E = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)
    kept_E = 1 - ramp_E.clamp(0, 1)
    return 1.0 / (rope.factor * periods_E) * (1 - kept_E) + 1.0 / periods_E * kept_E


class RopeTable:
    """Cosines and sines by position, computed as far as anyone asked, in powers of two."""

    def __init__(self, config: ModelConfig) -> None:
        self._context = config.context
        self._frequencies_E, self._factor = rope_frequencies(config)
        self._cos_PE = self._sin_PE = torch.empty(0, config.head_dim // 2, dtype=torch.float32)

    def cos_sin(self, positions_N: Tensor) -> tuple[Tensor, Tensor]:
        """[N, head_dim // 2] each, in fp32; every position must be within the context."""
        if positions_N.numel():
            self._reach(int(positions_N.max()))
        return self._cos_PE.index_select(0, positions_N), self._sin_PE.index_select(0, positions_N)

    def tables(self, position: int) -> tuple[Tensor, Tensor]:
        """Of all positions up to this one, and maybe more: [P, head_dim // 2] each."""
        self._reach(position)
        return self._cos_PE, self._sin_PE

    def _reach(self, position: int) -> None:
        rows = len(self._cos_PE)
        if position < rows:
            return
        assert position < self._context, f"position {position} in a context of {self._context}"
        wanted = min(max(1 << position.bit_length(), _FIRST_ROWS), self._context)
        # Old rows are kept, not computed again: a position's numbers never change.
        angles = torch.arange(rows, wanted, dtype=torch.float32)[:, None] * self._frequencies_E
        self._cos_PE = torch.cat((self._cos_PE, angles.cos() * self._factor))
        self._sin_PE = torch.cat((self._sin_PE, angles.sin() * self._factor))
