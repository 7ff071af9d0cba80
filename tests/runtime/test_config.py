"""The configuration of a run: what it refuses, and what it derives."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_rl.config import dump_toml
from dora_rl.core.protocol.errors import UserError
from dora_rl.core.protocol.settings import ParadigmName, Settings
from dora_rl.engines import registry
from dora_rl.engines.speculation import Speculation
from dora_rl.runtime.config import RunConfig, Threads
from dora_rl.runtime.prepare.plan import read_config
from dora_rl.runtime.workers.engines import sampling_of
from tests.runtime.harness import settings


def config(**sections: dict[str, Any]) -> RunConfig:
    return read_config({"model": {"path": "model"}, **sections})


REFUSED: dict[str, tuple[dict[str, dict[str, Any]], list[str]]] = {
    "no model": ({"model": {}}, ["model.path"]),
    "empty model": ({"model": {"path": ""}}, ["model.path"]),
    "unknown section": ({"rolout": {}}, ["rolout", "rollout"]),
    "unknown key": ({"rollout": {"slot": 3}}, ["rollout.slot", "slots"]),
    "elastic instances that nobody wakes": (
        {"runtime": {"elastic_instances": 2}},
        ["runtime.elastic_instances", "`2`", "orchestration.elastic"],
    ),
    "roles that change without devices": (
        {
            "runtime": {"kind": "ray", "ray": {"trainer": {"cpus": 0}}},
            "orchestration": {"elastic": "rollout"},
        },
        ["orchestration.elastic", "`runtime.ray.trainer.cpus = 0`", "`off`"],
    ),
    "roles that change on a node's GPU": (
        {
            "runtime": {"kind": "ray", "ray": {"trainer": {"gpus": 1}}},
            "orchestration": {"elastic": "rollout"},
        },
        ["orchestration.elastic", "`rollout`", "GPU"],
    ),
    "roles that change on a GPU": (
        {"train": {"device": "cuda"}, "orchestration": {"elastic": "both"}},
        ["orchestration.elastic", "`both`", "GPU"],
    ),
    "no slots": ({"rollout": {"slots": 0}}, ["rollout.slots", "`0`"]),
    "no versions": ({"rollout": {"version_slots": 0}}, ["rollout.version_slots", "`0`"]),
    "no KV": ({"rollout": {"kv_budget_tokens": 0}}, ["rollout.kv_budget_tokens", "`0`"]),
    "odd KV": ({"rollout": {"kv_dtype": "int3"}}, ["rollout.kv_dtype", "`int3`", "bfloat16"]),
    "no chunk": ({"rollout": {"prefill_chunk": 0}}, ["rollout.prefill_chunk", "`0`"]),
    "no tokens": ({"rollout": {"max_tokens": 0}}, ["rollout.max_tokens", "`0`"]),
    "greedy": ({"rollout": {"temperature": 0}}, ["rollout.temperature", "`0`"]),
    "negative top_k": ({"rollout": {"top_k": -1}}, ["rollout.top_k", "`-1`"]),
    "no top_p": ({"rollout": {"top_p": 0}}, ["rollout.top_p", "`0`"]),
    "large min_p": ({"rollout": {"min_p": 2}}, ["rollout.min_p", "`2`"]),
    "odd device": ({"train": {"device": "tpu"}}, ["train", "device", "`tpu`", "Use `auto`"]),
    "odd engine device": ({"rollout": {"device": "gpu"}}, ["rollout", "`gpu`", "Use `auto`"]),
    "the embedded engine on a GPU": (
        {"rollout": {"device": "cuda:0"}},
        ["rollout.device", "embedded engine is for CPUs", "`cuda:0`", "Use `auto` or `cpu`"],
    ),
    "no duration": ({"runtime": {"inline": {"step_s": 0}}}, ["runtime.inline.step_s", "`0`"]),
    "odd runtime": ({"runtime": {"kind": "cloud"}}, ["runtime.kind", "`cloud`", "inline"]),
    "no instances": ({"runtime": {"instances": 0}}, ["runtime.instances", "`0`"]),
    "no threads": ({"runtime": {"train_threads": 0}}, ["runtime.train_threads", "`0`"]),
    "no heartbeat": ({"runtime": {"report_period_s": 0}}, ["runtime.report_period_s", "`0`"]),
    "rare heartbeats": (
        {"runtime": {"report_period_s": 31.0}},
        ["report_period_s", "heartbeat_timeout_s (60.0)", "`31.0`", "Use 30.0 or less"],
    ),
    "no patience": ({"runtime": {"start_timeout_s": 0}}, ["runtime.start_timeout_s", "`0`"]),
    "no steps": ({"run": {"steps": 0}}, ["run.steps", "`0`"]),
    "negative seed": ({"run": {"seed": -1}}, ["run.seed", "`-1`"]),
    "vast seed": ({"run": {"seed": 2**63}}, ["run.seed", f"`{2**63}`"]),
    "no checkpoint": ({"run": {"keep_checkpoints": 0}}, ["run.keep_checkpoints", "`0`"]),
    "steps twice": (
        {"orchestration": {"max_steps": 7}, "run": {"steps": 3}},
        ["orchestration.max_steps", "`7`", "run.steps (3)", "Remove it"],
    ),
    "slots twice": (
        {"orchestration": {"version_slots": 2}},
        ["orchestration.version_slots", "`2`", "rollout.version_slots", "Set it there"],
    ),
    "negative K": (
        {"orchestration": {"max_staleness": -1}},
        ["max_staleness must be >= 0", "`-1`", "Use 0"],
    ),
    "no such paradigm": ({"orchestration": {"paradigm": "magic"}}, ["paradigm", "`magic`", "sync"]),
    "shallow": (
        {"orchestration": {"pipeline_depth": 1, "groups_per_step": 4}},
        ["pipeline_depth", "groups_per_step (4)", "`1`"],
    ),
    "nobody to compare with": ({"orchestration": {"group_size": 1}}, ["group_size", "`1`"]),
    "text for a number": ({"run": {"steps": "many"}}, ["run.steps", "`many`"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_key_value_and_fix(name: str) -> None:
    sections, said = REFUSED[name]
    with pytest.raises(UserError) as refusal:
        config(**sections)
    message = str(refusal.value)
    assert "\n" not in message
    for words in said:
        assert words in message, message


def test_the_engine_says_on_what_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which device is refused is its entry's, not the configuration's."""
    entry = registry._Entry("dora_rl.engines.embedded.create", gpu=True)
    monkeypatch.setattr(registry, "_ENTRIES", dict.fromkeys(registry.EngineName, entry))
    assert config(rollout={"device": "cuda:0"}).rollout.device == "cuda:0"


