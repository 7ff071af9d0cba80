"""Scenario files: what ships is sound, and what is wrong is refused in one line."""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dora_rl.config import dump_toml, validate
from dora_rl.config.shape import keys_of, tables
from dora_rl.core.protocol.errors import UserError
from dora_rl.core.protocol.paradigms import PARADIGMS
from dora_rl.core.protocol.settings import ParadigmName
from dora_rl.runtime.config import RunConfig
from dora_rl.simulator.planning import Question, make_plan, pose
from dora_rl.simulator.scenarios import (
    Scenario,
    list_scenarios,
    load_scenario,
    scenario_names,
)

SHIPPED = ("default", "agentic", "moe", "paper-128", "paper-64", "scale")


def test_what_ships() -> None:
    assert tuple(scenario_names()) == SHIPPED
    assert [listing.name for listing in list_scenarios()] == list(SHIPPED)
    assert all(listing.title for listing in list_scenarios())


@pytest.mark.parametrize("name", SHIPPED)
def test_every_scenario_holds_for_every_paradigm(name: str) -> None:
    scenario = load_scenario(name, paradigms=list(ParadigmName))
    lengths = set()
    for paradigm in ParadigmName:
        setup = scenario.setup(paradigm)
        assert setup.settings.paradigm is paradigm
        assert setup.params.devices == scenario.cluster.devices
        assert setup.params.colocated == PARADIGMS[paradigm].colocated
        lengths.add(tuple(setup.sampler().trajectory(g, 0) for g in range(20)))
    assert len(lengths) == 1, "every paradigm meets the same lengths"


def test_scale_has_half_a_million_trajectories_in_flight() -> None:
    scenario = load_scenario("scale")
    assert scenario.scenario.paradigms == (ParadigmName.MULTI_VERSION,)
    assert scenario.run.steps >= 3
    setup = scenario.setup(ParadigmName.MULTI_VERSION)
    assert (setup.params.instances, setup.params.devices_per_instance) == (8192, 8)
    settings = setup.settings
    admitted = (settings.max_staleness + 1) * settings.groups_per_step * settings.group_size
    assert min(admitted, setup.params.instances * setup.params.slots) >= 500_000


@pytest.mark.parametrize("devices", [64, 128])
def test_the_paper_s_testbed(devices: int) -> None:
    scenario = load_scenario(f"paper-{devices}")
    assert scenario.cluster.devices == devices
    settings = scenario.orchestration
    assert (settings.groups_per_step, settings.group_size) == (512, 16)
    assert settings.max_staleness == 3
    assert scenario.cluster.updates_per_step == 16
    assert scenario.workload.mean_response_tokens() == pytest.approx(2400, rel=0.01)
    assert scenario.workload.response_tokens.upper == 30_000


def test_colocated_paradigms_have_every_device_and_the_others_what_training_leaves() -> None:
    scenario = load_scenario("default", ["cluster.devices=40", "cluster.train_devices=8"])
    sync, ours = (scenario.setup(p).params for p in ("sync", "multi_version"))  # type: ignore[arg-type]
    assert (sync.instances, sync.train_devices) == (40, 0)
    assert (ours.instances, ours.train_devices) == (32, 8)


def test_a_paradigm_may_differ_in_its_own_section() -> None:
    scenario = load_scenario(
        "default",
        [
            "paradigm.one_step.cluster.train_devices=16",
            "paradigm.one_step.orchestration.rebalance_period_s=20.0",
        ],
    )
    one_step = scenario.setup(ParadigmName.ONE_STEP)
    assert one_step.params.train_devices == 16
    assert one_step.settings.rebalance_period_s == 20.0
    other = scenario.setup(ParadigmName.IN_FLIGHT)
    assert other.params.train_devices == scenario.cluster.train_devices != 16


def test_a_resolved_scenario_is_a_scenario(tmp_path: Path) -> None:
    overrides = ["rollout.slots=5", "paradigm.one_step.cluster.train_devices=16"]
    scenario = load_scenario("agentic", overrides, seed=7)
    path = tmp_path / "resolved.toml"
    path.write_text(dump_toml(scenario))
    assert load_scenario(path) == scenario
    assert tomllib.loads(path.read_text())["run"]["seed"] == 7


