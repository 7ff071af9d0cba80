"""Plans: the choice is the best simulated, the front is undominated, sync where it should be."""

from pathlib import Path

import pytest

from dora_rl.config import dump_toml
from dora_rl.core.protocol.errors import UserError
from dora_rl.core.protocol.paradigms import PARADIGMS
from dora_rl.core.protocol.settings import ParadigmName
from dora_rl.simulator.planning import Plan, Question, make_plan, pose, search
from dora_rl.simulator.planning.bounds import Bounds
from dora_rl.simulator.planning.reduction import Reduction, reduce, without_own_sizes
from dora_rl.simulator.planning.verdict import pareto
from dora_rl.simulator.scenarios import Scenario, load_scenario
from tests.simulator.plans import (
    ALL_ALIKE,
    LONG_TAIL,
    SMALL,
    interrupt_after,
    planned,
)


@pytest.fixture(scope="module")
def long_tail() -> Plan:
    return planned(LONG_TAIL)


@pytest.fixture(scope="module")
def all_alike() -> Plan:
    return planned(ALL_ALIKE)


def one_version_each(plan: Plan) -> list[search.Trial]:
    """Those that may be recommended."""
    return [t for t in plan.trials if PARADIGMS[t.paradigm].pins_version]


# The choice


def test_the_recommended_is_the_best_of_those_simulated(long_tail: Plan) -> None:
    assert long_tail.pays and long_tail.cut is None
    assert long_tail.best.paradigm == ParadigmName.MULTI_VERSION
    pinned = one_version_each(long_tail)
    fastest = max(trial.tokens_per_s for trial in pinned)
    near = [t for t in pinned if t.tokens_per_s >= (1 - search.TIE) * fastest]
    assert long_tail.best in near
    freshest = min(trial.summary.mean_staleness for trial in near)
    assert long_tail.best.summary.mean_staleness <= freshest + 0.1
    assert long_tail.gain(long_tail.best) > 1.05


def test_every_kind_of_candidate_is_tried(long_tail: Plan) -> None:
    ours = [t.candidate for t in long_tail.trials if t.paradigm == ParadigmName.MULTI_VERSION]
    assert {c.max_staleness for c in ours} == {1, 2, 3, 4}
    assert {1.0, 1.25, 1.5, 2.0} <= {c.depth for c in ours}
    assert {c.version_slots for c in ours} == {1, 2}
    assert len({c.rollout for c in ours}) > 1
    assert set(long_tail.comparison) == set(ParadigmName)


def test_the_front_has_no_dominated_member_and_misses_none(long_tail: Plan) -> None:
    def beats(a: search.Trial, b: search.Trial) -> bool:
        ages = a.summary.mean_staleness, b.summary.mean_staleness
        return (
            a.tokens_per_s >= b.tokens_per_s
            and ages[0] <= ages[1]
            and (a.tokens_per_s > b.tokens_per_s or ages[0] < ages[1])
        )

    front, pinned = long_tail.front, one_version_each(long_tail)
    assert len(front) >= 2
    assert not any(beats(a, b) for a in pinned for b in front)
    left_out = [t for t in pinned if t not in front]
    same = {(t.tokens_per_s, t.summary.mean_staleness) for t in front}
    for trial in left_out:
        point = trial.tokens_per_s, trial.summary.mean_staleness
        assert point in same or any(beats(t, trial) for t in front)
    assert pareto(front) == front


def test_the_reason_names_what_bounds_the_step(long_tail: Plan) -> None:
    kinds = ("Training bounds", "Rollout throughput bounds", "The tail bounds")
    assert any(kind in long_tail.reason for kind in kinds)
    assert f"{long_tail.gain(long_tail.best):.2f} times sync" in long_tail.reason
    assert "waits for the longest responses" in long_tail.reason


def test_where_asynchrony_does_not_pay_it_is_said(all_alike: Plan) -> None:
    assert not all_alike.pays
    assert all_alike.best is all_alike.sync
    assert all_alike.rival is not None
    assert all_alike.reason.startswith("Asynchrony does not pay here: ")
    assert "The tail is short" in all_alike.reason
    assert "The cluster is small" in all_alike.reason
    assert all_alike.settings == {"orchestration": {"paradigm": "sync", "max_staleness": 0}}