def test_what_may_not_be_meant_is_told() -> None:
    assert not config().warnings()
    for key, value in (("top_p", 0.9), ("top_k", 5), ("min_p", 0.1)):
        assert any("biased" in line for line in config(rollout={key: value}).warnings())


@pytest.mark.parametrize(
    ("paradigm", "slots", "colocated"),
    [
        ("sync", 1, True),
        ("one_step", 2, False),
        ("partial", 1, True),
        ("in_flight", 1, False),
        ("multi_version", 6, False),
    ],
)
def test_an_engine_has_room_for_what_may_be_live(
    paradigm: str, slots: int, colocated: bool
) -> None:
    chosen = config(orchestration={"paradigm": paradigm, "max_staleness": 5}, run={"steps": 9})
    core = chosen.settings()
    assert (core.paradigm, core.version_slots, core.max_steps) == (paradigm, slots, 9)
    assert chosen.colocated == colocated
    assert core.max_staleness == 5


def test_the_user_knows_better_how_many_versions_fit() -> None:
    many = {"max_staleness": 100}
    assert config(orchestration=many).settings().version_slots == 8
    one = config(orchestration=many, rollout={"version_slots": 1})
    assert one.settings().version_slots == 1


@pytest.mark.parametrize(
    ("kind", "wish", "exact"),
    [
        ("inline", None, True),
        ("local", None, False),
        ("inline", False, False),
        ("local", True, True),
    ],
)
def test_inline_is_exact_unless_told_otherwise(kind: str, wish: bool | None, exact: bool) -> None:
    rollout = {} if wish is None else {"deterministic": wish}
    assert config(runtime={"kind": kind}, rollout=rollout).deterministic is exact


# Threads


