"""Figures of a run, against a stream short enough to work out by hand."""

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from dora_rl.core.audit import Audit, AuditReport
from dora_rl.core.protocol.commands import Command, Delete, Fail, Score, Train
from dora_rl.core.protocol.events import (
    BatchFailed,
    BatchTrained,
    Event,
    GroupJudged,
    TimerFired,
    TrajectoryFinished,
    WeightsPublished,
)
from dora_rl.core.protocol.settings import Settings
from dora_rl.core.protocol.types import BatchGroup
from dora_rl.observe.metrics import Collector, Phases, Reading, Summary, speedup_over

SETTINGS = Settings(groups_per_step=2, group_size=2, max_staleness=3)


def no_audit() -> AuditReport:
    return Audit(SETTINGS).report()


def finished(*lengths: int, first: int = 0) -> Iterator[TrajectoryFinished]:
    for i, tokens in enumerate(lengths):
        yield TrajectoryFinished(first + i, first + i + 1, tokens, ())


def batch(step: int, *groups: tuple[int, int]) -> Train:
    return Train(step, tuple(BatchGroup(g, v, (2 * g, 2 * g + 1)) for g, v in groups))


class Run:
    """Feeds a collector; readings are taken off a list, one for each publication."""

    def __init__(
        self, warmup: int, readings: list[Reading], phases: list[Phases] | None = None
    ) -> None:
        self.whole: set[int] = set()
        self.readings = iter(readings)
        self.phases = iter(phases or [])
        self.collector = Collector(
            2, warmup, lambda: next(self.readings), lambda: next(self.phases, None)
        )

    def at(self, now: float, event: Event, *commands: Command) -> None:
        """As the core does, it has a trajectory scored once."""
        if isinstance(event, TrajectoryFinished) and event.trajectory not in self.whole:
            self.whole.add(event.trajectory)
            commands = (*commands, Score(event.trajectory, event.fence))
        self.collector.observe(now, event, commands)

    def summary(self, ok: bool = True) -> Summary:
        return self.collector.summary(no_audit(), ok=ok, end="done", wall_s=1.5)


def three_steps() -> Run:
    """Publications at 0, 100, 160, 300; version 0 is warm-up."""
    run = Run(
        1,
        [
            Reading(),
            Reading(1000.0, 100.0, 1, 5.0, 10, 1e9, 7),
            Reading(1600.0, 600.0, 2, 6.0, 11, 2e9, 7),
            Reading(3000.0, 1900.0, 4, 25.0, 15, 4e9, 107),
        ],
    )
    run.at(0.0, WeightsPublished(0, "v0"))
    for event in finished(*range(100, 1300, 100)):  # trajectories 0 … 11, groups 0 … 5
        run.at(50.0, event)
    run.at(60.0, GroupJudged(0), batch(0, (0, 0), (1, 0)))
    run.at(90.0, BatchTrained(0))
    run.at(100.0, WeightsPublished(1, "v1"))
    run.at(110.0, GroupJudged(2), batch(1, (2, 0), (3, 1)))
    run.at(140.0, BatchTrained(1))
    run.at(160.0, WeightsPublished(2, "v2"))
    run.at(180.0, TimerFired(), Delete(0))
    run.at(200.0, GroupJudged(4), batch(2, (4, 0), (5, 2)))
    run.at(280.0, BatchTrained(2))
    run.at(300.0, WeightsPublished(3, "v3"))
    return run


def test_the_window_holds_whole_steps_after_the_warm_up() -> None:
    summary = three_steps().summary()
    assert summary.steps == 2
    assert summary.window_s == 200.0
    assert summary.step_minutes == pytest.approx(100 / 60)
    trained = sum(range(500, 1300, 100))  # groups 2 … 5
    assert summary.tokens_per_s == pytest.approx(trained / 200)
    assert summary.rollout_only_share == pytest.approx(1 - (30 + 80) / 200)


def test_counters_are_differences_of_the_readings() -> None:
    summary = three_steps().summary()
    assert summary.bubble_share == pytest.approx(1 - 1800 / 2000)
    assert (summary.deadline_stalls, summary.deadline_stall_s) == (3, 20.0)
    assert (summary.migrations, summary.kv_bytes_moved) == (5, 3e9)
    assert summary.reprefilled_tokens == 100


def test_staleness_is_of_trajectories_in_the_window() -> None:
    summary = three_steps().summary()  # ages 1, 0 in step 1; 2, 0 in step 2; two trajectories each
    assert summary.mean_staleness == pytest.approx(0.75)
    assert (summary.p95_staleness, summary.max_staleness) == (2, 2)


def test_versions_live_are_integrated_over_time() -> None:
    summary = three_steps().summary()
    # Two live on 100 … 160, three to 180, two to 300, and the last one at its publication.
    assert summary.mean_versions_live == pytest.approx((2 * 60 + 3 * 20 + 2 * 120) / 200)
    assert summary.max_versions_live == 3


