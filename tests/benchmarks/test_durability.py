"""What durability costs: what is asked for, and what is made of the answers."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dora_rl.benchmarks import durability
from dora_rl.benchmarks.durability import OFF, ON, Plan, Result, measure
from dora_rl.benchmarks.reporting import Reporter
from dora_rl.core.protocol.errors import UserError
from dora_rl.runtime.prepare.plan import read_config
from tests.benchmarks import stubs

QUICK = {
    "rollout": {"slots": 8, "max_tokens": 64},
    "task": {"options": {"max_terms": 8}},
    "orchestration": {"groups_per_step": 4, "group_size": 4},
    "runtime": {"rollout_threads": 1, "train_threads": 1, "report_period_s": 0.05},
}


def test_the_overhead_is_that_of_the_median_round() -> None:
    rates = {ON: [90.0, 50.0, 98.0], OFF: [100.0, 100.0, 100.0]}
    result = Result(Plan(rounds=3), rates, 1.0, 2.0)
    assert result.overhead == pytest.approx(0.1)
    assert "overhead 10.0% (median of 3 rounds)" in result.summary()
    assert result.to_json()["overhead"] == result.overhead


def test_the_two_ways_differ_in_durability_alone() -> None:
    on, off = (read_config(Plan().settings(way, 4)) for way in (ON, OFF))
    assert (on.run.durable, off.run.durable) == (True, False)
    assert on.run.model_copy(update={"durable": False}) == off.run
    assert on.model_copy(update={"run": off.run}) == off


@pytest.mark.parametrize(
    ("bad", "named"),
    [({"steps": 1}, "--steps"), ({"rounds": 0}, "--rounds"), ({"warmup_steps": 24}, "--warmup")],
)
def test_bad_plans_are_refused(bad: dict[str, int], named: str) -> None:
    with pytest.raises(UserError, match=named):
        Plan(**bad)


def test_what_was_measured_can_be_shown_at_any_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(data: Any, out: Path, reporter: Reporter, *, warmup_steps: int) -> Any:
        return SimpleNamespace(summary=SimpleNamespace(tokens_per_s=100.0))

    monkeypatch.setattr(durability, "train_once", run)
    monkeypatch.setattr(durability, "_time_replacement", lambda *given: 1.0)
    monkeypatch.setattr(durability, "_time_resume", lambda *given: 2.0)
    shown = [r.to_json() for r in stubs.interrupted_everywhere(partial(measure, Plan(rounds=2)))]
    first, last = shown[0], shown[-1]
    assert first["tokens_per_s"] == {ON: [100.0], OFF: []} and first["overhead"] is None
    assert last["overhead"] == 0 and last["resume_to_first_token_s"] is None
    assert (last["rollout_death_to_traffic_s"], len(shown)) == (1.0, 5)


@pytest.mark.faults
def test_all_is_measured(tmp_path: Path) -> None:
    told = stubs.Told()
    result = measure(Plan(steps=6, warmup_steps=1, rounds=1, config=QUICK), told)
    assert all(len(rates) == 1 and rates[0] > 0 for rates in result.tokens_per_s.values())
    assert result.replaced_s and result.resumed_s
    assert told.lines[0] == "round 1 of 1: durability on"
