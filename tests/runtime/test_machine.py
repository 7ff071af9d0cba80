"""What a run takes from its machine: chosen once, written down, told once."""

import json
from pathlib import Path

import pytest

from dora_rl.config import load_toml
from dora_rl.core.protocol.errors import UserError
from dora_rl.machine.fast_paths import FAST_PATHS, PORTABLE, Trial
from dora_rl.runtime.display.progress import Follower
from dora_rl.runtime.execution import execute
from dora_rl.runtime.prepare import plan as planning
from dora_rl.runtime.prepare.plan import prepare, read_config
from dora_rl.runtime.records.run_files import _Machine
from dora_rl.trainer.settings import Dtype
from tests.runtime.harness import PROMPTS, run, settings


@pytest.mark.parametrize(
    ("bf16", "device", "hidden"),
    [(True, "auto", {}), (False, "cpu", {"CUDA_VISIBLE_DEVICES": ""})],
)
def test_auto_is_measured_once_and_written_down(
    bf16: bool,
    device: str,
    hidden: dict[str, str],
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[object] = []

    def measured(names: list[str], environment: dict[str, str]) -> dict[str, Trial]:
        asked.append((names, environment))
        return {name: Trial(bf16, "as the test says") for name in names}

    monkeypatch.setattr(planning, "in_child", measured)
    data = settings(
        model, tmp_path / "run", train={"dtype": "auto", "device": device}, run={"steps": 1}
    )
    plan = prepare(read_config(data), prompts=PROMPTS)
    chosen = Dtype.BFLOAT16 if bf16 else Dtype.FLOAT32
    assert plan.config.train.dtype is chosen and asked == [(["bf16-training"], hidden)]
    assert execute(plan).ok
    assert load_toml(tmp_path / "run/config.toml")["train"]["dtype"] == chosen.value


def test_a_dtype_that_is_named_is_not_measured(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "in_child", None)
    data = settings(model, tmp_path / "run", train={"dtype": "bfloat16"})
    plan = prepare(read_config(data), prompts=PROMPTS)
    assert plan.config.train.dtype is Dtype.BFLOAT16


@pytest.mark.parametrize("reason", [None, "no C compiler"])
def test_kernels_of_a_deterministic_run_are_settled_before_it_and_written_down(
    reason: str | None, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(PORTABLE, raising=False)
    monkeypatch.setattr(planning, "why_unavailable", lambda: reason)
    data = settings(model, tmp_path / "run", run={"steps": 1})
    plan = prepare(read_config(data), prompts=PROMPTS)
    assert plan.config.deterministic  # it is inline
    assert plan.config.rollout.native_kernels is (reason is None)
    assert plan.config.train.native_kernels is (reason is None)
    if reason is not None:
        assert execute(plan).ok
        written = load_toml(tmp_path / "run/config.toml")
        assert written["rollout"]["native_kernels"] is written["train"]["native_kernels"] is False
        monkeypatch.setattr(planning, "why_unavailable", lambda: None)
        resumed = planning.plan_resume(tmp_path / "run", prompts=PROMPTS, steps=2)
        assert resumed.config.rollout.native_kernels is False  # although there is a compiler now
        assert resumed.config.train.native_kernels is False


@pytest.mark.parametrize("section", ["rollout", "train"])
def test_kernels_that_were_asked_for_and_are_not_to_be_had_are_refused(
    section: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "why_unavailable", lambda: "no C compiler")
    data = settings(model, tmp_path / "run", **{section: {"native_kernels": True}})
    with pytest.raises(
        UserError,
        match=rf"{section}.native_kernels cannot be `true` on this machine: no C compiler. Set it",
    ):
        prepare(read_config(data), prompts=PROMPTS)
    assert not (tmp_path / "run").exists()


def test_an_older_run_is_resumed_without_kernels(model: Path, tmp_path: Path) -> None:
    """Its configuration does not name them, and it was computed by torch."""
    older = read_config(settings(model, tmp_path / "run"))
    assert older.rollout.native_kernels is None
    resumed = planning._without_kernels(older)
    assert resumed.rollout.native_kernels is resumed.train.native_kernels is False


def test_a_run_writes_down_its_machine(model: Path, tmp_path: Path) -> None:
    ended = run(model, tmp_path / "run", run={"steps": 1})
    machine = json.loads((ended.directory / "metrics.json").read_text())["machine"]
    assert machine["cores"] >= 1 and machine["processor"] and machine["system"]
    assert set(machine["fast_paths"]) <= set(FAST_PATHS)
    assert "cpu-affinity" in machine["fast_paths"]


def test_what_workers_tried_is_a_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PORTABLE, "1")
    machine = _Machine()
    machine.tried(0.0, {"onednn-order": Trial(False, "no avx512bw")})
    found = machine.to_json()
    assert found["portable"]
    assert found["fast_paths"]["onednn-order"] == {
        "in_force": False,
        "finding": "no avx512bw",
        "value": 0,
    }


def test_a_fallback_is_told_once(model: Path, tmp_path: Path) -> None:
    plan = prepare(read_config(settings(model, tmp_path / "run")), prompts=PROMPTS)
    follower, told = Follower(plan), list[str]()
    follower.tell = told.append
    trials = {"onednn-order": Trial(False, "no avx512bw"), "fork": Trial(True, "well")}
    for _ in range(2):
        follower.tried(0.0, trials)
    (line,) = told
    assert "onednn-order" in line and FAST_PATHS["onednn-order"].otherwise in line