def test_repeated_messages_change_nothing() -> None:
    run = Run(0, [Reading(), Reading(10.0, 5.0)])
    run.at(0.0, WeightsPublished(0, "v0"))
    run.at(0.0, WeightsPublished(0, "v0"))
    for event in finished(10, 10, 10, 10):
        run.at(1.0, event)
        run.at(1.0, event)
    run.at(2.0, TimerFired(), batch(0, (0, 0), (1, 0)))
    run.at(3.0, TimerFired(), batch(0, (0, 0), (1, 0)))
    run.at(4.0, BatchTrained(0))
    run.at(5.0, BatchTrained(0))
    run.at(10.0, WeightsPublished(1, "v1"))
    run.at(11.0, WeightsPublished(1, "v1"))
    summary = run.summary()
    assert summary.tokens_per_s == pytest.approx(4.0)
    assert summary.rollout_only_share == pytest.approx(0.8)
    assert summary.max_versions_live == 2


def test_a_failed_batch_took_time_and_trained_nothing() -> None:
    run = Run(0, [Reading(), Reading()])
    run.at(0.0, WeightsPublished(0, "v0"))
    for event in finished(10, 10):
        run.at(0.0, event)
    run.at(0.0, TimerFired(), batch(0, (0, 0)))
    run.at(4.0, BatchFailed(0, "lost"), batch(0, (0, 0)))
    run.at(8.0, BatchTrained(0))
    run.at(10.0, WeightsPublished(1, "v1"))
    summary = run.summary()
    assert summary.rollout_only_share == pytest.approx(0.2)
    assert summary.tokens_per_s == pytest.approx(2.0)


def test_filtered_groups_are_forgotten() -> None:
    run = Run(0, [Reading(), Reading()])
    run.at(0.0, WeightsPublished(0, "v0"))
    for event in finished(10, 10):
        run.at(0.0, event)
    run.at(1.0, GroupJudged(0, "no_signal"))
    run.at(1.0, TimerFired(), batch(0, (0, 0)))
    run.at(2.0, BatchTrained(0))
    run.at(10.0, WeightsPublished(1, "v1"))
    assert run.summary().tokens_per_s == 0.0


def test_what_is_over_is_forgotten() -> None:
    run = Run(0, [Reading()])
    run.at(0.0, WeightsPublished(0, "v0"))
    whole = list(finished(10, 20, 30, 40))
    for event in whole:
        run.at(0.0, event)
    run.at(1.0, TimerFired(), Fail(2, "reward"), Fail(3, "sibling failed"))
    assert run.collector._lengths == {0: 10, 1: 20}
    run.at(1.0, TimerFired(), batch(0, (0, 0)))
    run.at(2.0, BatchTrained(0))
    for event in whole:  # copies that come late
        run.at(3.0, event)
    assert not run.collector._lengths


@pytest.mark.parametrize("events", [[], [WeightsPublished(0, "v0")]])
def test_a_run_without_a_whole_step_has_zeros(events: list[Event]) -> None:
    run = Run(0, [Reading()])
    for event in events:
        run.at(3.0, event)
    summary = run.summary(ok=False)
    assert (summary.steps, summary.step_minutes, summary.tokens_per_s) == (0, 0.0, 0.0)
    assert summary.rollout_only_share == summary.bubble_share == 0.0
    assert not summary.ok


def test_json_is_what_a_seed_reproduces() -> None:
    data = three_steps().summary().to_json()
    assert "wall_s" not in data
    assert json.loads(json.dumps(data)) == data
    for key in ("step_minutes", "rollout_only_share", "tokens_per_s", "mean_staleness"):
        assert isinstance(data[key], float)
    assert data["audit"] == "clean"
    assert data["ok"] and data["audit_ok"]


def test_the_verdict_names_what_is_broken() -> None:
    audit = Audit(SETTINGS)
    audit.observe(0.0, WeightsPublished(0, "v0"), [batch(0, (0, 0))])  # nothing was ever issued
    summary = Collector(2, 0, Reading).summary(audit.report(), ok=True, end="done", wall_s=0.0)
    assert not summary.ok and not summary.audit_ok
    assert summary.audit.startswith("broken: ")


def test_phases_are_seconds_of_a_step_in_the_window() -> None:
    run = Run(
        1,
        [Reading()] * 4,
        [
            Phases(0, 0, 0, 0, 0),
            Phases(9, 5, 2, 1, 4),
            Phases(19, 9, 3, 2, 8),
            Phases(29, 15, 4, 4, 12),
        ],
    )
    for version in range(4):
        run.at(10.0 * version, WeightsPublished(version, f"v{version}"))
    summary = run.summary()
    each = {"generate": 10.0, "train": 5.0, "publish": 1.0, "install": 1.5, "switch": 4.0}
    assert summary.phase_seconds == summary.to_json()["phase_seconds"] == each


def test_phases_that_nobody_measured_are_not_zero_but_absent() -> None:
    summary = three_steps().summary()
    assert summary.phase_seconds is None and "phase_seconds" not in summary.to_json()


def test_a_speedup_says_by_which_measure() -> None:
    base = three_steps().summary()
    more_tokens = replace(
        base, tokens_per_s=3 * base.tokens_per_s, step_minutes=base.step_minutes / 2
    )
    assert speedup_over(more_tokens, base) == {"by_tokens_per_s": 3.0, "by_step_time": 2.0}
    nothing = {"by_tokens_per_s": None, "by_step_time": None}
    assert speedup_over(base, None) == speedup_over(base, replace(base, tokens_per_s=0)) == nothing
