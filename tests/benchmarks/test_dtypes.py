"""In which numbers a model is measured, and what is said of it."""

from pathlib import Path
from typing import Any

import pytest

from dora_rl.benchmarks import dtypes
from dora_rl.benchmarks.contestants import roster
from dora_rl.benchmarks.dtypes import choose, open_in_best_dtype
from dora_rl.benchmarks.models import open_model
from dora_rl.benchmarks.reporting import Reporter
from dora_rl.core.protocol.errors import UserError
from dora_rl.models import packaged
from tests.benchmarks import stubs

SLOW_BF16 = {"bfloat16": 3e9, "float32": 120e9}
FAST_BF16 = {"bfloat16": 400e9, "float32": 180e9}


class Machine:
    """Multiplies as fast as it is told."""

    def __init__(self, peaks: dict[str, float]) -> None:
        self._peaks = peaks

    def ask(self, request: str, **sizes: Any) -> dict[str, float]:
        assert request == "peaks" and sizes["budget_s"] < 2
        return self._peaks


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Sets what the machine can do; no model is fetched."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def can(peaks: dict[str, float]) -> None:
        monkeypatch.setattr(dtypes, "start_all", lambda *given: [Machine(peaks)])

    return can


def fetched(dtype: str, tmp_path: Path) -> Path:
    """As if smollm2 had been fetched in this dtype."""
    source = open_model("tiny", dtype, tmp_path / "made").directory
    target = packaged.place("smollm2", dtype)
    target.parent.mkdir(parents=True)
    return source.rename(target)


def test_float32_is_chosen_where_bfloat16_is_far_slower() -> None:
    slow, fast = choose(SLOW_BF16), choose(FAST_BF16)
    assert (slow.dtype, fast.dtype) == ("float32", "bfloat16")
    assert "far slower here" in slow.reason
    assert "3 in bfloat16 and 120 in float32" in slow.reason
    assert slow.to_json()["mm_flops_per_s"] == SLOW_BF16


def test_bfloat16_that_is_somewhat_slower_stays_as_it_halves_the_bytes() -> None:
    assert choose({"bfloat16": 157e9, "float32": 325e9}).dtype == "bfloat16"


@pytest.mark.parametrize(("peaks", "dtype"), [(SLOW_BF16, "float32"), (FAST_BF16, "bfloat16")])
def test_tiny_is_made_in_what_was_chosen(
    machine: Any, peaks: dict[str, float], dtype: str, tmp_path: Path
) -> None:
    machine(peaks)
    model, choice = open_in_best_dtype("tiny", None, tmp_path, Reporter())
    assert (model.config.dtype, choice.dtype) == (dtype, dtype)


def test_a_named_dtype_and_a_directory_of_the_users_are_not_chosen_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(dtypes, "start_all", None)
    model, choice = open_in_best_dtype("tiny", "bfloat16", tmp_path, Reporter())
    assert (model.config.dtype, choice.reason) == ("bfloat16", "")
    own, choice = open_in_best_dtype(str(model.directory), None, tmp_path, Reporter())
    assert (own.directory, choice.reason) == (model.directory, "")


def test_smollm2_is_taken_as_it_was_fetched(machine: Any, tmp_path: Path) -> None:
    machine(SLOW_BF16)
    there = fetched("float32", tmp_path)
    model, choice = open_in_best_dtype("smollm2", None, tmp_path, Reporter())
    assert (model.directory, model.config.dtype) == (there, "float32")
    assert "converted" not in choice.reason


def test_smollm2_that_was_fetched_in_the_other_dtype_is_converted(
    machine: Any, tmp_path: Path
) -> None:
    machine(SLOW_BF16)
    fetched("bfloat16", tmp_path)
    model, choice = open_in_best_dtype("smollm2", None, tmp_path / "work", Reporter())
    assert model.config.dtype == "float32" and model.directory.is_relative_to(tmp_path / "work")
    assert model.title == packaged.MODELS["smollm2"].title
    assert choice.reason.endswith("dora-rl fetch-model smollm2 --dtype float32")


@pytest.mark.parametrize(
    ("peaks", "command"),
    [
        (SLOW_BF16, "dora-rl fetch-model smollm2 --dtype float32"),
        (FAST_BF16, "dora-rl fetch-model smollm2"),
    ],
)
def test_smollm2_that_was_not_fetched_is_an_error_with_the_command(
    machine: Any, peaks: dict[str, float], command: str, tmp_path: Path
) -> None:
    machine(peaks)
    with pytest.raises(UserError, match=f"Run: {command}$"):
        open_in_best_dtype("smollm2", None, tmp_path, Reporter())


def test_the_machine_is_asked_and_ended_for_real(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roster, "machine", lambda threads: stubs.start(tmp_path, "machine"))
    told = stubs.Told()
    _, choice = open_in_best_dtype("tiny", None, tmp_path, told)
    assert choice.mm_flops_per_s == stubs.LIMITS["mm_flops_per_s"]
    assert told.lines == ["loading machine", "comparing bfloat16 with float32"]
