"""Runs whose versions are LoRA adapters of one base."""

import math
from pathlib import Path
from typing import Any

import pytest

from dora_rl import extras
from dora_rl.core.protocol.errors import UserError
from dora_rl.core.protocol.events import VersionInstalled
from dora_rl.core.protocol.settings import ParadigmName
from dora_rl.models.config import read_config as read_model
from dora_rl.runtime.config import RunConfig
from dora_rl.runtime.prepare.memory_estimate import adapter_parameters, footprint
from dora_rl.runtime.prepare.plan import prepare, read_config
from dora_rl.runtime.prepare.preflight import preflight
from dora_rl.trainer.settings import LoraSettings
from tests.runtime.harness import PROMPTS, assert_sound, lines, records, run, settings, weights

LORA: dict[str, Any] = {"lora": {"rank": 4, "alpha": 16.0}}


@pytest.mark.parametrize(
    "paradigm",
    [
        ParadigmName.IN_FLIGHT,
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ParadigmName
            if name is not ParadigmName.IN_FLIGHT
        ),
    ],
)
def test_a_run_of_adapters_is_sound(paradigm: str, model: Path, tmp_path: Path) -> None:
    ended = run(model, tmp_path / "run", model=LORA, orchestration={"paradigm": paradigm})
    assert_sound(ended)
    assert ended.checkpoint is not None
    assert (ended.checkpoint / "adapter_config.json").is_file()


def test_it_is_a_function_of_the_seed_and_serves_several_at_once(
    model: Path, tmp_path: Path
) -> None:
    one, again = (run(model, tmp_path / name, model=LORA) for name in ("one", "again"))
    assert_sound(one)
    assert one.checkpoint is not None and again.checkpoint is not None
    assert weights(one.checkpoint) == weights(again.checkpoint)
    assert lines(one.directory) == lines(again.directory)
    installed = [r.event for r in records(one.directory) if isinstance(r.event, VersionInstalled)]
    assert len({event.digest for event in installed}) == len({e.version for e in installed}) >= 4
    assert max(record.versions_live for record in one.steps) >= 3
    # The trainer's log-probabilities of its own version are those that were sampled from.
    gaps = [s.metrics["logprob_gap_max"] for s in one.steps if "logprob_gap_max" in s.metrics]
    assert gaps and max(gaps) < 1e-3


@pytest.mark.slow
def test_a_run_in_processes(model: Path, tmp_path: Path) -> None:
    ended = run(model, tmp_path / "run", model=LORA, runtime={"kind": "local"}, run={"steps": 3})
    assert_sound(ended)


def test_a_target_that_is_not_there_is_refused_before_a_file_is_written(
    model: Path, tmp_path: Path
) -> None:
    wrong = {"lora": {"rank": 4, "target_modules": ["q_proj", "query"]}}
    plan = prepare(read_config(settings(model, tmp_path / "run", model=wrong)), prompts=PROMPTS)
    with pytest.raises(UserError, match=r"no linear layer of the model: `query`. Its layers have"):
        preflight(plan)
    assert not (tmp_path / "run").exists()


def test_peft_that_is_missing_is_told(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    present = extras._present
    monkeypatch.setattr(extras, "_present", lambda name: name != "peft" and present(name))
    with pytest.raises(UserError, match=r"peft is not installed.*'dora-rl\[lora\]'"):
        prepare(read_config(settings(model, tmp_path / "run", model=LORA)), prompts=PROMPTS)


def config(**sections: Any) -> RunConfig:
    return RunConfig.model_validate({"model": {"path": "x"}, **sections})


def test_vllm_serves_as_many_adapters_as_may_be_live() -> None:
    rollout, stale = {"engine": "vllm"}, {"max_staleness": 5}
    full = config(rollout=rollout, orchestration=stale)
    assert (full.settings().version_slots, full.version_slots) == (1, 1)
    lora = config(rollout=rollout, orchestration=stale, model={"path": "x", "lora": {}})
    assert (lora.settings().version_slots, lora.version_slots) == (6, 7)
    with pytest.raises(UserError, match=r"more versions at once, or model.lora"):
        read_config({"model": {"path": "x"}, "rollout": {"engine": "vllm", "version_slots": 2}})


def test_an_adapter_needs_less_memory(model: Path, tmp_path: Path) -> None:
    shape = read_model(model)
    full = footprint(read_config(settings(model, tmp_path)), shape)
    lora = footprint(read_config(settings(model, tmp_path, model=LORA)), shape)
    assert lora.trainer < full.trainer and lora.versions < full.versions
    assert "for the adapters and their base" in str(lora)
    q_proj = LoraSettings(rank=3, target_modules=("q_proj",))
    sizes = [s for name, s in shape.tensors().items() if name.endswith("q_proj.weight")]
    assert adapter_parameters(q_proj, shape) == 3 * sum(map(sum, sizes)) < math.prod(sizes[0]) * 9