def test_where_generation_dominates_it_is_said() -> None:
    tiny = ("efficiency.train_overhead_s=0", "efficiency.update_overhead_s=0")
    plan = planned(
        Question(
            model="qwen2.5-1.5b",
            devices=4,
            batch=(16, 4),
            mean_length=500,
            length_sigma=0,
            overrides=("rollout.slots=4", "efficiency.switch_s=0", *tiny),
        )
    )
    assert not plan.pays
    assert "Generation dominates" in plan.reason


@pytest.mark.parametrize(
    ("devices", "limit", "words"),
    [(1, None, "there is one instance"), (2, 0, "A staleness limit of 0 is synchronous")],
)
def test_where_no_split_is_possible(devices: int, limit: int | None, words: str) -> None:
    question = Question(model="qwen2.5-1.5b", devices=devices, batch=(4, 2), mean_length=50)
    plan = planned(question, max_staleness=limit)
    assert [trial.paradigm for trial in plan.trials] == [ParadigmName.SYNC]
    assert words in plan.reason and plan.rival is None and plan.front == [plan.sync]


def test_the_limit_on_staleness_is_kept() -> None:
    plan = planned(LONG_TAIL, max_staleness=1)
    assert {trial.candidate.max_staleness for trial in plan.trials} == {0, 1}


def test_the_trainer_gets_the_memory_that_it_needs() -> None:
    question = Question(model="qwen2.5-7b", devices=8, batch=(8, 2), mean_length=100)
    plan = planned(question)
    # 16 bytes a parameter are 122 GB, and a device offers 72 of its 80 GB.
    assert {t.train_devices for t in plan.trials if t.train_devices} <= set(range(2, 8))


# Determinism, budget, interruption


def test_the_same_seed_gives_the_same_plan(long_tail: Plan) -> None:
    again = planned(LONG_TAIL)
    assert again.to_json() == long_tail.to_json()


def test_the_budget_cuts_between_candidates(long_tail: Plan) -> None:
    ticks = iter(range(10_000))
    plan = make_plan(pose(LONG_TAIL), budget_s=5.0, clock=lambda: float(next(ticks)))
    assert plan.cut == "budget"
    assert 2 <= len(plan.trials) < len(long_tail.trials)
    assert plan.to_json()["complete"] is False


def test_one_of_each_paradigm_is_simulated_whatever_the_budget() -> None:
    ticks = iter(range(10_000))
    plan = make_plan(pose(LONG_TAIL), budget_s=1e-9, clock=lambda: float(next(ticks)))
    assert plan.cut == "budget"
    assert sorted(trial.paradigm for trial in plan.trials) == sorted(ParadigmName)
    assert set(plan.comparison) == set(ParadigmName)
    assert plan.best.candidate.max_staleness == 3  # of 4 that are allowed
    assert "No bound above K = 3 was simulated." in plan.reason


def test_every_run_is_announced() -> None:
    said: list[tuple[int, str]] = []
    plan = planned(SMALL, progress=lambda done, what: said.append((done, what)))
    assert [done for done, _ in said] == list(range(len(said)))
    assert len(said) > len(plan.trials)
    assert any("fixed costs" in what for _, what in said)
    assert all(any(name in what for name in ParadigmName) for _, what in said)


def test_an_interruption_leaves_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_after(4, monkeypatch)
    plan = planned(LONG_TAIL)
    assert plan.cut == "interrupted" and len(plan.trials) == 4


