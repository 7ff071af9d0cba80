"""The comparison of paradigms: what it asks for, and what it makes of the answers."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dora_rl.benchmarks import modes
from dora_rl.benchmarks.floors import Demand, Parts
from dora_rl.benchmarks.modes import Plan, Reading, Result, Split, measure
from dora_rl.benchmarks.modes_result import Limits
from dora_rl.benchmarks.reporting import Reporter
from dora_rl.benchmarks.training import train_once
from dora_rl.benchmarks.workloads import WORKLOADS, WorkloadName
from dora_rl.cli.bench import modes as cli_modes
from dora_rl.config import merged
from dora_rl.core.protocol.errors import UserError
from dora_rl.core.protocol.settings import ParadigmName
from dora_rl.engines.registry import EngineName
from dora_rl.runtime.execution import Run
from dora_rl.runtime.prepare.plan import read_config
from tests.benchmarks import stubs

SYNC, OURS = ParadigmName.SYNC, ParadigmName.MULTI_VERSION
LENGTHS = dict.fromkeys(
    (
        *("mean", "p99_over_mean", "max_over_mean", "max_over_mean_in_a_batch"),
        *("wait_mean_s", "wait_p99_s", "wait_max_s"),
    ),
    1.0,
)


def reading(tokens_per_s: float, rollout_only_s: float = 1.0) -> Reading:
    return Reading(tokens_per_s, 2.0, rollout_only_s, 0.5, 0.25, 1.0, 3.0, 20.0, 300.0, 0, "clean")


def fake_parts(config: Any, groups: int, cores: int, work: Path, reporter: Reporter) -> Parts:
    return Parts({1: 1e-4}, {1: 1e-4}, {1: 1e-3, 8: 2e-4})


def test_ratios_are_those_of_the_median_rounds() -> None:
    readings = {
        SYNC: [reading(90.0, 2.0), reading(100.0, 4.0), reading(500.0, 9.0)],
        OURS: [reading(250.0, 0.5), reading(10.0, 7.0), reading(900.0, 7.0)],
    }
    splits = {SYNC: Split(1, 2, 2, 8), OURS: Split(1, 1, 1, 8)}
    result = Result(Plan(paradigms=(SYNC, OURS)), {}, splits, readings)
    assert result.ratios() == {"multi_version/sync": {"tokens_per_s": 2.5, "rollout_only_s": 0.125}}
    data = result.to_json()
    assert data["modes"]["sync"]["tokens_per_s"] == 100.0
    assert data["modes"]["multi_version"]["tokens_per_s_of_rounds"] == [250.0, 10.0, 900.0]
    assert any("2.50 x tokens/s, 0.12 x rollout-only" in line for line in result.summary())


def test_without_ours_there_is_nothing_to_compare() -> None:
    result = Result(Plan(paradigms=(SYNC,)), {}, {SYNC: Split(1, 1, 1, 8)}, {SYNC: [reading(1.0)]})
    assert result.ratios() == {}
    assert result.summary()


def test_colocated_paradigms_get_every_core_and_the_others_share_them() -> None:
    plan = Plan(cores=4, slots=(32, 64, 128))
    assert plan.splits(SYNC) == [Split(1, 4, 4, 64), Split(4, 1, 4, 64), Split(4, 1, 1, 64)]
    assert all(s.instances * s.rollout_threads <= 4 for s in plan.splits(OURS))
    assert plan.splits(ParadigmName.ONE_STEP) == plan.splits(OURS)


def test_an_engine_of_one_version_has_an_instance_for_each_of_several() -> None:
    plan = Plan(cores=2, slots=(64,), engine=EngineName.VLLM)
    assert plan.splits(OURS) == [Split(2, 1, 1, 64), Split(4, 1, 1, 64)]
    assert plan.splits(SYNC) == Plan(cores=2, slots=(64,)).splits(SYNC)


def test_with_adapters_one_engine_serves_all_versions() -> None:
    plan = Plan(cores=2, slots=(64,), engine=EngineName.VLLM, lora=True)
    assert plan.splits(OURS) == Plan(cores=2, slots=(64,)).splits(OURS)
    config = read_config(plan.config(OURS, plan.splits(OURS)[0], 3))
    assert config.model.lora is not None
    assert config.version_slots == plan.max_staleness + 2  # the live ones and a spare


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("engine", list(EngineName))
@pytest.mark.parametrize("paradigm", list(ParadigmName))
def test_every_split_is_a_valid_configuration_with_the_same_slots(
    paradigm: ParadigmName, engine: EngineName, lora: bool
) -> None:
    plan = Plan(cores=2, engine=engine, lora=lora)
    for split in plan.splits(paradigm):
        config = read_config(plan.config(paradigm, split, 3))
        assert config.rollout.slots * config.runtime.instances == split.slots
        assert config.orchestration.paradigm is paradigm
        assert config.threads() == (split.rollout_threads, split.train_threads)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"steps": 0}, "--steps"),
        ({"rounds": 0}, "--rounds"),
        ({"search_steps": -1}, "--search-steps must be >= 0"),
        ({"warmup_steps": 16}, "--warmup-steps"),
        ({"paradigms": ()}, "--paradigms"),
        ({"slots": (1,), "cores": 2}, "--slots"),
    ],
)
def test_what_cannot_be_measured_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        Plan(**wrong)


@pytest.fixture
def fake_runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Runs that end at once; the paradigms that were asked for."""
    asked: list[str] = []

    def run(data: dict[str, Any], out: Path, reporter: Reporter, *, warmup_steps: int) -> Any:
        asked.append(data["orchestration"]["paradigm"])
        return SimpleNamespace(summary=SimpleNamespace(tokens_per_s=float(len(asked))))

    monkeypatch.setattr(modes, "train_once", run)
    monkeypatch.setattr(modes, "measure_parts", fake_parts)
    monkeypatch.setattr(Reading, "of", lambda run, warmup: reading(run.summary.tokens_per_s))
    return asked


