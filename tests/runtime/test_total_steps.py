"""More steps for a run that was stopped, or has come to its end."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dora_rl
from dora_rl.config import load_toml
from dora_rl.core.protocol.errors import UserError
from dora_rl.core.protocol.events import Event, StepLimitRaised
from dora_rl.runtime.control.driver import Driver
from dora_rl.runtime.execution import Run, execute
from dora_rl.runtime.prepare.plan import plan_resume, prepare, read_config
from dora_rl.store.ledger import Ledger
from dora_rl.store.rundir import LEDGER
from tests.runtime.harness import PROMPTS, assert_sound, records, run, settings


def raised(directory: Path) -> list[int]:
    """Every total that the journal has the run raised to."""
    events = [record.event for record in records(directory) if record.refused is None]
    return [event.max_steps for event in events if isinstance(event, StepLimitRaised)]


def assert_took(ended: Run, total: int) -> None:
    assert ended.ok
    assert_sound(ended)
    assert [record.step for record in ended.steps] == list(range(1, total + 1))
    assert ended.checkpoint is not None and ended.checkpoint.name == f"step-{total}"
    assert load_toml(ended.directory / "config.toml")["run"]["steps"] == total
    with Ledger.read(ended.directory / LEDGER) as ledger:
        assert ledger.facts["ended"] == f"{total} steps trained"


def go_on(directory: Path, **more: Any) -> Run:
    return execute(plan_resume(directory, prompts=PROMPTS, **more))


@pytest.mark.parametrize(
    "paradigm",
    ["multi_version", *(pytest.param(p, marks=pytest.mark.slow) for p in ("sync", "in_flight"))],
)
def test_a_run_that_has_ended_takes_more_again_and_again(
    paradigm: str, model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    sections = {"orchestration": {"paradigm": paradigm}}
    run(model, out, run={"steps": 2, "checkpoint_every": 2}, **sections)
    assert_took(go_on(out, steps=3), 3)
    assert_took(dora_rl.resume(out, prompts=PROMPTS, steps=5, progress=False), 5)
    assert raised(out) == [3, 5]


def test_a_run_that_was_stopped_takes_more(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    stop_after(1, model, out, steps=3)
    assert_took(go_on(out, steps=4), 4)
    assert raised(out) == [4]


@pytest.mark.slow
def test_a_run_of_more_steps_can_be_stopped_and_resumed(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run(model, out, run={"steps": 1})
    stopped = execute(plan_resume(out, prompts=PROMPTS, steps=4), watch=[stop_at(2)])
    assert stopped.ending.interrupted
    assert_took(go_on(out), 4)
    assert raised(out) == [4]


def stop_at(step: int) -> Callable[[Any], None]:
    def stop(record: Any) -> None:
        if record.step == step:
            os.kill(os.getpid(), signal.SIGINT)

    return stop


def stop_after(step: int, model: Path, out: Path, *, steps: int, **sections: Any) -> None:
    config = read_config(settings(model, out, run={"steps": steps}, **sections))
    plan = prepare(config, prompts=PROMPTS)
    assert execute(plan, watch=[stop_at(step)]).ending.interrupted


def test_killed_before_the_core_was_told_it_takes_them_all_the_same(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    run(model, out, run={"steps": 2})
    post = Driver.post

    def die(self: Driver, event: Event) -> None:
        if isinstance(event, StepLimitRaised):
            raise RuntimeError("killed")
        post(self, event)

    with monkeypatch.context() as patch:
        patch.setattr(Driver, "post", die)
        with pytest.raises(RuntimeError, match="killed"):
            go_on(out, steps=3)
    assert raised(out) == []
    assert_took(go_on(out), 3)


def changed(**sections: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return sections


REFUSED: dict[str, tuple[dict[str, dict[str, Any]], int | None, str]] = {
    "no total": ({}, None, r"2 steps trained. Give --steps a total above 2, or start a new run"),
    "as many": ({}, 2, r"--steps is the new total .* above the 2 of `.*`: `2`"),
    "fewer": ({}, 1, r"above the 2 of `.*`: `1`"),
    "none": ({}, 0, r"above the 2 of `.*`: `0`"),
    "a schedule": (changed(train={"schedule": "linear"}), 3, r"train\.schedule .*: `linear`"),
    "nothing kept": (changed(run={"steps": 2, "durable": False}), 3, r"nothing to resume"),
    "no prompts": (changed(task={"epochs": 1}, run={"steps": 99}), 100, r"every prompt is trained"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_and_the_run_left_as_it_was(
    name: str, model: Path, tmp_path: Path
) -> None:
    sections, steps, words = REFUSED[name]
    out = tmp_path / "run"
    assert run(model, out, **{"run": {"steps": 2}, **sections}).ok
    before = {path: path.read_bytes() for path in out.rglob("*") if path.suffix == ".jsonl"}
    with pytest.raises(UserError, match=words) as refused:
        plan_resume(out, prompts=PROMPTS, steps=steps)
    assert "\n" not in str(refused.value)
    assert {path: path.read_bytes() for path in before} == before


def edit(out: Path, before: int, after: int) -> None:
    """What somebody does to config.toml by hand."""
    config = out / "config.toml"
    assert config.read_text().count(f"\nsteps = {before}\n") == 1
    config.write_text(config.read_text().replace(f"\nsteps = {before}\n", f"\nsteps = {after}\n"))


def test_a_total_is_not_lowered_by_hand(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run(model, out, run={"steps": 1})
    execute(plan_resume(out, prompts=PROMPTS, steps=5), watch=[stop_at(2)])
    for total, words in ((3, "can only be raised: `3`"), (0, "steps")):
        edit(out, 5, total)
        with pytest.raises(UserError, match=words):
            go_on(out)
        edit(out, total, 5)
    assert_took(go_on(out), 5)


def test_a_schedule_is_not_moved_by_a_total_that_is_raised_by_hand(
    model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    stop_after(1, model, out, steps=2, train={"schedule": "linear"})
    edit(out, 2, 3)
    for steps in (None, 3):
        with pytest.raises(UserError, match=r"train\.schedule .*: `linear`"):
            plan_resume(out, prompts=PROMPTS, steps=steps)
    edit(out, 3, 2)
    assert_took(go_on(out), 2)


@pytest.mark.parametrize("total", [3, 6])
def test_a_run_that_has_ended_takes_more_whatever_was_put_in_its_configuration(
    total: int, model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    run(model, out, run={"steps": 2})
    edit(out, 2, 5)
    for steps, words in ((None, "Give --steps a total above 2"), (2, "above the 2 of")):
        with pytest.raises(UserError, match=words):
            plan_resume(out, prompts=PROMPTS, steps=steps)
    assert_took(go_on(out, steps=total), total)
    assert raised(out) == [total]


@pytest.mark.slow
def test_processes_take_more_steps(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run(model, out, runtime={"kind": "local"}, run={"steps": 2})
    assert_took(go_on(out, steps=4), 4)
    assert raised(out) == [4]
