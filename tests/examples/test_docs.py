"""The tables of the documentation say what the code does."""

import dataclasses
import enum
import json
import re
from pathlib import Path
from typing import Any, get_args

from pydantic_core import PydanticUndefined

from dora_rl.algorithms import settings as algorithm
from dora_rl.algorithms.presets import PRESETS
from dora_rl.core.protocol.paradigms import PARADIGMS
from dora_rl.core.protocol.settings import Settings
from dora_rl.engines.vllm.settings import VllmSettings
from dora_rl.runtime.config import LogicalTime, RunConfig
from dora_rl.runtime.control.evaluator import EvalRecord
from dora_rl.runtime.launchers.ray.settings import RaySettings, Resources, RewardWorkers
from dora_rl.runtime.records.step_metrics import StepRecord
from dora_rl.tasks.rewards import BUILT_IN, CONTEXT
from dora_rl.trainer.settings import LoraSettings
from dora_rl.transports.kv.settings import KvTransportSettings
from dora_rl.transports.weights.settings import WeightTransportSettings

DOCS = Path(__file__).parents[2] / "docs"


def rows(text: str) -> list[list[str]]:
    """The cells of all table rows, without headings."""
    found: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith("|---"):
            found.pop()  # the heading
        elif line.startswith("|"):
            found.append([cell.strip() for cell in line.strip("|").split("|")])
    return found


def section(text: str, heading: str) -> str:
    """From a heading to the next of any level."""
    return re.split(r"^#+ ", text.split(f"{heading}\n", 1)[1], flags=re.M)[0]


def named(rows_: list[list[str]]) -> list[str]:
    return [name for row in rows_ for name in re.findall(r"`([^`]+)`", row[0])]


def shown(value: Any) -> str:
    if value is PydanticUndefined:
        return "required"
    if value is None:
        return "`none`"
    value = value.value if isinstance(value, enum.Enum) else value
    return f"`{value!r}`" if type(value) is float else f"`{json.dumps(value)}`"


def expected() -> dict[str, dict[str, str]]:
    """Keys and defaults of every section."""
    tables: dict[str, dict[str, str]] = {}
    for name, field in RunConfig.model_fields.items():
        model: Any = field.annotation
        if model is Settings:
            # Two keys are other sections' in a run.
            tables[name] = {
                entry.name: shown(entry.default)
                for entry in dataclasses.fields(Settings)
                if entry.name not in ("max_steps", "version_slots")
            }
            continue
        tables[name] = {
            key: shown(entry.get_default(call_default_factory=True))
            for key, entry in model.model_fields.items()
            if key not in ("inline", "kv", "ray", "vllm", "weights")
        }
    for name, model in {
        "model.lora": LoraSettings,
        "runtime.inline": LogicalTime,
        "runtime.kv": KvTransportSettings,
        "runtime.weights": WeightTransportSettings,
        "rollout.vllm": VllmSettings,
    }.items():
        tables[name] = {key: shown(entry.default) for key, entry in model.model_fields.items()}
    tables["runtime.ray"] = {
        key: shown(entry.default)
        for key, entry in RaySettings.model_fields.items()
        if entry.annotation not in (Resources, RewardWorkers)
    }
    tables["runtime.ray.rewards"] = {
        key: shown(entry.default)
        for key, entry in RewardWorkers.model_fields.items()
        if key not in Resources.model_fields
    }
    return tables


def test_training_lists_every_key_with_its_default() -> None:
    text = (DOCS / "training.md").read_text()
    for name, keys in expected().items():
        table = rows(section(text, f"### `[{name}]`"))
        assert {row[0].strip("`"): row[1] for row in table} == keys, name
        assert all(row[2] for row in table), name


def test_training_lists_the_paradigms_and_what_metrics_hold() -> None:
    text = (DOCS / "training.md").read_text()
    table = {row[0].strip("`"): row for row in rows(section(text, "## Paradigms"))}
    assert set(table) == set(PARADIGMS)
    for name, paradigm in PARADIGMS.items():
        assert table[name][1].startswith("in turns" if paradigm.colocated else "concurrent"), name
        assert ("not bounded" in table[name][3]) != paradigm.bounded, name
    metrics = section(text, "## Reading metrics.jsonl")
    assert set(named(rows(metrics))) == set(StepRecord.__struct_fields__)
    evaluation = metrics.split('"kind": "evaluation"', 1)[1]
    assert set(re.findall(r"`(\w+)`", evaluation)) == set(EvalRecord.__struct_fields__)


def test_algorithms_lists_every_preset_with_what_it_sets() -> None:
    table = rows(section((DOCS / "algorithms.md").read_text(), "## Presets"))
    found = {row[0].strip("`"): set(re.findall(r"`(\w+)[^`]*`", row[1])) for row in table}
    assert found == {name: set(values) for name, values in PRESETS.items()}
    for row in table:
        for key, value in re.findall(r"`(\w+) = ([^`]+)`", row[1]):
            wanted = PRESETS[row[0].strip("`")][key]
            assert wanted == (value if isinstance(wanted, str) else float(value)), row[0]


def test_algorithms_lists_every_choice() -> None:
    text = (DOCS / "algorithms.md").read_text()
    for heading, choices in (
        ("## Advantages", algorithm.Advantage),
        ("## Losses", algorithm.Loss),
        ("## Aggregation", algorithm.Aggregation),
    ):
        assert named(rows(section(text, heading))) == list(get_args(choices)), heading
    assert set(get_args(algorithm.Preset)) == set(PRESETS)


def test_tasks_lists_what_is_built_in_and_what_a_reward_may_name() -> None:
    names = named(rows(section((DOCS / "tasks.md").read_text(), "## Rewards")))
    assert set(names) == set(BUILT_IN) | set(CONTEXT)
