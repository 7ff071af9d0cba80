"""Drawn lengths: exact marginals, correlation as asked, independence of the order of calls."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from math import asin, exp, log, pi, sqrt
from pathlib import Path
from statistics import NormalDist, correlation, fmean, pstdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from dora_rl.simulator.distributions import (
    Constant,
    Distribution,
    Empirical,
    LogNormal,
    Pareto,
    Uniform,
)
from dora_rl.simulator.workload import Sampler, Workload

PAPER = LogNormal(mean=2400, sigma=1.0, max=30_000)
MEMBERS = 16


def lengths(workload: Workload, count: int, seed: int = 0, step: int = 0) -> list[int]:
    sampler = Sampler(workload, seed)
    return [
        sampler.trajectory(i // MEMBERS, i % MEMBERS, step).turns[0].generate_tokens
        for i in range(count)
    ]


def distance(values: list[int], cdf: Callable[[float], float]) -> float:
    """The Kolmogorov-Smirnov distance of rounded values from the CDF of the unrounded."""
    values = sorted(values)
    worst = 0.0
    for index, value in enumerate(values):
        if index + 1 < len(values) and values[index + 1] == value:
            continue
        worst = max(worst, abs((index + 1) / len(values) - cdf(value + 0.5)))
    return worst


@pytest.fixture
def file_of_lengths(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.txt"
    drawn = random.Random(1)
    path.write_text("\n".join(str(drawn.randint(10, 9000)) for _ in range(1000)))
    return path


@pytest.mark.parametrize("rho", [0.0, 0.6])
@pytest.mark.parametrize(
    "distribution",
    [
        PAPER,
        LogNormal(mean=2400, p99=14_000, max=30_000),
        LogNormal(mean=20_000, sigma=1.5, max=30_000),
        Pareto(minimum=600, alpha=1.2, max=30_000),
        Uniform(low=100, high=5000),
    ],
)
def test_marginals_are_exact_whatever_the_correlation(
    distribution: LogNormal | Pareto | Uniform, rho: float
) -> None:
    count = 40_000
    workload = Workload(response_tokens=distribution, group_correlation=rho)
    drawn = lengths(workload, count)
    # Correlated members carry less information: at the least count / (1 + 15 rho).
    effective = count / (1 + (MEMBERS - 1) * rho)
    assert distance(drawn, distribution.cdf) < 1.95 / sqrt(effective)
    assert abs(fmean(drawn) - distribution.scaled_mean()) < 4 * pstdev(drawn) / sqrt(effective)
    assert max(drawn) <= distribution.upper


def test_mean_after_clipping_and_the_maximum_are_met() -> None:
    drawn = lengths(Workload(response_tokens=PAPER), 400_000)
    assert fmean(drawn) == pytest.approx(2400, rel=0.005)
    assert max(drawn) == 30_000
    share = drawn.count(30_000) / len(drawn)
    assert share == pytest.approx(1 - PAPER.cdf(29_999.5), rel=0.2)


@given(
    st.floats(1, 29_000),
    st.floats(0.05, 3),
    st.sampled_from([30_000.0, 100_000.0]),
    st.floats(1, 9),
)
def test_clipped_mean_is_solved_for_any_lognormal(
    mean: float, sigma: float, top: float, scale: float
) -> None:
    distribution = LogNormal(mean=mean, sigma=sigma, max=top)
    assert distribution.scaled_mean() == pytest.approx(mean, rel=1e-9)
    assert distribution.scaled_mean(scale) == pytest.approx(by_survival(distribution, scale), 5e-3)


@given(st.floats(1, 1000), st.floats(0.3, 5), st.floats(1, 9))
def test_clipped_mean_of_a_pareto(minimum: float, alpha: float, scale: float) -> None:
    distribution = Pareto(minimum=minimum, alpha=alpha, max=30_000)
    assert distribution.scaled_mean(scale) == pytest.approx(by_survival(distribution, scale), 5e-3)
    nearly = Pareto(minimum=minimum, alpha=1 + 1e-6, max=30_000).scaled_mean()
    assert Pareto(minimum=minimum, alpha=1, max=30_000).scaled_mean() == pytest.approx(nearly, 1e-4)


def by_survival(distribution: LogNormal | Pareto, scale: float) -> float:
    """The mean as the integral of P(value > x) up to the maximum, by the midpoint rule in log x."""
    low, high, count = log(1e-6), log(distribution.upper), 2000
    width = (high - low) / count
    points = (exp(low + (i + 0.5) * width) for i in range(count))
    return width * sum(x * (1 - distribution.cdf(x / scale)) for x in points)


@given(st.floats(0.3, 0.95), st.floats(100, 20_000))
def test_p99_is_met_together_with_the_mean(ratio: float, p99: float) -> None:
    distribution = LogNormal(mean=p99 * ratio, p99=p99, max=30_000)
    assert distribution.cdf(p99) == pytest.approx(0.99)
    assert distribution.scaled_mean() == pytest.approx(p99 * ratio, rel=1e-6)


def test_inverse_cdf_agrees_with_the_cdf(file_of_lengths: Path) -> None:
    normal = NormalDist()
    for distribution in (PAPER, Pareto(minimum=6, alpha=0.5, max=1e6), Uniform(low=1, high=9)):
        draw = distribution.draw()
        for u in (1e-6, 0.1, 0.5, 0.9, 0.99):
            assert distribution.cdf(draw(normal.inv_cdf(u), 1.0)) == pytest.approx(u, rel=1e-6)
    empirical = Empirical(path=file_of_lengths)
    for u in (0.0005, 0.5005, 0.9995):
        assert empirical.cdf(empirical.draw()(normal.inv_cdf(u), 1.0)) == pytest.approx(u, abs=2e-3)


@pytest.mark.parametrize(
    ("distribution", "low", "high"),
    [
        (PAPER, 0, 30_000),
        (Pareto(minimum=5, alpha=0.02, max=30_000), 5, 30_000),
        (Uniform(low=5, high=9), 5, 9),
        (Constant(value=5), 5, 5),
    ],
)
def test_extreme_normals_stay_in_range(
    distribution: LogNormal | Pareto | Uniform | Constant, low: float, high: float
) -> None:
    draw = distribution.draw()
    for z in (-12.0, 0.0, 12.0):
        assert low <= draw(z, 1.0) <= high
    assert distribution.cdf(low - 1) == 0
    assert distribution.cdf(high) == 1


@pytest.mark.parametrize("rho", [0.0, 0.3, 0.8, 1.0])
def test_correlation_inside_a_group_is_as_asked(rho: float) -> None:
    sampler = Sampler(Workload(response_tokens=PAPER, group_correlation=rho), 7)
    pairs = [[sampler.trajectory(g, m).generated_tokens for m in (0, 5)] for g in range(20_000)]
    measured = rank_correlation(*zip(*pairs, strict=True))
    # Spearman's coefficient of a Gaussian copula.
    expected = 6 / pi * asin(rho / 2)
    assert measured == pytest.approx(expected, abs=0.02)


def test_groups_seeds_and_neighbours_are_independent() -> None:
    workload = Workload(response_tokens=PAPER, group_correlation=0.8)
    one, other = Sampler(workload, 7), Sampler(workload, 8)
    here = [one.trajectory(g, 0).generated_tokens for g in range(20_000)]
    next_group = [one.trajectory(g + 1, 0).generated_tokens for g in range(20_000)]
    next_seed = [other.trajectory(g, 0).generated_tokens for g in range(20_000)]
    shifted = [other.trajectory(g + 1, 0).generated_tokens for g in range(20_000)]
    for there in (next_group, next_seed, shifted):
        assert abs(rank_correlation(here, there)) < 0.03


def rank_correlation(xs: tuple[int, ...] | list[int], ys: tuple[int, ...] | list[int]) -> float:
    return correlation(ranks(xs), ranks(ys))


def ranks(values: tuple[int, ...] | list[int]) -> list[float]:
    result = [0.0] * len(values)
    for rank, index in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        result[index] = float(rank)
    return result


AGENTIC = Workload(
    prompt_tokens=Uniform(low=100, high=2000),
    response_tokens=LogNormal(mean=400, sigma=1.0, max=4000),
    turns=LogNormal(mean=6, sigma=0.6, max=20),
    environment_s=LogNormal(mean=5, sigma=1.5, max=300),
    observation_tokens=Pareto(minimum=20, alpha=1.5, max=2000),
    reward_s=Uniform(low=0.5, high=2),
    group_correlation=0.4,
    growth_per_step=0.05,
)


@settings(max_examples=30)
@given(st.integers(), st.randoms(use_true_random=False))
def test_shapes_do_not_depend_on_the_order_of_calls(seed: int, order: random.Random) -> None:
    keys = [(g, m, s) for g in range(6) for m in range(4) for s in (0, 3)]
    sampler = Sampler(AGENTIC, seed)
    expected = {key: sampler.trajectory(*key) for key in keys}
    order.shuffle(keys)
    again = Sampler(AGENTIC, seed)
    assert {key: again.trajectory(*key) for key in keys} == expected
    alone = order.choice(keys)
    assert Sampler(AGENTIC, seed).trajectory(*alone) == expected[alone]


def test_drawn_shapes_never_change() -> None:
    # A change here changes every published simulation: it needs a line in the changelog.
    sampler = Sampler(Workload(group_correlation=0.3), 2024)
    drawn = [sampler.trajectory(g, m).generated_tokens for g in (0, 1) for m in (0, 1)]
    assert drawn == [413, 762, 1190, 3304]


def test_a_group_shares_its_prompt() -> None:
    sampler = Sampler(AGENTIC, 3)
    prompts = [{sampler.trajectory(g, m).prompt_tokens for m in range(8)} for g in range(50)]
    assert all(len(prompt) == 1 for prompt in prompts)
    assert len(set.union(*prompts)) > 40


def test_multi_turn_shapes() -> None:
    sampler = Sampler(AGENTIC, 3)
    shapes = [sampler.trajectory(g, m) for g in range(2000) for m in range(4)]
    for shape in shapes:
        assert 1 <= len(shape.turns) <= 20
        assert all(turn.generate_tokens >= 1 for turn in shape.turns)
        assert all(0 < turn.environment_s <= 300 for turn in shape.turns[:-1])
        assert all(20 <= turn.observation_tokens <= 2000 for turn in shape.turns[:-1])
        # After the last turn comes the reward, not the environment.
        assert shape.turns[-1][1:] == (0.0, 0)
        assert 0.5 <= shape.reward_s <= 2
        assert shape.generated_tokens == sum(turn[0] for turn in shape.turns)
        assert shape.total_tokens <= AGENTIC.longest_tokens
    assert fmean(len(s.turns) for s in shapes) == pytest.approx(6, rel=0.05)
    waits = [turn.environment_s for s in shapes for turn in s.turns[:-1]]
    assert fmean(waits) == pytest.approx(5, rel=0.05)
    turns = [turn.generate_tokens for s in shapes for turn in s.turns]
    assert fmean(turns) == pytest.approx(400, rel=0.05)
    pairs = [
        [t.turns[0].environment_s, t.turns[1].environment_s] for t in shapes if len(t.turns) > 2
    ]
    assert abs(correlation(*zip(*pairs, strict=True))) < 0.05


def test_constant_workload_is_constant() -> None:
    workload = Workload.model_validate(
        {"prompt_tokens": 10, "response_tokens": 20, "turns": 3, "observation_tokens": 5}
    )
    shape = Sampler(workload, 0).trajectory(4, 2)
    assert shape.turns == ((20, 0.0, 5), (20, 0.0, 5), (20, 0.0, 0))
    assert shape.total_tokens == workload.longest_tokens == 10 + 60 + 10
    assert shape.reward_s == 0


def test_lengths_are_at_least_one() -> None:
    workload = Workload(
        prompt_tokens=Uniform(low=0, high=1),
        response_tokens=Uniform(low=0, high=1),
        turns=Uniform(low=0, high=1),
    )
    sampler = Sampler(workload, 0)
    shapes = {sampler.trajectory(g, 0)[:2] for g in range(100)}
    assert shapes == {(1, ((1, 0.0, 0),))}


def test_responses_grow_towards_the_maximum() -> None:
    workload = Workload(response_tokens=PAPER, growth_per_step=0.02)
    assert workload.mean_response_tokens() == pytest.approx(2400)
    assert workload.mean_response_tokens(50) == pytest.approx(4800)
    assert workload.mean_response_tokens(10**6) == pytest.approx(0.99 * 30_000)
    later = lengths(workload, 100_000, step=50)
    assert fmean(later) == pytest.approx(4800, rel=0.015)
    assert max(later) == 30_000
    # The same trajectory, only longer.
    assert all(a <= b for a, b in zip(lengths(workload, 1000), later, strict=False))


def test_without_growth_the_step_changes_nothing() -> None:
    workload = Workload(response_tokens=PAPER)
    assert lengths(workload, 100, step=0) == lengths(workload, 100, step=99)


def test_growth_of_pareto_and_empirical(file_of_lengths: Path) -> None:
    for distribution in (
        Pareto(minimum=600, alpha=1.2, max=30_000),
        Empirical(path=file_of_lengths, max=9000),
    ):
        workload = Workload(response_tokens=distribution, growth_per_step=0.1)
        first = distribution.scaled_mean()
        assert workload.mean_response_tokens(3) == pytest.approx(1.3 * first)


def test_growth_without_a_maximum_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"growth_per_step needs .* `constant` has none"):
        Workload.model_validate({"response_tokens": 5, "growth_per_step": 0.1})


def test_empirical_draws_the_values_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "some.txt").write_text("# lengths\n10\n\n20  # twice\n20\n40\n")
    workload = Workload.model_validate(
        {"response_tokens": {"kind": "empirical", "path": "some.txt"}},
        context={"base_dir": tmp_path},
    )
    drawn = lengths(workload, 20_000)
    assert set(drawn) == {10, 20, 40}
    assert drawn.count(20) / 20_000 == pytest.approx(0.5, abs=0.02)
    assert workload.mean_response_tokens() == pytest.approx(22.5)
    assert workload.response_tokens.upper == 40
    assert [workload.response_tokens.cdf(x) for x in (9, 10, 20, 40)] == [0, 0.25, 0.75, 1]


def test_empirical_reads_json_and_clips(tmp_path: Path) -> None:
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps([1, 2.5, 300]))
    distribution = Empirical(path=path, max=100)
    assert distribution.scaled_mean() == pytest.approx(103.5 / 3)
    assert distribution.scaled_mean(50) == pytest.approx((50 + 100 + 100) / 3)
    assert distribution.upper == 100


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("10\nten\n30\n-4\n", "line 2: `ten`, line 4: `-4`"),
        ("10\n\n# fine\nnan\ninf\n", "line 4: `nan`, line 5: `inf`"),
        ("x\n" * 9, "line 5: `x` and 4 more"),
        ("1 2\n", "line 1: `1 2`"),
        ("", "the file is empty"),
        ("[]", "the file is empty"),
        ('[1, "two", true, null, [3]]', "item 2: `two`, item 3: `True`, item 4: `None`, item 5"),
        ("[1, 2", "not a JSON list"),
        ("[" * 100_000, "not a JSON list"),
        ("1" + "0" * 400, "line 1"),
        ("[1" + "0" * 400 + "]", "item 1"),
    ],
)
def test_bad_files_are_refused_by_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.txt"
    path.write_text(text)
    with pytest.raises(ValidationError, match=message.replace("[", r"\[")):
        Empirical(path=path)


def test_missing_and_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=r"no such file of lengths: .*starts at the scenario"):
        Empirical.model_validate({"path": "nowhere.txt"}, context={"base_dir": tmp_path})
    with pytest.raises(ValidationError, match="cannot read"):
        Empirical(path=tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValidationError, match="cannot read"):
        Empirical(path=tmp_path / "binary")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"kind": "lognormal", "mean": 5, "sigma": 1, "max": 4}, r"mean must be < max \(4\): `5`"),
        ({"kind": "lognormal", "mean": 5, "max": 40}, "exactly one of sigma and p99"),
        ({"kind": "lognormal", "mean": 5, "sigma": 1, "p99": 9, "max": 40}, "exactly one"),
        ({"kind": "lognormal", "mean": 5, "p99": 3, "max": 40}, "p99 must lie between"),
        ({"kind": "lognormal", "mean": 5, "p99": 900, "max": 1000}, "no lognormal has mean `5`"),
        ({"kind": "pareto", "minimum": 5, "alpha": 1, "max": 5}, r"minimum must be < max \(5\)"),
        ({"kind": "pareto", "minimum": 5, "alpha": 0, "max": 9}, "greater than 0"),
        ({"kind": "uniform", "low": 5, "high": 5}, "Use kind = `constant`"),
        ({"kind": "gamma"}, "does not match any of the expected tags"),
        ({"kind": "constant", "value": 1, "sigma": 2}, "Extra inputs"),
        (-1, "greater than or equal to 0"),
        (True, "valid dictionary"),
    ],
)
def test_impossible_distributions_are_refused(data: object, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TypeAdapter[object](Distribution).validate_python(data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"group_correlation": 1.1}, "less than or equal to 1"),
        ({"growth_per_step": -0.1}, "greater than or equal to 0"),
        ({"turns": 0}, "turns must reach at least 1: its largest value is `0`"),
        ({"respons_tokens": 5}, "Extra inputs"),
    ],
)
def test_impossible_workloads_are_refused(data: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Workload.model_validate(data)


def test_a_workload_survives_a_dump(file_of_lengths: Path) -> None:
    data = {
        "response_tokens": {"kind": "empirical", "path": file_of_lengths.name},
        "turns": {"kind": "lognormal", "mean": 3, "p99": 10, "max": 20},
    }
    workload = Workload.model_validate(data, context={"base_dir": file_of_lengths.parent})
    again = Workload.model_validate_json(workload.model_dump_json())
    assert again == workload
    assert lengths(again, 50) == lengths(workload, 50)