def test_what_was_measured_can_be_shown_at_any_moment(fake_runs: list[str]) -> None:
    plan = Plan(paradigms=(SYNC, OURS), rounds=2, cores=2, slots=(8,))
    shown = [r.to_json() for r in stubs.interrupted_everywhere(partial(measure, plan))]
    assert (shown[0]["search"], shown[0]["modes"], shown[0]["lengths"]) == ({}, {}, None)
    assert shown[0]["expected"]["floor"]["limit_s"] > 0  # floors are there before any run
    assert next(len(report["search"]) for report in shown if report["search"]) == 1
    with_rounds = [report for report in shown if report["modes"]]
    assert list(with_rounds[0]["modes"]) == ["sync"] and with_rounds[0]["ratios"] == {}
    assert list(with_rounds[-1]["modes"]) == ["sync", "multi_version"]


def test_without_a_search_the_first_split_is_taken(fake_runs: list[str]) -> None:
    plan = Plan(paradigms=(SYNC, OURS), rounds=1, search_steps=0, cores=2)
    result = measure(plan)
    assert fake_runs == ["sync", "multi_version"]
    assert result.chosen == {name: plan.splits(name)[0] for name in (SYNC, OURS)}
    assert result.searched == {} and not any("search" in line for line in result.summary())


@pytest.mark.slow
def test_paradigms_are_searched_and_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the logical clock: what is asked for is run, whatever the machine does."""

    def inline(
        data: dict[str, Any], out: Path, reporter: Reporter, *, warmup_steps: int = 0
    ) -> Run:
        quick = {"runtime": {"kind": "inline"}, "rollout": {"deterministic": False}}
        return train_once(merged(data, quick), out, reporter, warmup_steps=warmup_steps)

    monkeypatch.setattr(modes, "train_once", inline)
    workload = WORKLOADS[WorkloadName.DEFAULT]
    plan = Plan(
        paradigms=(SYNC, OURS),
        steps=3,
        warmup_steps=1,
        rounds=1,
        search_steps=1,
        groups_per_step=4,
        group_size=2,
        slots=(8,),
        workload=replace(workload, options={"max_terms": 9, "tail": 1.2}),
        cores=2,
    )
    result = measure(plan)
    assert [len(tried) for tried in result.searched.values()] == [3, 3]
    assert all(result.median(name).tokens_per_s > 0 for name in (SYNC, OURS))
    assert all(result.median(name).audit == "clean" for name in (SYNC, OURS))
    assert result.median(SYNC).max_staleness == 0
    assert 0 < result.median(OURS).max_staleness <= 3
    # On a clock that counts steps of engines, not waiting for the tail must pay.
    assert result.ratios()["multi_version/sync"]["tokens_per_s"] > 1


def test_the_command_line_has_the_same_defaults() -> None:
    shown = {option.name: option.default for option in cli_modes.params}
    plan = Plan()
    assert shown["paradigms"] == ",".join(plan.paradigms)
    assert shown["workload"] == plan.workload.name
    for name in ("rounds", "search_steps"):
        assert shown[name] == getattr(plan, name), name
    of_workload = ("steps", "warmup_steps", "max_staleness", "slots", "group_size")
    for name in of_workload:
        assert not isinstance(shown[name], int | str)
        assert getattr(plan, name) == getattr(plan.workload, name), name
    choices = next(option for option in cli_modes.params if option.name == "workload").type
    assert list(choices.choices) == list(WorkloadName)  # type: ignore[attr-defined]


def test_a_row_has_its_floor_and_its_share_of_the_limit() -> None:
    limits = Limits(fake_parts({}, 1, 1, Path(), Reporter()), Demand(300, 300, 100, 0.0), LENGTHS)
    readings = {SYNC: [reading(100.0)], OURS: [reading(300.0)]}
    splits = {SYNC: Split(1, 2, 2, 8), OURS: Split(1, 1, 1, 8)}
    result = Result(Plan(paradigms=(SYNC, OURS), cores=2), {}, splits, readings, limits)
    data = result.to_json()
    # A step of 2 s trains 200 tokens: 0.02 core-seconds, and 0.04 of decoding them.
    sync = data["modes"]["sync"]
    assert sync["limit_s"] == pytest.approx(0.03)
    assert sync["share_of_limit"] == pytest.approx(0.015)
    assert sync["floor_s"] == pytest.approx(0.02 + 0.1)  # training, then the tail of 100 tokens
    assert sync["most_share_of_limit"] == pytest.approx(0.25)
    assert data["modes"]["multi_version"]["share_of_limit"] == pytest.approx(0.045)
    assert sync["parts"]["decode_core_s"] == pytest.approx(0.04)
    assert any("of limit" in line for line in result.summary())


def test_an_engine_whose_parts_nobody_measures_has_no_floor(fake_runs: list[str]) -> None:
    plan = Plan(paradigms=(SYNC,), rounds=1, search_steps=0, cores=2, engine=EngineName.VLLM)
    result = measure(plan)
    assert result.limits is None and result.shares(SYNC) == {}
    assert result.to_json()["expected"] is None and result.summary()


def test_a_busy_machine_is_named(fake_runs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    busy = Parts({1: 3e-4}, {1: 1e-4}, {1: 1e-3})
    monkeypatch.setattr(modes, "measure_parts", lambda *_: busy)
    result = measure(Plan(paradigms=(SYNC,), rounds=1, search_steps=0, cores=2))
    assert "NOT QUIET" in result.summary()[0] and "3.0 x" in result.summary()[0]


def test_the_size_is_corrected_by_what_synchronous_steps_take_besides(
    fake_runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a step takes besides its parts is rollout too: more prompts keep its share."""

    def groups(rollout_only_s: float) -> int:
        monkeypatch.setattr(Reading, "of", lambda run, warmup: reading(1.0, rollout_only_s))
        plan = Plan.of(WorkloadName.REASONING, paradigms=(SYNC,), rounds=1, search_steps=0, cores=2)
        return measure(plan).plan.groups_per_step

    assert 8 <= groups(0.5) < groups(5.0) < groups(20.0)
    assert set(fake_runs) == {"sync"}


@pytest.mark.parametrize(("rollout_only_s", "missed"), [(1.4, False), (1.0, True), (1.6, True)])
def test_a_share_of_rollout_outside_its_band_is_named(rollout_only_s: float, missed: bool) -> None:
    plan = Plan.of(WorkloadName.REASONING, paradigms=(SYNC,), cores=2)
    readings = {SYNC: [reading(1.0, rollout_only_s)]}  # of steps of 2 s
    result = Result(plan, {}, {SYNC: Split(1, 2, 2, 8)}, readings)
    assert result.to_json()["sync_rollout_share"] == pytest.approx(rollout_only_s / 2)
    assert ("MISSED" in result.summary()[-1]) == missed
