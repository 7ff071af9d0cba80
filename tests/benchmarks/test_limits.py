"""The arithmetic of the roofline, against numbers that were computed by hand."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_rl.benchmarks.limits import (
    DTYPE_BYTES,
    Limits,
    Work,
    decode_work,
    least_s,
    mean_kv_tokens,
    measure,
    peak_flops,
    roofline,
)
from tests.models.configurations import SMALL

# q and o 4x4, k and v 2x4, gate, up and down 8x4, head 10x4: 184 numbers in matrices; and the
# three norms of 4 numbers each.
IN_MATRICES = 2 * 16 + 2 * 8 + 3 * 32 + 40
ALL = IN_MATRICES + 12


def test_the_work_of_a_step_by_hand() -> None:
    # 2 bytes each; 2 x 1 head x 2 numbers of KV per token; 4 x 2 heads x 2 operations on it.
    assert decode_work(SMALL, batch=3, kv_tokens=5) == Work(
        batch=3,
        weight_bytes=2 * ALL,
        kv_bytes=3 * 5 * 4 * 2,
        flops=3 * (2 * IN_MATRICES + 16 * 5),
    )


def test_an_embedding_of_its_own_is_not_read_and_biases_are_no_operations() -> None:
    tied = decode_work(SMALL, 1, 0)
    assert decode_work(replace(SMALL, tied=False), 1, 0) == tied
    biased = decode_work(replace(SMALL, qkv_bias=True), 1, 0)
    assert biased.flops == tied.flops
    assert biased.weight_bytes == tied.weight_bytes + 2 * (4 + 2 + 2)


def test_wider_numbers_are_more_bytes_and_the_same_operations() -> None:
    narrow, wide = (decode_work(replace(SMALL, dtype=dtype), 3, 5) for dtype in DTYPE_BYTES)
    assert wide.weight_bytes == 2 * narrow.weight_bytes
    assert wide.kv_bytes == 2 * narrow.kv_bytes
    assert wide.flops == narrow.flops


def test_the_slower_of_memory_and_operations_is_the_bound() -> None:
    work = decode_work(SMALL, batch=3, kv_tokens=5)  # 512 bytes, 1344 operations
    limits = Limits(512.0, {"bfloat16": 2688.0, "float32": 672.0})
    by_memory = roofline(work, limits, "bfloat16")
    assert (by_memory.memory_s, by_memory.compute_s) == (1.0, 0.5)
    assert (by_memory.tokens_per_s, by_memory.bound) == (3.0, "memory")
    by_compute = roofline(work, limits, "float32")
    assert (by_compute.compute_s, by_compute.tokens_per_s) == (2.0, 1.5)
    assert by_compute.bound == "compute"


@given(st.integers(1, 100), st.integers(2, 100))
def test_the_mean_of_what_is_attended_to(prompt: int, new: int) -> None:
    lengths = [prompt + before for before in range(1, new)]  # tokens before the 2nd … last
    assert mean_kv_tokens(prompt, new) == pytest.approx(sum(lengths) / len(lengths))


@given(st.integers(1, 500), st.integers(0, 1000), st.floats(1, 1e12), st.floats(1, 1e12))
def test_a_larger_batch_never_has_a_lower_limit(
    batch: int, tokens: int, bandwidth: float, peak: float
) -> None:
    limits = Limits(bandwidth, {"bfloat16": peak})
    one, more = (
        roofline(decode_work(SMALL, rows, tokens), limits, "bfloat16").tokens_per_s
        for rows in (batch, batch + 1)
    )
    assert more >= one * (1 - 1e-9)


def test_a_limit_is_the_best_that_was_seen() -> None:
    first = Limits(3.0, {"bfloat16": 5.0, "float32": 1.0})
    second = Limits(2.0, {"bfloat16": 6.0, "float32": 0.5})
    best = Limits(3.0, {"bfloat16": 6.0, "float32": 1.0})
    assert first.best(second) == second.best(first) == best
    assert Limits.from_json(best.to_json()) == best


def test_both_kinds_of_numbers_are_measured() -> None:
    limits = measure(read_bytes=1 << 20, mm_size=64)
    assert limits.bandwidth_bytes_per_s > 1e6
    assert limits.mm_flops_per_s.keys() == DTYPE_BYTES.keys()
    assert min(limits.mm_flops_per_s.values()) > 1e6


class Machine:
    """Multiplies at a rate that falls as products grow; notes the sizes."""

    def __init__(self, flops_per_s: float, falls: float = 1.0) -> None:
        self._rate, self._falls = flops_per_s, falls
        self.sizes: list[int] = []
        self.spent_s = 0.0

    def product_s(self, size: int) -> float:
        self.sizes.append(size)
        seconds = 2.0 * size**3 / (self._rate / self._falls ** (size / 128))
        self.spent_s += seconds
        return seconds


def test_a_fast_machine_multiplies_the_largest_matrices() -> None:
    machine = Machine(200e9)
    assert peak_flops(machine.product_s, 2048, budget_s=2.0) == pytest.approx(200e9)
    assert max(machine.sizes) == 2048 and machine.spent_s < 2


def test_products_that_would_take_minutes_are_not_begun() -> None:
    # As bfloat16 on a processor without instructions for it: 2048 takes a minute.
    machine = Machine(3e9, falls=1.15)
    best = peak_flops(machine.product_s, 2048, budget_s=2.0)
    assert best == pytest.approx(3e9 / 1.15)
    assert 128 < max(machine.sizes) < 2048 and machine.spent_s < 4


@given(st.floats(1e6, 1e13), st.floats(1, 1.3))
def test_a_figure_never_takes_much_longer_than_its_budget(rate: float, falls: float) -> None:
    machine = Machine(rate, falls)
    assert peak_flops(machine.product_s, 2048, budget_s=2.0) > 0
    within = machine.spent_s <= 2.0 * falls**8  # what is expected of the next size may be wrong
    assert within or machine.sizes == [128]


@pytest.mark.parametrize(("seconds", "calls"), [(0.1, 4), (0.9, 2), (5.0, 1)])
def test_reading_is_repeated_within_the_budget(seconds: float, calls: int) -> None:
    taken: list[float] = []

    def call_s() -> float:
        taken.append(seconds)
        return seconds

    assert least_s(call_s, budget_s=2.0) == seconds
    assert len(taken) == calls
