"""The roofline: closed forms against naive sums, hand-computed costs, refusals."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from dora_rl.simulator.cost_parameters import (
    DEVICES,
    Device,
    Efficiency,
    Model,
    NamedDevice,
    device_named,
)
from dora_rl.simulator.costs import STEP_TOLERANCE, Costs, DecodeCost

DENSE = Model(parameters=32.8e9, layers=64, heads=40, kv_heads=8, head_dim=128)
EXPERTS = Model(
    parameters=560e9,
    active_parameters=27e9,
    layers=28,
    heads=64,
    kv_heads=8,
    head_dim=128,
    experts=512,
    experts_per_token=12,
)
ADAPTERS = EXPERTS.model_copy(update={"lora_rank": 64})
H800 = device_named("H800")
# Round figures, so that costs can be checked by hand.
SIMPLE = Model(parameters=1e9, layers=10, heads=8, kv_heads=2, head_dim=100)
ROUND = Device(
    flops=1e13,
    memory_bytes=10e9,
    memory_bandwidth=1e12,
    interconnect_bandwidth=1e9,
    host_bandwidth=2e9,
)
IDEAL = Efficiency(
    compute_efficiency=1,
    bandwidth_efficiency=1,
    prefill_efficiency=1,
    train_efficiency=1,
    transfer_efficiency=1,
    kv_memory_fraction=1,
    recompute_factor=1,
    decode_overhead_s=0.001,
    train_overhead_s=3,
    update_overhead_s=0.25,
    publish_streams=4,
    publish_latency_s=0.5,
    install_latency_s=0.25,
    transfer_latency_s=0.125,
    switch_s=7,
)


def simple_costs(**changes: int) -> Costs:
    return Costs(SIMPLE, ROUND, IDEAL, **changes)


def naive(decode: DecodeCost, n: int, context: int, k: int, versions: int) -> float:
    return math.fsum(decode.step_time(n, context + n * i, versions) for i in range(k))


def decode_of(model: Model, flops: float, bandwidth: float, overhead_s: float) -> DecodeCost:
    device = H800.model_copy(update={"flops": flops, "memory_bandwidth": bandwidth})
    return DecodeCost(model, device, Efficiency(decode_overhead_s=overhead_s), 2)


# Peaks over six decades in either direction: memory bound, compute bound, and every crossing.
decodes = st.builds(
    decode_of,
    st.sampled_from([DENSE, EXPERTS, SIMPLE, ADAPTERS]),
    st.floats(1e10, 1e16),
    st.floats(1e9, 1e15),
    st.sampled_from([0.0, 1e-6, 0.004]),
)
batches = st.integers(1, 2048)
contexts = st.integers(0, 5_000_000)
versions = st.integers(1, 4)


@given(decodes, batches, contexts, st.integers(0, 400), versions)
def test_steps_time_is_the_sum_of_steps(
    decode: DecodeCost, n: int, context: int, k: int, num_versions: int
) -> None:
    expected = naive(decode, n, context, k, num_versions)
    assert decode.steps_time(n, context, k, num_versions) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("first", "flops", "n", "context"),
    [("memory", 4e12, 2, 374_000), ("compute", 8e12, 20, 1_400_000)],
)
def test_steps_time_is_exact_across_the_crossing(
    first: str, flops: float, n: int, context: int
) -> None:
    decode = decode_of(SIMPLE, flops, 1e12, 0.0)

    def bound(tokens: int) -> str:
        # SIMPLE reads 8 kB of KV and spends 32 kFLOP of attention per context token; two
        # devices at the default efficiencies of 0.75 and 0.6.
        memory = (2e9 + 8e3 * tokens) / 1.5e12
        compute = (n * 2e9 + 32e3 * tokens) / (1.2 * flops)
        return "memory" if memory > compute else "compute"

    assert bound(context) == first
    assert bound(context + n * 1000) != first
    for k in (1, 2, 10, 499, 500, 501, 502, 832, 833, 834, 835, 1000, 5000):
        seconds = decode.steps_time(n, context, k)
        assert seconds == pytest.approx(naive(decode, n, context, k, 1), rel=1e-12)
        assert decode.steps_within(n, context, seconds) == k


@given(decodes, batches, contexts, st.integers(0, 200_000), versions)
@example(decode_of(DENSE, 989e12, 3.35e12, 0.004), 64, 128_000, 30_000, 1)
def test_steps_within_inverts_steps_time(
    decode: DecodeCost, n: int, context: int, k: int, num_versions: int
) -> None:
    seconds = decode.steps_time(n, context, k, num_versions)
    assert decode.steps_within(n, context, seconds, num_versions) == k
    # Virtual time is a sum of floats: an instant a few ulps early is still the same instant.
    assert decode.steps_within(n, context, seconds * (1 - 1e-14), num_versions) == k


@given(decodes, batches, contexts, st.floats(0, 100), versions)
def test_steps_within_is_the_largest_count_that_fits(
    decode: DecodeCost, n: int, context: int, seconds: float, num_versions: int
) -> None:
    k = decode.steps_within(n, context, seconds, num_versions)
    slack = 2 * STEP_TOLERANCE * decode.step_time(n, context + n * k, num_versions)
    slack += 1e-12 * seconds
    assert decode.steps_time(n, context, k, num_versions) <= seconds + slack
    assert decode.steps_time(n, context, k + 1, num_versions) > seconds - slack


@given(decodes, batches, contexts, st.floats(0, 100), st.floats(0, 100))
def test_steps_within_is_monotonic(
    decode: DecodeCost, n: int, context: int, one: float, other: float
) -> None:
    early, late = sorted((one, other))
    assert decode.steps_within(n, context, early) <= decode.steps_within(n, context, late)


def test_no_steps_take_no_time() -> None:
    decode = simple_costs().decode
    assert decode.steps_time(8, 100, 0) == 0.0
    assert decode.steps_within(8, 100, 0.0) == 0
    assert decode.steps_within(8, 100, -1.0) == 0


def test_decode_step_by_hand() -> None:
    decode = simple_costs().decode
    # One sequence is memory bound: 2 GB of weights, and 2*10*2*100*2 = 8 kB of KV per token.
    assert decode.step_time(1, 1000) == pytest.approx((2e9 + 8e6) / 1e12 + 0.001)
    # A hundred are compute bound: 2 FLOP per weight each, and 4*10*8*100 FLOP per token attended.
    assert decode.step_time(100, 1000) == pytest.approx((200e9 + 32e6) / 1e13 + 0.001)


def test_every_version_in_a_batch_reads_its_weights() -> None:
    decode = simple_costs().decode
    assert decode.step_time(1, 0, 3) - decode.step_time(1, 0, 1) == pytest.approx(2 * 2e9 / 1e12)


def test_expert_imbalance_stretches_compute_only() -> None:
    stretched = IDEAL.model_copy(update={"expert_imbalance": 2.0})
    decode, slower = simple_costs().decode, Costs(SIMPLE, ROUND, stretched).decode
    assert slower.step_time(1, 0) == pytest.approx(decode.step_time(1, 0))
    assert slower.step_time(100, 0) - 0.001 == pytest.approx(2 * (decode.step_time(100, 0) - 0.001))


def test_a_batch_reads_the_experts_that_it_touches() -> None:
    model = Model(
        parameters=100e9,
        active_parameters=28e9,
        layers=10,
        heads=8,
        kv_heads=2,
        head_dim=100,
        experts=10,
        experts_per_token=1,
    )
    # 100 = shared + routed, 28 = shared + routed / 10.
    assert model.expert_parameters == pytest.approx(80e9)
    assert model.weight_bytes_read(1) == pytest.approx(2 * 28e9)
    assert model.weight_bytes_read(2) == pytest.approx(2 * (20e9 + 80e9 * (1 - 0.9**2)))
    assert model.weight_bytes_read(1000) == pytest.approx(model.weight_bytes)
    big = ROUND.model_copy(update={"memory_bytes": 1e12})
    costs = Costs(model, big, IDEAL)
    assert costs.decode.step_time(1, 0) == pytest.approx(2 * 28e9 / 1e12 + 0.001)
    # Two versions with one sequence each read what one sequence reads, twice.
    assert costs.decode.step_time(2, 0, 2) == pytest.approx(2 * 2 * 28e9 / 1e12 + 0.001)
    assert costs.prefill_time(1) == pytest.approx(2 * 28e9 / 1e12)


def test_dense_model_reads_everything() -> None:
    assert DENSE.active == DENSE.parameters
    assert DENSE.expert_parameters == 0
    assert DENSE.weight_bytes_read(1) == DENSE.weight_bytes == 65.6e9
    assert DENSE.kv_bytes_per_token == 262_144


def test_prefill_by_hand() -> None:
    costs = simple_costs()
    assert costs.prefill_time(0) == 0.0
    # One token is bound by reading the weights.
    assert costs.prefill_time(1) == pytest.approx(2e9 / 1e12)
    pairs = 100 * 50 + 100 * 101 / 2
    assert costs.prefill_time(100, 50) == pytest.approx((100 * 2e9 + 32_000 * pairs) / 1e13)
    # One token behind a very long context is bound by reading its KV.
    slow = ROUND.model_copy(update={"memory_bandwidth": 1e9})
    assert Costs(SIMPLE, slow, IDEAL).prefill_time(1, 10**6) == pytest.approx(2 + 8)


@given(st.integers(0, 5000), st.integers(1, 5000), st.integers(0, 5000))
def test_prefill_in_two_parts_is_never_cheaper(head: int, tail: int, context: int) -> None:
    costs = simple_costs()
    parts = costs.prefill_time(head, context) + costs.prefill_time(tail, context + head)
    assert parts >= costs.prefill_time(head + tail, context) * (1 - 1e-12)


def test_more_devices_are_faster_in_proportion() -> None:
    one, four = simple_costs(), simple_costs(devices_per_instance=4)
    assert four.prefill_time(100) == pytest.approx(one.prefill_time(100) / 4)
    assert four.kv_transfer_time(1000) - 0.125 == pytest.approx(
        (one.kv_transfer_time(1000) - 0.125) / 4
    )


def test_kv_capacity_by_hand() -> None:
    assert simple_costs().kv_capacity_tokens == (10e9 - 2e9) / 8e3
    assert simple_costs(version_slots=3).kv_capacity_tokens == (10e9 - 6e9) / 8e3
    assert simple_costs(devices_per_instance=2).kv_capacity_tokens == (20e9 - 2e9) / 8e3


def test_weights_that_do_not_fit_are_refused_with_numbers() -> None:
    with pytest.raises(
        ValueError, match=r"1 device\(s\) offer 72\.0 GB.* 2 version\(s\).*131\.2 GB"
    ):
        Costs(DENSE, H800, version_slots=2)
    with pytest.raises(ValueError, match="Raise devices_per_instance or lower version_slots"):
        simple_costs(version_slots=5)


@pytest.mark.parametrize("name", ["devices_per_instance", "version_slots"])
def test_counts_below_one_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be >= 1: `0`"):
        simple_costs(**{name: 0})


def test_training_by_hand() -> None:
    costs = simple_costs()
    assert costs.train_time(1000, 2, 4) == pytest.approx(6e9 * 1000 / 2e13 + 3 + 4 * 0.25)
    attended = costs.train_time(1000, 2, 4, attended_pairs=1e6) - costs.train_time(1000, 2, 4)
    assert attended == pytest.approx(3 * 32_000 * 1e6 / 2e13)
    recompute = IDEAL.model_copy(update={"recompute_factor": 4 / 3})
    assert Costs(SIMPLE, ROUND, recompute).train_time(1000, 1) == pytest.approx(0.8 + 3.25)


def test_copies_by_hand() -> None:
    costs = simple_costs(devices_per_instance=2)
    assert costs.publish_time(2) == pytest.approx(0.5 + 2e9 / 2e9)
    # No more than `publish_streams` senders.
    assert costs.publish_time(100) == pytest.approx(0.5 + 2e9 / 4e9)
    assert costs.install_time() == pytest.approx(0.25 + 2e9 / 2e9)
    assert costs.install_time(from_host=True) == pytest.approx(0.25 + 2e9 / 4e9)
    assert costs.kv_transfer_time(1000) == pytest.approx(0.125 + 8e6 / 2e9)
    assert costs.park_time(1000) == pytest.approx(0.125 + 8e6 / 4e9)
    assert costs.switch_time() == 7


def test_devices_are_found_by_name_or_given_by_figures() -> None:
    class Section(BaseModel):
        device: NamedDevice

    assert Section.model_validate({"device": "h800"}).device == DEVICES["H800"]
    assert Section.model_validate({"device": ROUND.model_dump()}).device == ROUND
    with pytest.raises(ValidationError, match=r"unknown device: `H80`\. Did you mean `H800`"):
        Section.model_validate({"device": "H80"})
    with pytest.raises(ValueError, match=r"unknown device: `x`\. Known: A100, H100"):
        device_named("x")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parameters": -1}, "greater than 0"),
        ({"parameters": math.nan}, "finite"),
        ({"layer": 3}, "Extra inputs"),
        ({"active_parameters": 2e9}, "active_parameters must be <= parameters"),
        ({"kv_heads": 9}, r"kv_heads must be <= heads \(8\): `9`"),
        ({"experts": 8}, "go together"),
        ({"experts": 8, "experts_per_token": 8}, r"experts_per_token must be < experts \(8\)"),
        (
            {"experts": 8, "experts_per_token": 4, "active_parameters": 1e8},
            r"active_parameters must be >= .*5e\+08",
        ),
    ],
)
def test_impossible_models_are_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Model.model_validate({**SIMPLE.model_dump(), **changes})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("compute_efficiency", 1.1),
        ("bandwidth_efficiency", 0),
        ("expert_imbalance", 0.9),
        ("recompute_factor", 0.5),
        ("decode_overhead_s", -1),
        ("publish_streams", 0),
        ("unknown", 1),
    ],
)
def test_impossible_knobs_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValidationError, match=name):
        Efficiency.model_validate({name: value})


def test_parameters_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        DENSE.layers = 3  # type: ignore[misc]
