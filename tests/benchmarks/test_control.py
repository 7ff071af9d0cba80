"""`bench control` on a fleet of four: the real driver and files, workers that compute nothing."""

import gc
import json

import pytest

from dora_rl.benchmarks.control import Plan, Result, measure
from dora_rl.benchmarks.reporting import Reporter
from dora_rl.core.protocol.errors import UserError

# A trajectory takes four seconds, and everything else next to nothing.
SMALL = Plan(
    instances=4, slots=8, tokens=120, report_period=0.2, save_period=0.5, seconds=3.0, pace=0.01
)


@pytest.fixture(scope="module")
def result() -> Result:
    return measure(SMALL)


def test_a_fleet_is_driven_and_its_messages_are_timed(result: Result) -> None:
    found = json.loads(json.dumps(result.to_json()))
    assert found["load"]["instances"] == 4 and found["in_flight"] > 0
    assert {"Finished", "Reported", "Used", "Prefixes"} <= set(found["messages_per_s"])
    # Every instance reports five times a second, with its counters beside it.
    assert 0.4 * 20 < found["messages_per_s"]["Used"] < 1.5 * 20
    assert {"InstanceProgressed", "TrajectoryFinished"} <= set(found["events_per_s"])
    latency = found["latency"]
    assert latency["messages"] > 20
    assert 0 < latency["p50_ms"] <= latency["p99_ms"] <= latency["max_ms"]
    assert 0 < found["core_share"] <= found["busiest_s"] * 1.001
    assert found["memory_mb"] > 10 and found["journal_bytes_per_s"] > 0
    within = found["core_share"] <= 0.5 and latency["p99_ms"] <= 20
    assert found["within_goal"] is within


def test_the_summary_has_the_figures_and_the_goals(result: Result) -> None:
    text = "\n".join(result.summary())
    for words in ("4 instances", "of a core (goal: 50% at most)", "p99", "goal: 20 at most", "MB"):
        assert words in text


def test_an_interrupt_keeps_what_was_measured() -> None:
    seen: list[str] = []
    frozen: list[int] = []

    def say(line: str, begins: bool) -> None:
        seen.append(line)
        frozen.append(gc.get_freeze_count())
        if line.startswith("measuring,"):
            raise KeyboardInterrupt

    reporter = Reporter(say)
    with pytest.raises(KeyboardInterrupt):
        measure(Plan(**{**as_dict(SMALL), "seconds": 600.0}), reporter)
    found = reporter.so_far()
    assert isinstance(found, Result) and 0.9 < found.seconds < 60
    assert found.latency is not None, "the fleet has said when it sent its messages"
    assert seen[0] == "filling 4 instances"
    assert frozen[-1] > 10_000, "what was imported is not searched for cycles while messages wait"
    assert gc.get_freeze_count() == 0


def as_dict(plan: Plan) -> dict[str, float]:
    return {name: getattr(plan, name) for name in Plan.__slots__}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("option", "value"),
    [("instances", 1), ("instances", 5000), ("slots", 0), ("report_period", 60.0), ("seconds", 0)],
)
def test_what_cannot_be_measured_is_refused(option: str, value: float) -> None:
    name = option.replace("_", "-")
    with pytest.raises(UserError, match=rf"--{name} must be from .*: `{value:g}`"):
        Plan(**{option: value})  # type: ignore[arg-type]
