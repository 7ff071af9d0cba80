"""What a plan is asked: flags and scenarios as one problem, and what was assumed in it."""

import re
from pathlib import Path
from typing import Any

import pytest

from dora_rl.config import validate
from dora_rl.core.protocol.errors import UserError
from dora_rl.core.protocol.settings import ParadigmName
from dora_rl.simulator.cost_parameters import Model
from dora_rl.simulator.planning import Problem, Question, pose
from dora_rl.simulator.planning.bounds import Bounds
from dora_rl.simulator.planning.reduction import without_own_sizes
from dora_rl.simulator.planning.shapes import SHAPES, model_named
from dora_rl.simulator.scenarios import Scenario, foreign_constants, load_scenario


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
    assert scenario.run.seed == 5
    assert scenario.rollout.slots == load_scenario("paper-64").rollout.slots


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
    problem = pose(Question(model="30e9", devices=64, batch=(64, 8)))
    assert problem.scenario.model.parameters == 30e9
    assert problem.scenario.model.heads == SHAPES["qwen3-32b"].heads
    assert any("qwen3-32b" in note for note in problem.notes)


def test_a_file_of_model_figures(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        "[model]\nparameters = 2e9\nlayers = 20\nheads = 8\nkv_heads = 2\nhead_dim = 64\n"
    )
    assert pose(Question(model=str(path), devices=8, batch=(64, 8))).scenario.model.layers == 20


def test_what_is_derived_fits_into_memory() -> None:
    for name in SHAPES:
        question = Question(model=name, device="H800", devices=64, batch=(64, 8))
        scenario = pose(question).scenario
        costs = scenario.setup(ParadigmName.SYNC).params.costs()
        weights = scenario.model.weight_bytes / scenario.cluster.devices_per_instance
        assert weights <= 0.5 * 0.9 * 80e9
        assert costs.kv_capacity_tokens > scenario.workload.longest_tokens
        assert 1 <= scenario.rollout.slots <= 256


def test_sizes_of_single_paradigms_are_set_aside() -> None:
    plain = load_scenario("default").model_dump(mode="json", exclude_none=True)
    plain["paradigm"] = {
        "one_step": {"cluster": {"train_devices": 7}, "efficiency": {"switch_s": 1.0}}
    }
    scenario = without_own_sizes(validate(Scenario, plain, "test"))
    own = scenario.paradigm[ParadigmName.ONE_STEP]
    assert own.cluster == {} and own.efficiency == {"switch_s": 1.0}


def test_nothing_is_assumed_silently() -> None:
    problem = pose(Question(model="qwen2.5-7b", devices=8, batch=(64, 8)))
    assert isinstance(problem, Problem)
    said = " ".join(problem.notes)
    assert "device(s)" in said and "slots" in said
    assert "lengths of responses are assumed: 2,400 tokens" in said
    assert "training is assumed to reach 35% of the peak" in said
    told = Question(
        model="qwen2.5-7b", devices=8, batch=(64, 8), mean_length=500, train_step_minutes=3
    )
    assert "assumed" not in " ".join(pose(told).notes)


def test_the_batch_is_asked_for() -> None:
    with pytest.raises(UserError, match="--batch is missing"):
        pose(Question(model="qwen2.5-7b", devices=8))
    settings = pose(Question(model="qwen2.5-7b", devices=8, batch=(32, 4))).scenario.orchestration
    assert (settings.groups_per_step, settings.group_size) == (32, 4)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("qwen3-8b", "qwen3-8b"),
        ("Qwen3-8B", "qwen3-8b"),
        ("Qwen/Qwen3-8B-Base", "qwen3-8b"),
        ("Qwen/Qwen3-4B-Instruct-2507", "qwen3-4b"),
        ("Qwen/Qwen2.5-Math-7B-Instruct", "qwen2.5-7b"),
        ("meta-llama/Meta-Llama-3-8B", "llama-3-8b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", "qwen2.5-32b"),
    ],
)
def test_models_are_known_by_the_names_that_people_use(name: str, shape: str) -> None:
    table, note = model_named(name)
    assert validate(Model, table, "test") == SHAPES[shape] and note is None


def test_the_size_in_a_name_is_the_size_of_the_shape() -> None:
    checked = 0
    for name, shape in SHAPES.items():
        found = re.search(r"-(\d+(?:\.\d+)?)([bm])(-a(\d+)b)?$", name)
        if found is None:
            continue
        unit = 1e9 if found[2] == "b" else 1e6
        assert shape.parameters == pytest.approx(float(found[1]) * unit, rel=0.25), name
        if found[4] is not None:
            assert shape.active == pytest.approx(float(found[4]) * 1e9, rel=0.25), name
        checked += 1
    assert checked > 30


def test_constants_of_another_machine_are_named() -> None:
    def warning(**said: Any) -> str:
        return " ".join(pose(Question(scenario="paper-64", **said)).notes)

    assert "do not transfer" not in warning(devices=32)
    for said in ({"model": "llama-3-8b"}, {"device": "A100"}, {"devices_per_instance": 4}):
        assert "do not transfer: efficiency.compute_efficiency, " in warning(**said)
    own = tuple(f"efficiency.{key}=1" for key, _ in load_scenario("paper-64").efficiency)
    assert "do not transfer" not in warning(model="llama-3-8b", overrides=own)
    changed = load_scenario("default", ["cluster.device=H100"])
    assert foreign_constants("default", changed) is None
