"""The least time of a step: bounds that hold whatever the parts are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_rl.benchmarks.floors import Demand, Floor, Parts, Size, demand_of
from dora_rl.core.protocol.settings import ParadigmName

SYNC, ONE_STEP, PARTIAL, IN_FLIGHT, OURS = ParadigmName
PARTS = Parts({1: 1e-4, 2: 6e-5}, {1: 1e-4, 2: 1.2e-4}, {1: 2e-3, 16: 3e-4, 64: 1e-4})
seconds = st.floats(0.0, 100.0)
floors = st.builds(
    Floor,
    cores=st.integers(1, 64),
    train_core_s=seconds,
    train_s=seconds,
    decode_core_s=seconds,
    tail_s=seconds,
    wait_s=st.just(0.0),
)


def test_a_floor_worked_out_by_hand() -> None:
    floor = Floor.of(PARTS, Demand(10_000, 10_000, 600, 0.5), cores=2)
    assert (floor.train_core_s, floor.train_s) == pytest.approx((1.0, 0.6))
    assert (floor.decode_core_s, floor.tail_s) == pytest.approx((1.0, 600 * 2e-3 + 0.5))
    assert floor.limit_s == pytest.approx(1.0)
    expected = {SYNC: 0.6 + 1.7, PARTIAL: 0.6 + 0.5, ONE_STEP: 1.7, IN_FLIGHT: 1.0}
    for name, floor_s in expected.items():
        assert floor.of_paradigm(name, 3) == pytest.approx(floor_s), name
    assert floor.of_paradigm(OURS, 3) == pytest.approx(1.0)  # (1.7 + 0.6) / 4 is less
    assert floor.of_paradigm(OURS, 0) == pytest.approx(2.3)
    assert floor.sync_rollout_share == pytest.approx(1.7 / 2.3)


@given(floors, st.integers(0, 16))
def test_more_staleness_never_costs_time_and_none_beats_the_limit(floor: Floor, k: int) -> None:
    ours = floor.of_paradigm(OURS, k)
    assert ours >= floor.of_paradigm(OURS, k + 1) >= floor.of_paradigm(IN_FLIGHT, k)
    assert floor.of_paradigm(IN_FLIGHT, k) >= floor.limit_s
    assert floor.of_paradigm(SYNC, k) >= floor.of_paradigm(PARTIAL, k)
    assert (k + 1) * ours >= floor.tail_s + floor.train_s - 1e-9


@given(st.integers(1, 4), st.floats(1.0, 5.0))
def test_other_work_on_the_machine_does_not_raise_a_floor(threads: int, slower: float) -> None:
    core_s = {1: 1e-4, threads: 1.2e-4}
    quiet = {n: 1.1 * value / n if n > 1 else value for n, value in core_s.items()}
    busy = {n: slower * value for n, value in quiet.items()}
    alone = Parts(quiet, core_s, {1: 1e-3})
    beside = Parts(busy, core_s, {1: 1e-3})
    assert beside.quiet_train_token_s == pytest.approx(alone.quiet_train_token_s)
    assert beside.contention == pytest.approx(slower)


def test_the_slowest_trajectory_is_that_with_waits_and_tokens_together() -> None:
    batches = [
        [Size(100, 100), Size(10, 5, 3.0)],
        [Size(100, 100), Size(10, 5, 0.01)],
    ]
    demand = demand_of(batches, alone_token_s=0.01)
    assert demand == Demand(110, 105, (5 + 100) / 2, 1.5)
    double = demand.with_sampled(210)
    assert (double.tokens, double.sampled, double.longest_tokens) == (220, 210, 52.5)
