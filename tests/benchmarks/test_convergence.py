"""Curves and confidence of `bench convergence`, by hand-computed examples."""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dora_rl.benchmarks import convergence
from dora_rl.benchmarks.convergence import (
    WAYS,
    Band,
    Outcome,
    Plan,
    Result,
    draw,
    measure,
    named_ways,
)
from dora_rl.benchmarks.reporting import Reporter
from dora_rl.core.protocol.errors import UserError
from dora_rl.runtime.prepare.plan import read_config
from tests.benchmarks import stubs


def outcome(rewards: list[float], held_out: float, seed: int = 0) -> Outcome:
    times = [float(i) for i in range(len(rewards))]
    return Outcome(seed, rewards, times, held_out, 1.0, "clean")


def result(**ways: list[Outcome]) -> Result:
    return Result(Plan(seeds=2, steps=3, goal=0.5), dict(ways))


def test_a_band_is_students_confidence_interval() -> None:
    # 1, 2, 3: mean 2, standard error 1/sqrt(3), t of two degrees of freedom 4.30.
    band = Band.of([1.0, 2.0, 3.0])
    assert band.mean == 2.0
    assert band.high - band.mean == pytest.approx(4.30 / math.sqrt(3))
    assert band.mean - band.low == pytest.approx(4.30 / math.sqrt(3))
    assert Band.of([0.4]) == (0.4, 0.4, 0.4)


def test_a_curve_is_smoothed_before_a_goal_is_looked_for() -> None:
    run = outcome([0.0, 1.0, 0.5, 0.9, 0.9, 0.9, 0.9], 0.9)
    assert run.smooth()[:3] == [0.0, 0.5, 0.5]
    assert run.smooth()[-1] == pytest.approx((0.5 + 0.9 * 4) / 5)
    assert run.time_to(0.5) == 1.0
    assert run.time_to(0.95) is None


def test_time_to_the_goal_is_the_median_and_never_if_half_do_not_reach_it() -> None:
    fast, slow = outcome([0.9, 0.9, 0.9], 0.9), outcome([0.0, 0.0, 0.1], 0.1)
    assert result(sync=[fast, fast, slow]).time_to_goal("sync") == 0.0
    assert result(sync=[fast, slow, slow]).time_to_goal("sync") is None


def test_differences_are_taken_seed_by_seed() -> None:
    found = result(
        sync=[outcome([0.1], 0.5, 0), outcome([0.1], 0.9, 1)],
        other=[outcome([0.1], 0.6, 0), outcome([0.1], 1.0, 1)],
    )
    difference = found.difference("other")
    assert difference is not None
    assert difference.mean == pytest.approx(0.1)
    assert difference.high == pytest.approx(0.1)  # the seeds agree
    assert found.held_out("other").high > 1.0  # although each way varies much
    assert json.loads(json.dumps(found.to_json()))["ways"]["other"]["held_out"]["mean"] == 0.8
    assert any("other" in line for line in found.summary())


@pytest.mark.parametrize("way", WAYS, ids=[way.label for way in WAYS])
def test_every_way_is_a_valid_configuration_of_equal_trajectories(way: object) -> None:
    plan = Plan(steps=7)
    config = read_config(plan.config(way, 3))  # type: ignore[arg-type]
    first = read_config(plan.config(WAYS[0], 3))
    assert config.run.steps == 7 and config.run.seed == 3
    assert config.orchestration.groups_per_step == first.orchestration.groups_per_step
    assert config.orchestration.group_size == first.orchestration.group_size


def test_ways_are_named_as_they_are_typed() -> None:
    from dora_rl.cli.bench import command

    (option,) = [o for o in command.commands["convergence"].params if o.name == "ways"]
    assert named_ways(str(option.default).split(",")) == WAYS == Plan().ways
    assert [way.label for way in named_ways(["multi_version:3", "sync"])] == [
        "sync",
        "multi_version K=3",
    ]
    with pytest.raises(UserError, match=r"no such way: `async`. Use one of: sync, multi_version:1"):
        named_ways(["sync", "async"])
    with pytest.raises(UserError, match="--ways must name one"):
        Plan(ways=())


def test_one_seed_has_no_confidence() -> None:
    with pytest.raises(UserError, match="--seeds must be >= 2"):
        Plan(seeds=1)


@pytest.mark.slow
def test_what_was_measured_can_be_shown_at_any_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(data: dict[str, Any], out: Path, reporter: Reporter) -> Any:
        return data["run"]["seed"]

    monkeypatch.setattr(convergence, "train_once", run)
    monkeypatch.setattr(Outcome, "of", lambda run, seed: outcome([0.1, 0.2], 0.5, seed))
    shown = stubs.interrupted_everywhere(partial(measure, Plan(seeds=2, steps=2)))
    ways = [way.label for way in WAYS]
    for result in shown:
        assert isinstance(result, Result)
        draw(result, tmp_path / "curve.png")
        # Compared is seed by seed: the second round begins with the last way.
        assert {result.difference(label) for label in result.outcomes} == {Band(0.0, 0.0, 0.0)}
    assert [list(result.to_json()["ways"]) for result in shown[:4]] == [
        ways[:count] for count in (1, 2, 3, 4)
    ]
    some = measure(Plan(seeds=2, steps=2, ways=named_ways(["in_flight", "sync"])))
    assert list(some.outcomes) == ["sync", "in_flight"]
    without_sync = Result(Plan(), {"in_flight": [outcome([0.1], 0.5)]})
    assert without_sync.difference("in_flight") is None
    assert without_sync.to_json()["ways"]["in_flight"]["held_out_less_sync"] is None
    assert " - " in without_sync.summary()[-1]


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    runs = [outcome([0.1, 0.2, 0.3], 0.3), outcome([0.2, 0.3, 0.4], 0.4)]
    draw(result(sync=runs), tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
