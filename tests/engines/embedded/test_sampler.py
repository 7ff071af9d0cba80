"""The sampler against a plain float64 reference, and its rows against each other."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from dora_rl.engines.base import Sampling
from dora_rl.engines.embedded import sampler
from dora_rl.engines.embedded.sampler import Draw, SamplingPlan, sample
from dora_rl.engines.noise import uniform

PLAIN = Sampling()
GREEDY = Sampling(temperature=0)
INF = math.inf
LAST = 1 - 2.0**-53
EDGES = (5e-324, 2.0**-54, 1e-9, 0.5, 1 - 1e-9, LAST, 1.0)
KINDS = (
    PLAIN,
    GREEDY,
    Sampling(temperature=0.7),
    Sampling(temperature=0.01),
    Sampling(top_k=5),
    Sampling(top_p=0.6, temperature=1.3),
    Sampling(top_p=0.97),
    Sampling(min_p=0.05, temperature=0.9),
    Sampling(top_k=400, top_p=0.9, min_p=0.001),
)


def brief(how: Sampling) -> str:
    """The settings that are not the usual ones, as a name for a test."""
    names = ("temperature", "top_k", "top_p", "min_p")
    unusual = {name: getattr(how, name) for name in names}
    return "-".join(f"{n}={v}" for n, v in unusual.items() if v != getattr(PLAIN, n)) or "plain"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def normal(rows: int, vocabulary: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocabulary, generator=generator) * scale


def numbers(count: int, seed: int = 0) -> list[float]:
    return [uniform(seed, row, 0) for row in range(count)]


def draw_each(logits: Sequence[float] | Tensor, how: Sampling, uniforms: Sequence[float]) -> Draw:
    """One row of logits, drawn from with each of the numbers."""
    row = torch.as_tensor(logits, dtype=torch.float32)
    return sample(row.repeat(len(uniforms), 1), SamplingPlan([how] * len(uniforms)), list(uniforms))


def line(draw: Draw, row: int) -> tuple[int, str, str, bool]:
    """All of one row; the text of a float tells bits apart, and NaN from nothing."""
    return (
        draw.tokens[row],
        repr(draw.logprobs[row]),
        repr(draw.raw_logprobs[row]),
        draw.finite[row],
    )


def reference(logits: Sequence[float], how: Sampling) -> tuple[dict[int, float], bool]:
    """The probabilities of what the filters keep, most probable first.

    Also whether a filter decided by a hair, where float32 may decide otherwise.
    """
    top = max(logits)
    weight = [math.exp((logit - top) / how.temperature) for logit in logits]
    kept = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if how.top_k:
        kept = kept[: how.top_k]
    close = False
    if how.top_p < 1:
        sums = list(accumulate(weight[token] for token in kept))
        goal = how.top_p * math.fsum(weight[token] for token in kept)
        close = any(abs(mass - goal) < 1e-6 * goal for mass in sums)
        kept = kept[: 1 + sum(mass < goal for mass in sums)]
    if how.min_p:
        close = close or any(abs(weight[token] / how.min_p - 1) < 1e-12 for token in kept[1:])
        kept = [token for token in kept if weight[token] >= how.min_p]
    total = math.fsum(weight[token] for token in kept)
    return {token: weight[token] / total for token in kept if weight[token] > 0}, close


def middles(probability: dict[int, float], how: Sampling) -> dict[int, float]:
    """For tokens that are not very rare, the number in the middle of their share.

    All of a few, else the first and the last.
    """
    filtered = how.top_k or how.top_p < 1 or how.min_p
    order = list(probability) if filtered else sorted(probability)
    ends = accumulate(probability[token] for token in order)
    shares = zip(order, ends, strict=True)
    found = [(t, end - probability[t] / 2) for t, end in shares if probability[t] > 1e-5]
    return dict(found[:30] + found[-30:])


def check_against_reference(logits: list[float], how: Sampling) -> None:
    expected, close = reference(logits, how)
    assume(not close)
    wanted = middles(expected, how)
    draw = draw_each(logits, how, [*wanted.values(), *EDGES])
    assert draw.tokens[: len(wanted)] == list(wanted)
    assert set(draw.tokens) <= set(expected)
    for token, logprob in zip(draw.tokens, draw.logprobs, strict=True):
        assert logprob == pytest.approx(math.log(expected[token]), rel=1e-6, abs=1e-6)
    assert all(draw.finite)


# A coarse grid, so that equal logits are common.
grids = st.lists(st.integers(-12, 12).map(lambda n: n / 4) | st.just(-INF), min_size=1, max_size=30)
samplings = st.builds(
    Sampling,
    temperature=st.sampled_from((1.0, 0.7, 0.4, 3.0)),
    top_k=st.integers(0, 12) | st.just(0),
    top_p=st.floats(0.01, 0.99) | st.just(1.0),
    min_p=st.floats(0.001, 1.0) | st.just(0.0),
)


@given(grids.filter(lambda logits: max(logits) > -INF), samplings)
def test_a_draw_is_that_of_the_reference(logits: list[float], how: Sampling) -> None:
    check_against_reference(logits, how)


@given(
    # Either side of what is sorted at once, summed directly, sorted second, and dealt in groups.
    vocabulary=st.sampled_from((255, 256, 257, 300, 512, 513, 640, 4096, 4097, 8192, 8209)),
    seed=st.integers(0, 1000),
    scale=st.sampled_from((0.2, 1.0, 4.0)),
    grid=st.sampled_from((4, 2**20)),
    how=st.builds(
        Sampling,
        temperature=st.sampled_from((1.0, 0.6)),
        top_k=st.sampled_from((0, 0, 1, 50, 255, 256, 257, 1000, 5000, 10**6)),
        top_p=st.sampled_from((1.0, 0.1, 0.5, 0.9, 0.999)),
        min_p=st.sampled_from((0.0, 0.0, 0.3, 0.01)),
    ),
)
def test_a_draw_of_many_tokens_is_that_of_the_reference(
    vocabulary: int, seed: int, scale: float, grid: int, how: Sampling
) -> None:
    logits = normal(1, vocabulary, seed, scale)[0].mul(grid).round().div(grid).tolist()
    check_against_reference(logits, how)


@pytest.mark.parametrize(
    "how",
    [
        PLAIN,
        Sampling(temperature=0.5),
        Sampling(temperature=2.0),
        Sampling(top_k=3),
        Sampling(top_p=0.8),
        Sampling(min_p=0.2),
        Sampling(temperature=1.5, top_k=7, top_p=0.9, min_p=0.1),
    ],
    ids=brief,
)
@pytest.mark.parametrize("vocabulary", [12, 600])
def test_frequencies_are_the_probabilities(vocabulary: int, how: Sampling) -> None:
    count = 3000
    logits = normal(1, vocabulary, seed=7, scale=1.0)[0]
    logits[12:] = -INF
    expected, close = reference(logits.tolist(), how)
    assert not close
    draw = draw_each(logits, how, numbers(count))
    assert set(draw.tokens) <= set(expected)
    chi_square = math.fsum(
        (draw.tokens.count(token) - count * p) ** 2 / (count * p) for token, p in expected.items()
    )
    freedom = len(expected) - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("vocabulary", [12, 600, 9000])
def test_equal_logits_are_kept_by_token_id(vocabulary: int) -> None:
    logits = torch.zeros(vocabulary)
    logits[5] = -1.0
    logits[9] = 1.0
    grid = [(step + 0.5) / 64 for step in range(64)]
    # The largest, then 0, 1, 2 of the equal ones.
    draw = draw_each(logits, Sampling(top_k=4), grid)
    assert sorted(set(draw.tokens)) == [0, 1, 2, 9]
    # 6 of 9 tokens of equal mass are the least that reach 0.6.
    equal = torch.full((vocabulary,), -INF)
    equal[-9:] = 2.0
    draw = draw_each(equal, Sampling(top_p=0.6), grid)
    assert sorted(set(draw.tokens)) == list(range(vocabulary - 9, vocabulary - 3))
    assert set(draw.logprobs) == {-math.log(6)}


@pytest.mark.parametrize("seed", range(4))
def test_equal_logits_beyond_the_prefix_count_too(seed: int) -> None:
    """255 distinct values, then 300 equal ones of which one is kept."""
    places = torch.randperm(700, generator=torch.Generator().manual_seed(seed))
    logits = torch.full((700,), -1.0)
    logits[places[:255]] = torch.arange(255) / 256
    logits[places[255:555]] = -0.5
    draw = draw_each(logits, Sampling(top_k=256), [LAST])
    assert draw.tokens == [int(places[255:555].min())]


def test_the_last_columns_are_looked_at() -> None:
    logits = normal(1, 8192 + 15)[0]
    logits[-15:] = 30.0
    draw = draw_each(logits, Sampling(top_k=15), [(step + 0.5) / 15 for step in range(15)])
    assert draw.tokens == list(range(8192, 8192 + 15))


def test_a_filter_that_is_met_exactly() -> None:
    grid = [(step + 0.5) / 8 for step in range(8)]
    assert set(draw_each([1.0] * 4, Sampling(top_p=0.5), grid).tokens) == {0, 1}
    assert set(draw_each([0.1, 1.0, 1.0], Sampling(min_p=1.0), grid).tokens) == {1, 2}


def test_few_tokens_are_counted_in_double_precision() -> None:
    logits = normal(1, 200)[0]
    how = Sampling(temperature=0.7, top_k=100, top_p=0.99)
    expected, _ = reference(logits.tolist(), how)
    draw = draw_each(logits, how, numbers(20))
    exact = [math.log(expected[token]) for token in draw.tokens]
    assert draw.logprobs == pytest.approx(exact, abs=1e-12)


def test_top_p_counts_the_mass_that_top_k_left() -> None:
    logits = torch.tensor([4.0, 3.0, 2.0, 1.0]).log()
    grid = [0.01, 0.3, 0.6, 0.99]
    assert set(draw_each(logits, Sampling(top_p=0.5), grid).tokens) == {0, 1}
    # 4/7 of what is left is more than half.
    assert set(draw_each(logits, Sampling(top_p=0.5, top_k=2), grid).tokens) == {0}


def test_a_filter_keeps_at_least_the_most_probable_token() -> None:
    logits = [0.0, 0.1, 0.0]
    for how in (Sampling(top_p=1e-9), Sampling(min_p=1.0), Sampling(top_k=1)):
        draw = draw_each(logits, how, EDGES)
        assert set(draw.tokens) == {1}
        assert set(draw.logprobs) == {0.0}


@pytest.mark.parametrize("how", [PLAIN, GREEDY, *KINDS[4:]], ids=brief)
@pytest.mark.parametrize("vocabulary", [97, 700, 9001])
def test_a_token_of_probability_zero_is_never_drawn(vocabulary: int, how: Sampling) -> None:
    logits = torch.full((vocabulary,), -INF)
    possible = [11, 12, 40, vocabulary // 2, vocabulary - 6]
    logits[possible] = torch.tensor([0.5, 0.0, 0.7, -60.0, 0.1])
    draw = draw_each(logits, how, [*EDGES, *numbers(20)])
    assert set(draw.tokens) <= set(possible)
    assert all(-70 < logprob <= 0 for logprob in draw.logprobs)
    if how is PLAIN:
        assert (draw.tokens[0], draw.tokens[5], draw.tokens[6]) == (11, possible[-1], possible[-1])


@pytest.mark.parametrize("seed", range(4))
def test_rounding_between_blocks_draws_no_masked_token(seed: int) -> None:
    """The first block weighs so little that its end is rounded in the sum with the second."""
    logits = torch.full((640,), -INF)
    logits[:128] = normal(1, 128, seed, scale=1.0)[0] - 25
    logits[130:140] = 0.0
    share = float(logits[:128].double().exp().sum() / logits.double().exp().sum())
    near = [share * (1 + step * 1e-8) for step in range(-400, 400)]
    draw = draw_each(logits, PLAIN, near)
    assert {127, 130} <= set(draw.tokens) <= {126, 127, 130}


def test_light_tokens_after_heavy_ones_are_reached() -> None:
    logits = torch.full((640,), -INF)
    logits[:10] = 0.0
    logits[300:304] = -25.0
    share = 4 * math.exp(-25) / 10
    draw = draw_each(logits, PLAIN, [1 - share * part for part in (1.5, 0.9, 0.6, 0.4, 0.1)])
    assert draw.tokens == [9, 300, 301, 302, 303]


def test_numbers_next_to_a_boundary() -> None:
    draw = draw_each([0.0] * 4, PLAIN, [0.25 - 1e-12, 0.25, 0.75 - 1e-12, 0.75])
    assert draw.tokens == [0, 1, 2, 3]
    assert set(draw.logprobs) == {-math.log(4)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [97, 700, 49152])
def test_greedy_takes_the_first_of_the_largest(vocabulary: int, dtype: torch.dtype) -> None:
    logits = normal(3, vocabulary).clamp(max=1.0).to(dtype)
    first = [row.tolist().index(1.0) for row in logits]
    draw = sample(logits, SamplingPlan([GREEDY] * 3), [0.1, 0.5, 0.9])
    assert draw.tokens == first
    assert draw.logprobs == [0.0] * 3


@pytest.mark.parametrize(
    ("how", "kept"),  # of 699 possible tokens, where all are as probable
    [(PLAIN, 699), (Sampling(top_p=0.9), 630), (Sampling(top_k=300), 300)],
    ids=["plain", "top_p", "top_k"],
)
def test_extreme_temperatures(how: Sampling, kept: int) -> None:
    logits = normal(1, 700)[0]
    logits[3] = -INF
    best = int(logits.argmax())
    for temperature in (1e-6, 1e-38, 5e-324):
        draw = draw_each(logits, replace(how, temperature=temperature), EDGES)
        assert set(draw.tokens) == {best}
        assert set(draw.logprobs) == {0.0}
    for temperature in (1e9, 1e38, 1e308):
        draw = draw_each(logits, replace(how, temperature=temperature), EDGES)
        assert draw.logprobs == pytest.approx([-math.log(kept)] * len(EDGES), rel=1e-6)
        assert 3 not in draw.tokens


# 111 is 15 more than a whole number of vectors: alone, a row ends in a scalar loop.
@pytest.mark.parametrize("vocabulary", [111, 5003, 49152])
def test_a_row_does_not_depend_on_the_others(vocabulary: int) -> None:
    wishes = [replace(KINDS[row % len(KINDS)], raw_logprobs=row % 2 == 0) for row in range(21)]
    logits = normal(21, vocabulary)
    uniforms = numbers(21)
    alone = [
        line(sample(logits[row : row + 1], SamplingPlan([wishes[row]]), [uniforms[row]]), 0)
        for row in range(21)
    ]
    batches = [list(range(21)), list(range(20, -1, -1)), [2, 0, 0], list(range(1, 15))]
    batches += [[row for row in range(21) if wishes[row] in kinds] for kinds in KINDS_TOGETHER]
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for batch in batches:
            plan = SamplingPlan([wishes[row] for row in batch])
            draw = sample(logits[batch], plan, [uniforms[row] for row in batch])
            assert [line(draw, place) for place in range(len(batch))] == [alone[r] for r in batch]


KINDS_TOGETHER = [  # plans of one kind take other ways through the code
    [replace(kind, raw_logprobs=raw) for kind in kinds for raw in (False, True)]
    for kinds in ((PLAIN,), (PLAIN, KINDS[2], KINDS[3]), KINDS[4:])
]


def test_large_batches_are_drawn_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, uniforms = normal(23, 700), numbers(23)
    plan = SamplingPlan([replace(KINDS[row % 9], raw_logprobs=True) for row in range(23)])
    whole = sample(logits, plan, uniforms)
    monkeypatch.setattr(sampler, "_CHUNK", 1400)
    assert sample(logits, plan, uniforms) == whole


@pytest.mark.parametrize("vocabulary", [97, 700, 9001])
@pytest.mark.parametrize("how", KINDS, ids=brief)
def test_a_row_without_a_distribution_is_named(how: Sampling, vocabulary: int) -> None:
    how = replace(how, raw_logprobs=True)
    logits, uniforms = normal(9, vocabulary), numbers(9)
    plan = SamplingPlan([how] * 9)
    healthy = sample(logits, plan, uniforms)
    assert all(healthy.finite)
    logits[1, 50] = math.nan
    logits[2, 96] = INF
    logits[3] = -INF
    logits[5] = math.nan
    logits[6, :3] = INF
    logits[7, ::2] = math.nan
    draw = sample(logits, plan, uniforms)
    assert draw.finite == [row in (0, 4, 8) for row in range(9)]
    for row in range(9):
        if draw.finite[row]:
            assert line(draw, row) == line(healthy, row)
        else:
            assert line(draw, row) == (0, "nan", "nan", False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [49152, 151936, 50257])
def test_large_vocabularies_are_exact(vocabulary: int, dtype: torch.dtype) -> None:
    temperatures = (1.0, 0.7, 1.7, 1.0)
    logits = normal(4, vocabulary, seed=3)
    logits[3] = torch.where(torch.arange(vocabulary) == 777, 0.0, -11.0)  # half is in the tail
    logits = logits.to(dtype)
    wishes = [Sampling(temperature=t, raw_logprobs=True) for t in temperatures]
    scaled = logits.double() / torch.tensor(temperatures, dtype=torch.float64).unsqueeze(1)
    exact, raw = scaled.log_softmax(1), logits.double().log_softmax(1)
    cumulative = exact.exp().cumsum(1)
    for seed in range(8):
        uniforms = numbers(4, seed)
        draw = sample(logits, SamplingPlan(wishes), uniforms)
        for row, (token, number) in enumerate(zip(draw.tokens, uniforms, strict=True)):
            assert draw.logprobs[row] == pytest.approx(float(exact[row, token]), abs=3e-7)
            assert draw.raw_logprobs[row] == pytest.approx(float(raw[row, token]), abs=3e-7)
            before = float(cumulative[row, token - 1]) if token else 0.0
            assert before - 3e-7 <= number <= float(cumulative[row, token]) + 3e-7


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_filters_of_a_large_vocabulary_are_exact(dtype: torch.dtype, flat: bool) -> None:
    logits = normal(1, 49157, seed=5, scale=0.5 if flat else 3.0).to(dtype)
    row = logits[0].tolist()
    for how in (Sampling(top_p=0.95), Sampling(top_k=40, top_p=0.9), Sampling(min_p=0.1)):
        expected, close = reference(row, how)
        assert not close
        draw = sample(logits.repeat(8, 1), SamplingPlan([how] * 8), numbers(8))
        ends = dict(zip(expected, accumulate(expected.values()), strict=True))
        for token, logprob, number in zip(draw.tokens, draw.logprobs, numbers(8), strict=True):
            assert logprob == pytest.approx(math.log(expected[token]), abs=1e-6)
            assert ends[token] - expected[token] - 1e-6 <= number <= ends[token] + 1e-6


@pytest.mark.parametrize("vocabulary", [20000, 40000])
def test_zeros_of_both_signs_are_equal(vocabulary: int) -> None:
    logits = torch.zeros(vocabulary)
    logits[::3] = -0.0
    logits[7::100] = -1.0
    draw = draw_each(logits, Sampling(top_k=vocabulary // 2), [0.001, 0.3, LAST])
    zeros = (logits == 0).nonzero().squeeze(1)
    half = vocabulary // 2
    assert draw.tokens == [int(zeros[int(part * half)]) for part in (0.001, 0.3, LAST)]


@pytest.mark.parametrize("vocabulary", [97, 700])
def test_raw_logprobs_are_those_of_the_plain_distribution(vocabulary: int) -> None:
    logits = normal(18, vocabulary)
    wishes = [replace(KINDS[row % 9], raw_logprobs=row < 9) for row in range(18)]
    draw = sample(logits, SamplingPlan(wishes), numbers(18))
    exact = logits.double().log_softmax(1)
    for row in range(9):
        expected = float(exact[row, draw.tokens[row]])
        assert draw.raw_logprobs[row] == pytest.approx(expected, abs=1e-6)
    assert draw.raw_logprobs[0] == draw.logprobs[0]
    assert draw.raw_logprobs[9:] == [None] * 9


def test_the_logits_are_left_as_they_were() -> None:
    logits = normal(9, 700).requires_grad_()
    before = logits.detach().clone()
    sample(logits, SamplingPlan(KINDS), numbers(9))
    assert torch.equal(logits, before)


def test_half_precision_is_widened_first() -> None:
    logits = normal(9, 700).bfloat16()
    plan = SamplingPlan(KINDS)
    assert sample(logits, plan, numbers(9)) == sample(logits.float(), plan, numbers(9))


def test_no_rows() -> None:
    assert sample(torch.empty(0, 97), SamplingPlan([]), []) == Draw([], [], [], [])