def test_an_interruption_before_any_result_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_after(0, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        planned(LONG_TAIL)


def test_an_interruption_after_sync_alone_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_after(1, monkeypatch)
    plan = planned(LONG_TAIL)
    assert plan.cut == "interrupted" and not plan.decided
    report = plan.to_json()
    assert report["recommendation"] is None and report["asynchrony_pays"] is None
    assert "no verdict" in plan.reason and "does not pay" not in plan.reason


def test_candidates_that_fail_are_left_out_and_counted() -> None:
    # Shared devices train fast enough, fewer do not.
    bounds = Bounds(pose(LONG_TAIL).scenario)
    limit = f"orchestration.train_timeout_s={bounds.train_s(6) + 1}"
    once = "orchestration.max_train_attempts=1"
    question = Question(
        model="qwen2.5-1.5b",
        devices=8,
        batch=(16, 4),
        mean_length=500,
        max_length=6000,
        overrides=("rollout.slots=8", "efficiency.switch_s=0", limit, once),
    )
    plan = planned(question)
    assert any("failed and were left out" in note for note in plan.notes)
    assert plan.sync in plan.trials


def test_a_problem_that_cannot_run_at_all_is_refused() -> None:
    hasty = (*LONG_TAIL.overrides, "orchestration.train_timeout_s=0.001")
    question = Question(model="qwen2.5-1.5b", devices=4, batch=(4, 2), overrides=hasty)
    with pytest.raises(UserError, match="sync cannot run here"):
        planned(question)


# The reduced problem


def paper() -> Scenario:
    return without_own_sizes(load_scenario("paper-64"))


def test_peers_together_cost_what_they_cost_apart() -> None:
    real = paper()
    small = reduce(real, 20_000, 3)
    peers = small.peers
    assert small.reduced and peers > 1
    mine, theirs = (s.setup(ParadigmName.SYNC).params.costs() for s in (small.scenario, real))
    assert mine.decode.step_time(8, 16_000) == pytest.approx(
        theirs.decode.step_time(8 * peers, 16_000 * peers)
    )
    assert mine.kv_capacity_tokens == pytest.approx(theirs.kv_capacity_tokens / peers, abs=1)
    assert mine.install_time() == pytest.approx(theirs.install_time())
    assert mine.kv_transfer_time(1000) == pytest.approx(theirs.kv_transfer_time(1000 * peers))
    assert small.scenario.setup(ParadigmName.SYNC).params.slots == real.rollout.slots // peers


def test_a_reduced_step_takes_what_the_real_one_takes() -> None:
    real = paper()
    small = reduce(real, 10_000, 3)
    assert small.instances < small.real_instances
    devices = small.scenario.cluster.devices
    mine, theirs = Bounds(small.scenario), Bounds(real)
    assert mine.train_s(devices) == pytest.approx(theirs.train_s(real.cluster.devices), rel=0.03)
    half = small.instances // 2
    assert mine.rollout_s(half, 3) == pytest.approx(
        theirs.rollout_s(small.real_rollout(half, 8), 3), rel=0.03
    )


def test_a_small_problem_is_simulated_as_it_is() -> None:
    real = pose(LONG_TAIL).scenario
    small = reduce(real, 1e9, 3)
    assert not small.reduced and small.factor == 1.0
    assert "full size" in small.describe()


def test_experts_are_not_put_together() -> None:
    assert reduce(without_own_sizes(load_scenario("moe")), 1000, 3).peers == 1


def test_splits_of_large_clusters_are_whole_nodes() -> None:
    small = reduce(without_own_sizes(load_scenario("scale")), 10_000, 3)
    assert isinstance(small, Reduction)
    for rollout in range(1, small.instances):
        instances = small.real_rollout(rollout, 8)
        assert 1 <= instances < small.real_instances


def test_the_planned_scenario_can_be_simulated(long_tail: Plan, tmp_path: Path) -> None:
    path = tmp_path / "planned.toml"
    path.write_text(dump_toml(long_tail.scenario()))
    scenario = load_scenario(path)
    assert set(scenario.scenario.paradigms) == set(long_tail.comparison)
    assert scenario.cluster.train_devices == long_tail.best.train_devices
    assert scenario.setup(ParadigmName.ONE_STEP).params.train_devices == (
        long_tail.comparison["one_step"].train_devices
    )


def test_a_plan_says_what_was_checked(long_tail: Plan) -> None:
    said = " ".join(long_tail.notes)
    assert "one published testbed" in said and "tensor parallelism is free" in said
