"""What the machine can do at most, and what that allows a decode step: the roofline.

A step of `batch` rows must read every weight once and the keys and values of every row, and must
do two operations for each weight of a matrix and row, and the attention. It takes at least as
long as the slower of the two. What counts:

- Weights: all but the embedding, of which a few rows are read; the head counts, also where it is
  the embedding. Norms and biases are bytes and no operations.
- Bytes in the model's own numbers, keys and values too, whatever an engine keeps.
- Operations at the peak of `torch.mm` in the model's own numbers.

Bandwidth is that of memory: weights that fit into a cache can beat this limit. torch is imported
by `measure` alone.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Self

from dora_rl.models.config import ModelConfig

DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
_READ_BYTES = 1 << 29  # more than any cache holds
_FIRST_MM_SIZE = 128
_MM_SIZE = 2048
_TRIES = 4
BUDGET_S = 2.0  # of one figure; on most machines it is not used up
_EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class Limits:
    """Measured bounds of the machine, on a given number of threads."""

    bandwidth_bytes_per_s: float
    mm_flops_per_s: Mapping[str, float]  # by dtype

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        return cls(values["bandwidth_bytes_per_s"], dict(values["mm_flops_per_s"]))

    def to_json(self) -> dict[str, Any]:
        return {
            "bandwidth_bytes_per_s": self.bandwidth_bytes_per_s,
            "mm_flops_per_s": dict(self.mm_flops_per_s),
        }

    def best(self, other: Self) -> Self:
        """The better of two measurements of each: a bound is what was ever reached."""
        peaks = {
            dtype: max(peak, other.mm_flops_per_s[dtype])
            for dtype, peak in self.mm_flops_per_s.items()
        }
        bandwidth = max(self.bandwidth_bytes_per_s, other.bandwidth_bytes_per_s)
        return type(self)(bandwidth, peaks)


@dataclass(frozen=True, slots=True)
class Work:
    """What one decode step of a batch cannot avoid."""

    batch: int
    weight_bytes: int
    kv_bytes: float
    flops: float


@dataclass(frozen=True, slots=True)
class Roofline:
    memory_s: float
    compute_s: float
    tokens_per_s: float
    bound: str  # memory or compute

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def mean_kv_tokens(prompt_tokens: int, new_tokens: int) -> float:
    """Tokens that a row attends to, on the mean over the steps after the first token.

    The step that makes token i attends to the prompt and the i - 1 tokens before it.
    """
    return prompt_tokens + new_tokens / 2


def decode_work(config: ModelConfig, batch: int, kv_tokens: float) -> Work:
    """The work of a step in which every row attends to `kv_tokens` tokens."""
    numbers, in_matrices = 0, 0
    for name, shape in config.tensors().items():
        if name == _EMBEDDING and not config.tied:
            continue
        numbers += math.prod(shape)
        in_matrices += math.prod(shape) if len(shape) == 2 else 0
    size = DTYPE_BYTES[config.dtype]
    kv_numbers = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    attention = 4 * config.num_layers * config.num_heads * config.head_dim
    return Work(
        batch=batch,
        weight_bytes=numbers * size,
        kv_bytes=batch * kv_tokens * kv_numbers * size,
        flops=batch * (2.0 * in_matrices + attention * kv_tokens),
    )


def roofline(work: Work, limits: Limits, dtype: str) -> Roofline:
    """The bound of a step whose operations run at the peak of this dtype."""
    memory_s = (work.weight_bytes + work.kv_bytes) / limits.bandwidth_bytes_per_s
    compute_s = work.flops / limits.mm_flops_per_s[dtype]
    return Roofline(
        memory_s=memory_s,
        compute_s=compute_s,
        tokens_per_s=work.batch / max(memory_s, compute_s),
        bound="memory" if memory_s >= compute_s else "compute",
    )


def measure(
    read_bytes: int = _READ_BYTES, mm_size: int = _MM_SIZE, budget_s: float = BUDGET_S
) -> Limits:
    """Read a large block and multiply matrices; each of the four figures within the budget."""
    import torch

    block = torch.ones(read_bytes // 4)
    column = torch.ones(1024)
    rows = block[: block.numel() // 1024 * 1024].view(-1, 1024)
    # Two ways of reading, as neither is the fastest on every machine.
    read_s = min(
        least_s(partial(_seconds, block.sum), budget_s),
        least_s(partial(_seconds, partial(torch.mv, rows, column)), budget_s),
    )
    return Limits(block.numel() * 4 / read_s, measure_peaks(mm_size, budget_s))


def measure_peaks(mm_size: int = _MM_SIZE, budget_s: float = BUDGET_S) -> dict[str, float]:
    """Operations per second of `torch.mm`, by dtype."""
    import torch

    def product_s(dtype: torch.dtype, size: int) -> float:
        left = torch.ones(size, size, dtype=dtype)
        return _seconds(partial(torch.mm, left, torch.ones_like(left)))

    return {
        dtype: peak_flops(partial(product_s, getattr(torch, dtype)), mm_size, budget_s)
        for dtype in DTYPE_BYTES
    }


def least_s(call_s: Callable[[], float], budget_s: float) -> float:
    """The least seconds of a few calls: no more than fit into the budget, and at least one."""
    least, spent = math.inf, 0.0
    for _ in range(_TRIES):
        seconds = call_s()
        spent += seconds
        least = min(least, seconds)
        if spent + seconds > budget_s:
            break
    return least


def peak_flops(product_s: Callable[[int], float], largest: int, budget_s: float) -> float:
    """The best rate of square products that grow while the next ones fit into the budget.

    Without instructions for a dtype a product can be some hundred times as slow, and the slower
    the larger it is: minutes for the largest one.
    """
    best, spent = 0.0, 0.0
    size = min(_FIRST_MM_SIZE, largest)
    while True:
        for _ in range(_TRIES):
            seconds = product_s(size)
            spent += seconds
            best = max(best, 2.0 * size**3 / seconds)
            if spent + seconds > budget_s:
                return best
        size *= 2
        if size > largest or spent + 8 * seconds > budget_s:
            return best


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
