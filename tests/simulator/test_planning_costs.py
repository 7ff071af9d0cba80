"""Fixed costs that nobody measured: how far a verdict depends on them, and what is said of it."""

from dataclasses import replace

import pytest

from dora_rl.core.protocol.settings import ParadigmName
from dora_rl.observe.metrics import WORTHWHILE
from dora_rl.simulator.planning import Plan, Question, make_plan, pose, search
from dora_rl.simulator.planning.fixed_costs import UNCERTAIN, ranges_of
from dora_rl.simulator.planning.reduction import reduce, without_own_sizes
from dora_rl.simulator.scenarios import load_scenario, scenario_names
from dora_rl.simulator.simulate import simulate
from tests.simulator.plans import (
    ALL_ALIKE,
    LONG_TAIL,
    SMALL,
    UNSURE,
    interrupt_after,
    planned,
    searched,
)

pytestmark = pytest.mark.slow  # every plan is a search over simulations


@pytest.fixture(scope="module")
def unsure() -> Plan:
    return planned(UNSURE)


def test_the_range_is_what_other_costs_would_have_given(unsure: Plan) -> None:
    costs = unsure.fixed_costs
    assert costs is not None and costs.complete and unsure.rival is not None
    assert costs.gains["planned"] == unsure.gain(unsure.rival)
    assert not unsure.reduction.reduced
    for name in ("low", "high"):
        given = [f"efficiency.{key}={getattr(span, name)}" for key, span in costs.ranges.items()]
        there = searched(replace(UNSURE, overrides=(*UNSURE.overrides, *given)))
        ours, theirs = (
            simulate(there.scenario_of(trial.candidate), trial.paradigm).summary.tokens_per_s
            for trial in (unsure.rival, unsure.sync)
        )
        assert costs.gains[name] == pytest.approx(ours / theirs)
    assert costs.least == min(costs.gains.values()) <= costs.most == max(costs.gains.values())
    assert f"{costs.gains['high']:.2f} x (high)" in costs.describe()


def test_a_verdict_that_depends_on_the_fixed_costs_says_so() -> None:
    plan = planned(replace(ALL_ALIKE, overrides=("rollout.slots=8",)))
    costs = plan.fixed_costs
    assert costs is not None
    assert costs.least < WORTHWHILE <= costs.most
    assert costs.decide and "The verdict depends on them" in costs.describe()
    assert plan.to_json()["fixed_costs"]["verdict_depends_on_them"] is True


def test_a_verdict_that_does_not_depend_on_the_fixed_costs_says_so(unsure: Plan) -> None:
    costs = unsure.fixed_costs
    assert costs is not None and costs.least >= WORTHWHILE
    assert not costs.decide and "does not depend on them: asynchrony pays" in costs.describe()


def test_what_was_measured_is_not_varied() -> None:
    def varied(question: Question) -> set[str]:
        return set(ranges_of(searched(question), pose(question).measured))

    assert varied(LONG_TAIL) == {"publish_latency_s", "update_overhead_s"}
    costs = planned(replace(SMALL, overrides=LONG_TAIL.overrides)).fixed_costs
    # One way to be low and one to be high: the mixtures would be the same again.
    assert costs is not None and set(costs.gains) == {"low", "planned", "high"}
    assert varied(replace(UNSURE, train_step_minutes=2)) == {"switch_s", "publish_latency_s"}
    all_known = [f"efficiency.{key}=1" for key in UNCERTAIN]
    assert varied(replace(UNSURE, overrides=(*UNSURE.overrides, *all_known))) == set()


def test_the_range_reaches_to_what_the_scenario_says() -> None:
    overrides = ("efficiency.switch_s=100", "efficiency.publish_latency_s=0.01")
    scenario = load_scenario("default", overrides)
    reduction = reduce(without_own_sizes(scenario), 1000, 3)
    ranges = ranges_of(search.Search(reduction, 3, 1.0), frozenset())
    assert ranges["switch_s"] == (2.0, 100.0, 100.0)
    assert ranges["publish_latency_s"] == (0.01, 0.01, 70.0)
    assert ranges["update_overhead_s"] == (0.1, 0.5, 6.5)


def test_the_constants_of_the_paper_are_in_its_scenarios_alone() -> None:
    fitted = ("compute_efficiency", "train_efficiency", *UNCERTAIN)
    theirs = load_scenario("paper-64").efficiency
    for name in scenario_names():
        mine = load_scenario(name).efficiency
        for key in fitted:
            same = getattr(mine, key) == getattr(theirs, key)
            assert same == name.startswith("paper-"), (name, key)
    flags = pose(Question(model="qwen2.5-7b", devices=8, batch=(16, 4))).scenario.efficiency
    assert all(getattr(flags, key) != getattr(theirs, key) for key in fitted)


def test_a_budget_leaves_time_for_the_other_fixed_costs() -> None:
    # A second for each simulation; nothing else takes time.
    runs: list[str] = []
    plan = make_plan(
        pose(UNSURE),
        budget_s=20.0,
        progress=lambda done, what: runs.append(what),
        clock=lambda: float(len(runs)),
    )
    assert plan.cut == "budget"
    assert len(plan.trials) > len(ParadigmName)
    assert plan.fixed_costs is not None and len(plan.fixed_costs.gains) == 5
    assert len(runs) <= 20


def test_an_interruption_among_the_fixed_costs_leaves_the_cases_so_far(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = planned(SMALL)
    assert whole.fixed_costs is not None and len(whole.fixed_costs.gains) == 5
    interrupt_after(len(whole.trials) + 3, monkeypatch)
    plan = planned(SMALL)
    assert plan.cut == "interrupted" and plan.decided
    assert len(plan.trials) == len(whole.trials)
    costs = plan.fixed_costs
    assert costs is not None and not costs.complete
    assert 1 < len(costs.gains) < 5
    assert "Interrupted before" in costs.describe()
