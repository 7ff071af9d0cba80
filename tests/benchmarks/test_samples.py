"""Rates from times, and how they are written."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_rl.benchmarks.contestants.process import ContestantFailed
from dora_rl.benchmarks.contestants.samples import Samples, median, rate, ratio, seconds_of, table


def test_rates_by_hand() -> None:
    samples = Samples(4, 10, 11, [(2.0, 4.0), (1.0, 2.0), (4.0, 12.0)])
    assert samples.prefill_tokens_per_s == 4 * 10 / 2.0
    # 4 * 10 tokens beyond the first, in 2, 1 and 8 seconds
    assert samples.decode_tokens_per_s == 20.0
    assert samples.lost == 0


def test_a_repeat_that_was_all_noise_does_not_count() -> None:
    samples = Samples(1, 1, 3, [(1.0, 0.9), (1.0, 1.0), (1.0, 2.0)])
    assert samples.decode_tokens_per_s == 2.0
    assert samples.lost == 2
    lost = Samples(1, 1, 3, [(1.0, 0.5)])
    assert lost.decode_tokens_per_s is None
    assert lost.to_json()["samples"] == [{"prefill_s": 1.0, "total_s": 0.5}]


@given(
    st.lists(st.tuples(st.floats(0.01, 10), st.floats(0.01, 10)), min_size=1, max_size=9),
    st.integers(1, 128),
    st.floats(0.5, 4),
)
def test_a_machine_that_is_so_many_times_slower_has_so_many_times_lower_rates(
    times: list[tuple[float, float]], batch: int, slower: float
) -> None:
    def samples(scale: float) -> Samples:
        seconds = [(scale * first, scale * (first + more)) for first, more in times]
        return Samples(batch, 8, 9, seconds)

    fast, slow = samples(1.0), samples(slower)
    assert fast.decode_tokens_per_s is not None and slow.decode_tokens_per_s is not None
    assert slow.decode_tokens_per_s * slower == pytest.approx(fast.decode_tokens_per_s, rel=1e-4)
    assert slow.prefill_tokens_per_s * slower == pytest.approx(fast.prefill_tokens_per_s)


def test_median_of_what_is_there() -> None:
    assert median([3.0, None, 1.0, 2.0]) == 2.0
    assert median([None]) is None


@pytest.mark.parametrize(("tokens", "logprobs"), [(7, 8), (8, 7), (9, 9)])
def test_an_answer_that_did_other_work_is_refused(tokens: int, logprobs: int) -> None:
    answer = {"seconds": 1.0, "tokens": tokens, "logprobs": logprobs}
    with pytest.raises(
        ContestantFailed, match=f"vllm was to generate 8 tokens, and gave `{tokens}`"
    ):
        seconds_of("vllm", answer, 8)


def test_a_ratio_needs_both() -> None:
    assert ratio(3.0, 2.0) == 1.5
    assert ratio(None, 2.0) is ratio(2.0, None) is ratio(2.0, 0.0) is None


def test_figures_are_short() -> None:
    assert [rate(v) for v in (None, 3.14159, 999.96, 12345.6)] == ["-", "3.1", "1,000.0", "12,346"]


def test_a_table_is_aligned_whatever_its_titles() -> None:
    columns = [("", ["n"]), ("a rather long title", ["x"]), ("none", []), ("both", ["y", "z"])]
    lines = table(columns, [["1", "2", "3", "4"], ["10,000", "-", "", "5"]])
    assert lines[0].split() == ["a", "rather", "long", "title", "both"]
    assert lines[1].split() == ["n", "x", "y", "z"]
    assert len({len(line) for line in lines}) == 1