@given(
    cores=st.integers(1, 64),
    instances=st.integers(1, 16),
    paradigm=st.sampled_from(list(ParadigmName)),
)
def test_processes_that_run_at_once_share_the_cores(
    cores: int, instances: int, paradigm: ParadigmName
) -> None:
    chosen = config(runtime={"instances": instances}, orchestration={"paradigm": str(paradigm)})
    rollout, train = chosen.threads(cores)
    assert min(rollout, train) >= 1
    if chosen.colocated:
        assert train == cores
        assert rollout == max(1, cores // instances)
    elif cores >= instances * 2:
        assert rollout * instances + train <= cores
        assert cores - rollout * instances - train < instances  # as few as can be are left over
    else:
        assert rollout == 1 or rollout * instances + train <= cores


def test_threads_are_taken_as_given() -> None:
    runtime = {"rollout_threads": 3, "train_threads": 5}
    assert config(runtime=runtime).threads(64) == Threads(3, 5)
    assert config(train={"threads": 7}).threads(8) == Threads(1, 7)
    both = config(train={"threads": 7}, runtime={"train_threads": 2})
    assert both.threads(8) == Threads(6, 2)
    assert [Threads(rollout, 1).evaluation for rollout in (1, 2, 3, 8)] == [1, 1, 1, 4]


# Sampling


def test_an_evaluation_samples_at_its_own_temperature() -> None:
    chosen = config(
        rollout={"temperature": 0.7, "max_tokens": 9, "stop": ["x"]}, task={"eval_temperature": 0.2}
    )
    training, evaluating = sampling_of(chosen), sampling_of(chosen, evaluation=True)
    assert (training.temperature, evaluating.temperature) == (0.7, 0.2)
    assert {(s.max_tokens, s.stop) for s in (training, evaluating)} == {(9, ("x",))}


# On disk


CHOICES = st.fixed_dictionaries(
    {},
    optional={
        "rollout": st.fixed_dictionaries(
            {},
            optional={
                "slots": st.integers(1, 100),
                "version_slots": st.integers(1, 9),
                "temperature": st.floats(0.1, 3),
                "deterministic": st.booleans(),
                "stop": st.lists(st.text(min_size=1, max_size=4), max_size=2),
            },
        ),
        "orchestration": st.fixed_dictionaries(
            {},
            optional={
                "paradigm": st.sampled_from([str(p) for p in ParadigmName]),
                "max_staleness": st.integers(0, 9),
                "group_size": st.integers(2, 9),
                "trajectory_timeout_s": st.floats(1, 1e6),
            },
        ),
        "runtime": st.fixed_dictionaries(
            {}, optional={"kind": st.sampled_from(["local", "inline"])}
        ),
        "run": st.fixed_dictionaries(
            {}, optional={"steps": st.integers(1, 10**6), "seed": st.integers(0, 2**63 - 1)}
        ),
    },
)


@given(CHOICES)
def test_a_saved_configuration_is_the_same_again(sections: dict[str, Any]) -> None:
    chosen = config(**sections)
    again = read_config(tomllib.loads(dump_toml(chosen)))
    assert again == chosen
    assert again.settings() == chosen.settings()


def test_a_part_is_told_the_whole_configuration(tmp_path: Path) -> None:
    """As the local runtime sends it: as plain data."""
    chosen = read_config(settings(tmp_path, tmp_path / "out", orchestration={"paradigm": "sync"}))
    assert read_config(chosen.model_dump(mode="json", exclude_none=True)) == chosen


def test_the_core_knows_no_run_it_was_not_told() -> None:
    """Keys that other sections say are not saved twice."""
    saved = tomllib.loads(dump_toml(config(run={"steps": 5})))
    assert {"max_steps", "version_slots"}.isdisjoint(saved["orchestration"])
    assert set(saved["orchestration"]) == set(Settings.__dataclass_fields__) - {
        "max_steps",
        "version_slots",
    }


@pytest.mark.parametrize(
    ("name", "fix"), [("embeded", "Did you mean `embedded`?"), ("sglang", "not supported yet")]
)
def test_an_engine_that_is_not_known_is_refused(name: str, fix: str) -> None:
    with pytest.raises(
        UserError, match=r"rollout\.engine must be one of `embedded`, `vllm`: "
    ) as refusal:
        read_config({"model": {"path": "m"}, "rollout": {"engine": name}})
    assert f"`{name}`" in str(refusal.value) and fix in str(refusal.value)


@pytest.mark.parametrize(
    ("orchestration", "runtime", "expected"),
    [
        ({}, {}, 0),
        ({"elastic": "rollout"}, {}, 1),
        ({"elastic": "both"}, {"elastic_instances": 3}, 3),
        ({"elastic": "both"}, {"elastic_instances": 0}, 0),
        ({"elastic": "both", "paradigm": "sync"}, {}, 0),  # its roles take turns anyway
        ({"elastic": "both", "paradigm": "in_flight"}, {}, 0),
    ],
)
def test_instances_on_the_trainers_cores(
    orchestration: dict[str, Any], runtime: dict[str, Any], expected: int
) -> None:
    assert config(orchestration=orchestration, runtime=runtime).elastic_instances == expected


def test_elastic_instances_share_the_trainers_threads() -> None:
    made = config(
        orchestration={"elastic": "both"}, runtime={"elastic_instances": 2, "instances": 2}
    )
    assert made.threads(cores=8) == Threads(rollout=2, train=4)
    assert made.elastic_threads(cores=8) == 2


@pytest.mark.parametrize(("instances", "expected"), [(1, 8), (2, 8), (3, 4), (4, 4), (16, 1)])
def test_on_a_cluster_they_share_those_of_one_training_process(
    instances: int, expected: int
) -> None:
    """Its processes may be on several nodes."""
    made = config(
        orchestration={"elastic": "both"},
        train={"processes": 2},
        runtime={
            "kind": "ray",
            "elastic_instances": instances,
            "ray": {"trainer": {"cpus": 8}},
        },
    )
    assert made.elastic_threads() == expected


def test_speculation_is_the_embedded_engines() -> None:
    data: dict[str, Any] = {"model": {"path": "x"}, "rollout": {"speculation": "on"}}
    assert read_config(data).rollout.speculation is Speculation.ON
    data["rollout"]["engine"] = "vllm"
    with pytest.raises(UserError, match=r"rollout\.speculation must be `auto` or `off`.*`on`"):
        read_config(data)
    data["rollout"]["speculation"] = "off"
    read_config(data)
