"""Plans: the choice is the best simulated, the front is undominated, sync where it should be."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dora_rl.config import dump_toml, validate
from dora_rl.core.errors import UserError
from dora_rl.core.settings import ParadigmName
from dora_rl.simulator.planning import Plan, Problem, Question, make_plan, pose, search
from dora_rl.simulator.planning.bounds import Bounds
from dora_rl.simulator.planning.reduction import Reduction, reduce, without_own_sizes
from dora_rl.simulator.planning.shapes import SHAPES
from dora_rl.simulator.planning.verdict import pareto
from dora_rl.simulator.scenarios import Scenario, load_scenario
from dora_rl.simulator.simulate import Result, simulate

LONG_TAIL = Question(
    model="qwen2.5-1.5b",
    devices=8,
    batch=(16, 4),
    mean_length=500,
    max_length=6000,
    overrides=("cluster.slots=8", "efficiency.switch_s=2"),
)
ALL_ALIKE = Question(
    model="qwen2.5-1.5b",
    devices=2,
    batch=(16, 4),
    mean_length=500,
    length_sigma=0,
    overrides=("cluster.slots=8", "efficiency.switch_s=0"),
)


def frozen() -> float:
    """A clock that never lets the budget end."""
    return 0.0


def planned(question: Question, **options: Any) -> Plan:
    return make_plan(pose(question), clock=frozen, **options)


@pytest.fixture(scope="module")
def long_tail() -> Plan:
    return planned(LONG_TAIL)


@pytest.fixture(scope="module")
def all_alike() -> Plan:
    return planned(ALL_ALIKE)


# The choice


def test_the_recommended_is_the_best_of_those_simulated(long_tail: Plan) -> None:
    assert long_tail.pays and long_tail.cut is None
    assert long_tail.best.paradigm == ParadigmName.MULTI_VERSION
    fastest = max(trial.tokens_per_s for trial in long_tail.trials)
    near = [t for t in long_tail.trials if t.tokens_per_s >= (1 - search.TIE) * fastest]
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
    assert set(long_tail.comparison) == {"sync", "one_step", "multi_version"}


def test_the_front_has_no_dominated_member_and_misses_none(long_tail: Plan) -> None:
    def beats(a: search.Trial, b: search.Trial) -> bool:
        ages = a.summary.mean_staleness, b.summary.mean_staleness
        return (
            a.tokens_per_s >= b.tokens_per_s
            and ages[0] <= ages[1]
            and (a.tokens_per_s > b.tokens_per_s or ages[0] < ages[1])
        )

    front = long_tail.front
    assert len(front) >= 2
    assert not any(beats(a, b) for a in long_tail.trials for b in front)
    left_out = [t for t in long_tail.trials if t not in front]
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
            overrides=("cluster.slots=4", "efficiency.switch_s=0", *tiny),
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


def interrupt_after(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Iterator[int] = iter(range(1000))

    def run(*args: Any) -> Result:
        if next(calls) == count:
            raise KeyboardInterrupt
        return simulate(*args)

    monkeypatch.setattr(search, "simulate", run)


def test_an_interruption_leaves_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_after(4, monkeypatch)
    plan = planned(LONG_TAIL)
    assert plan.cut == "interrupted" and len(plan.trials) == 4


def test_an_interruption_before_any_result_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_after(0, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        planned(LONG_TAIL)


def test_candidates_that_fail_are_left_out_and_counted() -> None:
    # Shared devices train fast enough, fewer do not.
    bounds = Bounds(pose(LONG_TAIL).scenario)
    limit = f"orchestration.train_timeout_s={bounds.train_s(6) + 2}"
    once = "orchestration.max_train_attempts=1"
    question = Question(
        model="qwen2.5-1.5b",
        devices=8,
        batch=(16, 4),
        mean_length=500,
        max_length=6000,
        overrides=("cluster.slots=8", "efficiency.switch_s=0", limit, once),
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
    assert small.scenario.setup(ParadigmName.SYNC).params.slots == real.cluster.slots // peers


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


# The question


def test_a_measured_train_step_sets_the_efficiency() -> None:
    question = Question(scenario="paper-64", train_step_minutes=9.5)
    problem = pose(question)
    bounds = Bounds(problem.scenario)
    train_s = bounds.train_s(64) - bounds.publish_s(64)
    assert train_s == pytest.approx(9.5 * 60)
    assert any("as the measured step implies" in note for note in problem.notes)


def test_flags_change_a_scenario() -> None:
    question = Question(
        scenario="paper-64", devices=32, device="H100", model="llama-3-8b", batch=(64, 8), seed=5
    )
    scenario = pose(question).scenario
    assert scenario.cluster.devices == 32
    assert scenario.model == SHAPES["llama-3-8b"]
    assert scenario.orchestration.groups_per_step == 64
    assert scenario.orchestration.group_size == 8
    assert scenario.scenario.seed == 5
    assert scenario.cluster.slots == load_scenario("paper-64").cluster.slots


def test_length_flags_keep_what_they_do_not_say() -> None:
    lengths = pose(Question(scenario="paper-64", mean_length=1000)).scenario.workload
    assert lengths.response_tokens.upper == 30_000
    assert lengths.mean_response_tokens() == pytest.approx(1000)
    assert lengths.prompt_tokens == load_scenario("paper-64").workload.prompt_tokens


def test_measured_lengths(tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("10\n20\n60\n")
    workload = pose(Question(scenario="default", lengths=path, max_length=50)).scenario.workload
    assert workload.mean_response_tokens() == pytest.approx(80 / 3)


def test_a_bare_number_takes_the_nearest_shape() -> None:
    problem = pose(Question(model="30e9", devices=64))
    assert problem.scenario.model.parameters == 30e9
    assert problem.scenario.model.layers == SHAPES["qwen2.5-32b"].layers
    assert any("qwen2.5-32b" in note for note in problem.notes)


def test_a_file_of_model_figures(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        "[model]\nparameters = 2e9\nlayers = 20\nheads = 8\nkv_heads = 2\nhead_dim = 64\n"
    )
    assert pose(Question(model=str(path), devices=8)).scenario.model.layers == 20


def test_what_is_derived_fits_into_memory() -> None:
    for name in SHAPES:
        scenario = pose(Question(model=name, device="H800", devices=64)).scenario
        costs = scenario.setup(ParadigmName.SYNC).params.costs()
        weights = scenario.model.weight_bytes / scenario.cluster.devices_per_instance
        assert weights <= 0.5 * 0.9 * 80e9
        assert costs.kv_capacity_tokens > scenario.workload.longest_tokens
        assert 1 <= scenario.cluster.slots <= 256


def test_sizes_of_single_paradigms_are_set_aside() -> None:
    plain = load_scenario("default").model_dump(mode="json", exclude_none=True)
    plain["paradigm"] = {
        "one_step": {"cluster": {"train_devices": 7}, "efficiency": {"switch_s": 1.0}}
    }
    scenario = without_own_sizes(validate(Scenario, plain, "test"))
    own = scenario.paradigm[ParadigmName.ONE_STEP]
    assert own.cluster == {} and own.efficiency == {"switch_s": 1.0}


def test_nothing_is_assumed_silently() -> None:
    problem = pose(Question(model="qwen2.5-7b", devices=8))
    assert isinstance(problem, Problem)
    said = " ".join(problem.notes)
    assert "device(s)" in said and "slots" in said