def test_files_of_lengths_are_found_beside_the_scenario(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = dump_toml(load_scenario("default"))
    data = tomllib.loads(text)
    del data["workload"]
    import tomli_w

    (tmp_path / "lengths.txt").write_text("100\n200\n300\n")
    path = tmp_path / "mine.toml"
    path.write_text(
        tomli_w.dumps(data)
        + '[workload]\nresponse_tokens = { kind = "empirical", path = "lengths.txt" }\n'
    )
    monkeypatch.chdir("/")
    assert load_scenario(path).workload.mean_response_tokens() == pytest.approx(200)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("defalt", "no such scenario: `defalt`. Did you mean `default`? Known: default, agentic"),
        ("zzz", "no such scenario: `zzz`. Known: default, agentic"),
        ("missing.toml", "no such file: `missing.toml`"),
    ],
)
def test_unknown_names(name: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        load_scenario(name)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("orchestration.max_staleness=-1", "orchestration.max_staleness must be >= 0: `-1`."),
        ("orchestration.max_stalenes=1", "Did you mean `orchestration.max_staleness`?"),
        ("orchestration.paradigm=sync", "orchestration.paradigm is not for scenarios: `sync`."),
        ("cluster.devices=0", "cluster.devices must be >= 1: `0`."),
        ("cluster.train_devices=96", "cluster.train_devices must be < cluster.devices (96): `96`."),
        ("cluster.train_devices=0", "cluster.train_devices must be >= 1: `0`."),
        ("cluster.devices_per_instance=128", "cluster.devices must be >= cluster.devices_per_inst"),
        ("cluster.devices_per_instance=64", "must be a multiple of cluster.devices_per_instance"),
        ("cluster.device=H900", "cluster.device: unknown device: `H900`."),
        ("rollout.slots=many", "rollout.slots must be an integer: `many`."),
        ("run.steps=3", "scenario.warmup_steps must be < run.steps (3): `3`."),
        ("cluster.slots=3", "unknown key: `cluster.slots`. Did you mean `rollout.slots`"),
        ("scenario.steps=3", "unknown key: `scenario.steps`. Did you mean `run.steps`"),
        ("train.minibatches=3", "`train.minibatches`. Here it is `cluster.updates_per_step`."),
        ("run.save_every_s=3", "`run.save_every_s`. Here it is `cluster.save_period_s`."),
        ("rollout.max_tokens=9", "`rollout.max_tokens`. Here it is `workload.response_tokens`."),
        ("orchestration.version_slots=2", "is rollout.version_slots in a scenario: `2`."),
        ("scenario.paradigms=[]", "scenario.paradigms must be of length >= 1: `[]`."),
        ('scenario.paradigms=["sync","sync"]', "scenario.paradigms must differ: `sync, sync`."),
        ("model.parameters=70e9", "cluster: no memory left for KV"),
        ("workload.response_tokens.max=2000000", "the longest trajectory must fit"),
        ("paradigm.one_step.cluster.train_devices=96", "in [paradigm.one_step]: cluster.train_dev"),
        ("paradigm.one_step.cluster.slot=3", "in [paradigm.one_step]: unknown key: `cluster.slot`"),
        ("paradigm.one_stop.rollout.slots=3", "one_step"),
    ],
)
def test_what_contradicts_itself_is_refused(override: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        load_scenario("default", [override])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_paradigm_that_is_not_run_is_not_checked() -> None:
    override = ["cluster.train_devices=96"]
    assert load_scenario("default", override, paradigms=["sync", "partial"])


def test_unknown_paradigms_are_refused() -> None:
    with pytest.raises(UserError, match=r"scenario\.paradigms\.1 must be one of .*multi_version"):
        load_scenario("default", paradigms=["sync", "multiversion"])


# One section for each key, here and in a run

APART = {  # the same word for other things
    "alpha": "of a distribution, and of an adapter",
    "kind": "of a distribution, and of a runtime",
    "path": "of measured lengths, and of a model",
    "paradigm": "a table of what differs, and one of them",
    "prompts": "how many there are, and where they come from",
    "warmup_steps": "not measured, and of the learning rate",
}


def places(model: Any, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Every key of a configuration, and its section."""
    for table in tables(model, None):
        for name, key in keys_of(table).items():
            if tables(key.type, None):
                yield from places(key.type, (*prefix, name))
            else:
                yield name, prefix


def test_a_key_of_scenarios_and_of_runs_is_in_one_section() -> None:
    scenario: dict[str, set[tuple[str, ...]]] = {}
    run: dict[str, set[tuple[str, ...]]] = {}
    for found, model in ((scenario, Scenario), (run, RunConfig)):
        for name, section in places(model):
            found.setdefault(name, set()).add(section)
    both = {name for name in scenario.keys() & run.keys() if name not in APART}
    assert {"slots", "version_slots", "steps", "seed", "reward_workers"} <= both
    assert {name: scenario[name] ^ run[name] for name in both if scenario[name] != run[name]} == {}


@pytest.mark.parametrize(
    ("key", "here"),
    [
        ("cluster.slots", "rollout.slots"),
        ("cluster.report_period_s", "runtime.report_period_s"),
        ("cluster.updates_per_step", "train.minibatches"),
        ("cluster.save_period_s", "run.save_every_s"),
        ("scenario.steps", "run.steps"),
    ],
)
def test_a_run_names_its_own_key_for_one_of_a_scenario(key: str, here: str) -> None:
    section, name = key.split(".")
    with pytest.raises(UserError) as caught:
        validate(RunConfig, {"model": {"path": "x"}, section: {name: 1}}, "run.toml")
    assert str(caught.value) == f"unknown key: `{key}`. Here it is `{here}`."


def test_settings_of_a_plan_are_settings_of_a_run() -> None:
    question = Question(
        model="qwen2.5-1.5b", devices=2, batch=(4, 2), mean_length=500, max_length=1000
    )
    plan = make_plan(pose(question), budget_s=1e-9)
    assert plan.pays
    settings = {name: own for name, own in plan.settings.items() if name != "cluster"}
    assert set(settings) == {"orchestration", "rollout"}
    run = validate(RunConfig, {"model": {"path": "x"}, **settings}, "run.toml")
    assert run.settings().version_slots == plan.best.candidate.version_slots
