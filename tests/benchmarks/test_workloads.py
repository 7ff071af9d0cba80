"""Workloads: the shapes that they promise, and sizes that keep rollout's share on any machine."""

import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dora_rl.benchmarks import workload_tasks as tasks
from dora_rl.benchmarks.floors import Parts, Size
from dora_rl.benchmarks.modes import Plan
from dora_rl.benchmarks.workloads import (
    WORKLOADS,
    WorkloadName,
    describe,
    drained_s,
    sized,
    sync_step,
)
from dora_rl.core.protocol.settings import ParadigmName
from dora_rl.runtime.prepare.plan import read_config
from dora_rl.tasks import chains

PORTABLE = Parts({1: 1.3e-4}, {1: 1.3e-4}, {1: 2e-3, 16: 2.1e-4, 128: 9e-5})


@pytest.mark.parametrize("name", list(WorkloadName))
@pytest.mark.parametrize("paradigm", list(ParadigmName))
def test_every_workload_is_a_valid_configuration(
    name: WorkloadName, paradigm: ParadigmName
) -> None:
    plan = Plan.of(name, cores=2)
    config = read_config(plan.config(paradigm, plan.splits(paradigm)[0], 3))
    assert config.orchestration.groups_per_step == plan.groups
    assert (config.task.environment is not None) == (name is WorkloadName.AGENTIC)
    longest = max(s.tokens for batch in plan.workload.batches(plan.groups, 0) for s in batch)
    assert longest < config.rollout.max_tokens


def test_what_is_given_wins_over_the_workload() -> None:
    plan = Plan.of(WorkloadName.LONG, steps=None, group_size=2, max_staleness=9, cores=2)
    assert (plan.steps, plan.group_size, plan.max_staleness) == (20, 2, 9)
    assert len(plan.workload.batches(16, 0, 1)[0]) == 32


def test_lengths_of_reasoning_are_those_of_the_paper() -> None:
    shape = describe(WORKLOADS[WorkloadName.REASONING].batches(16, seed=0, count=250))
    assert shape["p99_over_mean"] == pytest.approx(5, rel=0.1)
    assert shape["max_over_mean"] == pytest.approx(12.5, rel=0.1)


@pytest.mark.parametrize("groups", [12, 16, 48, 200])
def test_every_batch_of_long_has_one_response_of_eight_times_the_mean(groups: int) -> None:
    for batch in WORKLOADS[WorkloadName.LONG].batches(groups, seed=1, count=8):
        lengths = [size.tokens for size in batch]
        assert lengths.count(max(lengths)) == 4  # a group
    shape = describe(WORKLOADS[WorkloadName.LONG].batches(groups, seed=1))
    assert shape["max_over_mean_in_a_batch"] == pytest.approx(8, rel=0.05)


def test_tools_of_agentic_are_long_tailed() -> None:
    workload = WORKLOADS[WorkloadName.AGENTIC]
    rows = [workload.row(position, 0, **workload.options) for position in range(3000)]
    waits = sorted(wait for row in rows for wait in row["waits_s"])
    assert statistics.median(waits) == pytest.approx(0.05, rel=0.1)
    assert waits[int(0.99 * len(waits))] == pytest.approx(2.0, rel=0.15)
    assert rows == [workload.row(position, 0, **workload.options) for position in range(3000)]


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from([WorkloadName.REASONING, WorkloadName.LONG]),
    st.floats(0.25, 2.0),
    st.floats(0.5, 2.0),
    st.floats(0.0, 0.05),
)
def test_rollout_keeps_its_share_on_machines_of_other_speeds(
    name: WorkloadName, training: float, decoding: float, overhead_s: float
) -> None:
    workload = WORKLOADS[name]
    parts = Parts(
        {1: 1.3e-4 * training},
        {1: 1.3e-4 * training},
        {rows: decoding * s for rows, s in PORTABLE.decode_token_core_s.items()},
    )
    groups = sized(workload, parts, cores=2, seed=0, overhead_s=overhead_s)
    rollout_s, train_s = sync_step(workload, parts, 2, 0, groups)
    share = (rollout_s + overhead_s) / (rollout_s + overhead_s + train_s)
    assert workload.band is not None
    # At the fewest prompts that the shape allows, a slow trainer can have more than its share.
    assert share <= workload.band.most
    assert share >= workload.band.least or groups == workload.fewest_groups


def test_without_a_band_the_size_is_the_workloads_own() -> None:
    for name in (WorkloadName.DEFAULT, WorkloadName.AGENTIC):
        assert sized(WORKLOADS[name], PORTABLE, 2, 0) == WORKLOADS[name].groups


def test_a_batch_is_drained_row_by_row() -> None:
    parts = Parts({1: 1.0}, {1: 1.0}, {1: 1.0, 2: 0.75})  # steps of 1 s alone, 1.5 s of two rows
    batch = [Size(10, 10), Size(4, 4)]
    assert drained_s(batch, parts, cores=1) == pytest.approx(4 * 1.5 + 6 * 1.0)
    assert drained_s(batch, parts, cores=2) == pytest.approx(10.0)
    assert drained_s([Size(1, 1, 2.0)], parts, cores=1) == pytest.approx(3.0)


def test_policy_and_tool_write_the_chain_together() -> None:
    row = tasks.tool_row(
        3, 0, fewest=3, most=3, median_wait_s=1e-6, wait_sigma=0.0, longest_wait_s=1.0
    )
    right = chains.solution(row["prompt"])
    tool = tasks.CountingTool()
    tool.reset(row)
    written = right[:3]
    for number in range(3):
        step = tool.step(right[6 * number : 6 * number + 3])
        assert not step.done and step.observation == right[6 * number + 3 : 6 * number + 6]
        written += step.observation
    last = tool.step(right[18:])
    assert (last.done, last.reward) == (True, 1.0)


def test_a_policy_that_makes_no_call_ends_its_episode() -> None:
    tool = tasks.CountingTool()
    tool.reset({"prompt": "87+05*03=", "waits_s": [0.0] * 3})
    assert tool.step("92") == (("", 0.0, True))
    tool.reset({"prompt": "87+05*01=", "waits_s": [0.0]})
