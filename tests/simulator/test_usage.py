"""Integrals of slot time, over any window."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_rl.core.protocol import commands as cmd
from dora_rl.core.protocol import events as ev
from dora_rl.simulator.usage import Timeline, Usage, UsageReading
from tests.simulator.scripted import STEP_S, build, installing, publish_next, shape


@given(
    st.lists(st.tuples(st.floats(0, 10), st.integers(0, 4), st.booleans()), min_size=1, max_size=20)
)
def test_the_integral_is_the_sum_of_its_pieces(pieces: list[tuple[float, int, bool]]) -> None:
    usage, now, busy_s, slots_s, suspended_s = Usage(), 0.0, 0.0, 0.0, 0.0
    generating_s = 0.0
    usage.change(0.0, slots=4)
    for lasting, busy, suspended in pieces:
        usage.change(now, busy - usage.busy)
        usage.suspend(now, suspended)
        now += lasting
        suspended_s += 4 * lasting if suspended else 0.0
        slots_s += 0.0 if suspended else 4 * lasting
        busy_s += 0.0 if suspended else busy * lasting
        generating_s += lasting if busy and not suspended else 0.0
    reading = usage.read(now)
    assert reading == pytest.approx((now, slots_s, busy_s, suspended_s, generating_s))


def test_a_window_is_the_difference_of_two_readings() -> None:
    window = UsageReading(10.0, 40.0, 30.0, 0.0, 8.0).since(UsageReading(5.0, 20.0, 20.0, 0.0, 4.0))
    assert window == (5.0, 20.0, 10.0, 0.0, 4.0)
    assert window.bubble_share == 0.5
    assert UsageReading(0.0, 0.0, 0.0, 0.0).bubble_share == 0.0


def test_bubbles_of_a_run_by_hand() -> None:
    script = installing()
    script.at(1.0, cmd.Start(0, 1, 0, 0), cmd.Start(1, 2, 0, 0))
    timeline = Timeline()
    world = build(script, {0: shape(100), 1: shape(300)}, slots=2, recorder=timeline)
    world.run(until_s=5.0)
    reading = world.usage.read(world.now)
    assert reading.busy_s == pytest.approx((100 + 300) * STEP_S, rel=1e-4)
    assert reading.slots_s == pytest.approx(10.0)
    assert world.steady_usage() == reading
    changes = [(i, busy, version) for _, i, busy, version in timeline.changes]
    assert changes == [(0, 2, 0), (0, 1, 0), (0, 0, None)]
    assert [span.kind for span in timeline.spans] == ["install"]


def test_the_steady_window_opens_with_a_version() -> None:
    script = installing()
    publish_next(script, 0, at=1.0)
    world = build(script, steady_version=1)
    world.run(until_s=20.0)
    published_at = script.seen(ev.WeightsPublished)[-1][0]
    assert world.steady_start is not None
    assert world.steady_start.time == published_at
    assert world.steady_usage().time == pytest.approx(20.0 - published_at)
