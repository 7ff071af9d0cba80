"""LoRA versions: one base for the whole batch, small versions, a trainer without its gradients."""

import pytest

from dora_rl import cli
from dora_rl.core.protocol.settings import ParadigmName
from dora_rl.simulator.cost_parameters import LORA_DECODE_SLOWDOWN, Efficiency, Model
from dora_rl.simulator.costs import Costs
from dora_rl.simulator.planning.shapes import SHAPES
from dora_rl.simulator.scenarios import load_scenario
from dora_rl.simulator.simulate import simulate
from tests.simulator.test_costs import EXPERTS, H800, IDEAL, ROUND, SIMPLE

RANK = 16
# 10 layers of 16 x (inputs + outputs): 800 wide, keys and values 200, a feed-forward of 41,000.
ADAPTER = 10 * RANK * (2 * (800 + 800) + 2 * (800 + 200) + 3 * (800 + 41_000))
FREE = IDEAL.model_copy(update={"lora_decode_slowdown": 1.0})


def lora(model: Model, **changes: float) -> Model:
    return Model.model_validate({**model.model_dump(), "lora_rank": RANK, **changes})


def tokens_per_s(costs: Costs, num: int, versions: int) -> float:
    return num / costs.decode.step_time(num, num * 1000, versions)


# The adapter


def test_the_adapter_by_hand() -> None:
    model = lora(SIMPLE)
    assert model.adapter_parameters == pytest.approx(ADAPTER)
    assert model.version_bytes == pytest.approx(2 * ADAPTER)
    assert model.adapter_flops_per_token == pytest.approx(2 * ADAPTER)
    assert lora(SIMPLE, lora_rank=2 * RANK).adapter_parameters == pytest.approx(2 * ADAPTER)
    assert lora(SIMPLE, lora_parameters=1e6).version_bytes == 2e6


@pytest.mark.parametrize(
    ("name", "counted"),  # all linear layers, rank 16
    [("qwen2.5-7b", 40.37e6), ("llama-3-8b", 41.94e6), ("qwen2.5-0.5b", 8.8e6)],
)
def test_the_estimate_is_near_what_real_adapters_have(name: str, counted: float) -> None:
    estimated = lora(SHAPES[name]).adapter_parameters
    assert counted <= estimated <= 1.3 * counted


def test_routed_experts_have_no_adapters() -> None:
    wide, narrow = 64 * 128, 8 * 128
    ports = 2 * (wide + wide) + 2 * (wide + narrow)
    assert lora(EXPERTS).adapter_parameters == RANK * 28 * ports


def test_without_a_rank_nothing_of_it_counts() -> None:
    assert (SIMPLE.adapter_parameters, SIMPLE.adapter_flops_per_token) == (0.0, 0.0)
    assert SIMPLE.version_bytes == SIMPLE.weight_bytes
    slow = Efficiency(lora_decode_slowdown=5.0)
    mine, theirs = Costs(SIMPLE, ROUND, slow), Costs(SIMPLE, ROUND, Efficiency())
    for versions in (1, 3):
        step = mine.decode.step_time(8, 100, versions)
        assert step == theirs.decode.step_time(8, 100, versions)
    assert mine.prefill_time(100) == theirs.prefill_time(100)
    assert mine.train_time(100, 1) == theirs.train_time(100, 1)


# Decode


def test_a_batch_of_many_adapters_decodes_as_one_of_one() -> None:
    adapters = Costs(lora(SHAPES["qwen2.5-7b"]), H800, version_slots=8)
    full = Costs(SHAPES["qwen2.5-7b"], H800.model_copy(update={"memory_bytes": 1e12}))
    for versions in (2, 4, 8):
        kept = tokens_per_s(adapters, 16, versions) / tokens_per_s(adapters, 16, 1)
        lost = tokens_per_s(full, 16, versions) / tokens_per_s(full, 16, 1)
        assert kept >= 0.95
        assert lost < 0.75


def test_a_decode_step_with_adapters_by_hand() -> None:
    decode = Costs(lora(SIMPLE), ROUND, FREE).decode
    assert decode.step_time(1, 1000, 3) == pytest.approx(
        (2e9 + 3 * 2 * ADAPTER + 8e6) / 1e12 + 0.001
    )
    flops = 100 * (2e9 + 2 * ADAPTER) + 32e6
    assert decode.step_time(100, 1000, 3) == pytest.approx(flops / 1e13 + 0.001)


def test_the_experts_of_the_base_are_read_once_for_all_versions() -> None:
    big = H800.model_copy(update={"memory_bytes": 1e13})
    decode = Costs(lora(EXPERTS), big, FREE).decode
    one, four = (decode.step_time(64, 0, versions) for versions in (1, 4))
    adapters_s = 3 * lora(EXPERTS).version_bytes / big.memory_bandwidth
    assert four - one == pytest.approx(adapters_s, rel=1e-6)


def test_any_adapter_slows_the_whole_step_and_more_hardly_more() -> None:
    twice = IDEAL.model_copy(update={"lora_decode_slowdown": 2.0})
    free, slow = (Costs(lora(SIMPLE), ROUND, knobs).decode for knobs in (FREE, twice))
    for n, versions in ((1, 1), (1, 4), (100, 1), (100, 4)):
        step = free.step_time(n, 1000, versions)
        assert slow.step_time(n, 1000, versions) == pytest.approx(2 * step)
        many = slow.steps_time(n, 1000, 50, versions)
        assert many == pytest.approx(2 * free.steps_time(n, 1000, 50, versions))
        assert slow.steps_within(n, 1000, many, versions) == 50
    assert Efficiency().lora_decode_slowdown == LORA_DECODE_SLOWDOWN > 1


# Memory, copies, training


def test_further_adapters_leave_the_kv_memory_alone() -> None:
    def capacity(model: Model, slots: int) -> int:
        return Costs(model, ROUND, IDEAL, version_slots=slots).kv_capacity_tokens

    by_hand = (10e9 - 2e9 - 4 * 2 * ADAPTER) / 8e3
    assert capacity(lora(SIMPLE), 4) == pytest.approx(by_hand, abs=1)
    assert capacity(lora(SIMPLE), 4) > 0.97 * capacity(lora(SIMPLE), 1)
    assert capacity(SIMPLE, 4) < 0.3 * capacity(SIMPLE, 1)
    with pytest.raises(ValueError, match=r"2 adapter\(s\) and their base take 66\.2 GB"):
        tight = H800.model_copy(update={"memory_bytes": 66e9})
        Costs(lora(SHAPES["qwen2.5-32b"]), tight, version_slots=2)


def test_a_version_moves_as_an_adapter() -> None:
    costs = Costs(lora(SIMPLE), ROUND, IDEAL, devices_per_instance=2)
    assert costs.publish_time(4) == pytest.approx(0.5 + 2 * ADAPTER / 4e9)
    assert costs.install_time() == pytest.approx(0.25 + 2 * ADAPTER / 2e9)
    assert costs.install_time(from_host=True) == pytest.approx(0.25 + 2 * ADAPTER / 4e9)
    full = Costs(SIMPLE, ROUND, IDEAL, devices_per_instance=2)
    assert costs.install_time() < 0.3 * full.install_time()
    assert costs.kv_transfer_time(1000) == full.kv_transfer_time(1000)


def test_the_trainer_spares_the_gradients_of_the_base_alone() -> None:
    model = lora(SIMPLE, lora_parameters=1)  # too small to count
    fixed_s = 3 + 0.25

    def train_s(model: Model, recompute: float, pairs: float = 0.0) -> float:
        knobs = IDEAL.model_copy(update={"recompute_factor": recompute})
        return Costs(model, ROUND, knobs).train_time(1e6, 1, 1, pairs) - fixed_s

    assert train_s(model, 1.0) == pytest.approx(2 / 3 * train_s(SIMPLE, 1.0))
    # What is computed again is a whole forward.
    assert train_s(model, 4 / 3) == pytest.approx(3 / 4 * train_s(SIMPLE, 4 / 3))
    attention_s = [train_s(m, 1.0, 1e9) - train_s(m, 1.0) for m in (model, SIMPLE)]
    assert attention_s[0] == pytest.approx(attention_s[1])
    whole = lora(SIMPLE, lora_parameters=1e8)
    assert train_s(whole, 1.0) == pytest.approx((2 * 2e9 + 3 * 2e8) * 1e6 / 1e13)


# Scenarios

TINY = (
    "run.steps=5",
    "scenario.warmup_steps=2",
    "orchestration.groups_per_step=8",
    "orchestration.group_size=4",
    "cluster.devices=3",
    "cluster.train_devices=1",
    "efficiency.lora_decode_slowdown=1",
)


def test_a_scenario_of_adapters_has_room_for_every_live_version() -> None:
    rank = "model.lora_rank=16"
    assert load_scenario("default").rollout.version_slots == 1
    assert load_scenario("default", [rank]).rollout.version_slots == 4
    bound = "orchestration.max_staleness=1"
    assert load_scenario("default", [rank, bound]).rollout.version_slots == 2
    said = load_scenario("default", [rank, "rollout.version_slots=1"])
    assert said.rollout.version_slots == 1


def test_versions_that_share_a_batch_need_not_move() -> None:
    ours = ParadigmName.MULTI_VERSION
    names = {"full": (), "adapters": ("model.lora_rank=16",)}
    found = {
        name: simulate(load_scenario("default", [*TINY, *more], paradigms=[ours]), ours).summary
        for name, more in names.items()
    }
    full, adapters = found["full"], found["adapters"]
    assert full.audit_ok and adapters.audit_ok and full.max_versions_live > 2
    assert full.migrations > 0 == adapters.migrations
    assert adapters.tokens_per_s > 1.1 * full.tokens_per_s


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["model.lora_rank=0"], "model.lora_rank must be >= 1: `0`. Leave it out for full"),
        (["model.lora_rank=1.5"], "model.lora_rank must be an integer: `1.5`."),
        (["model.lora_rank=100000"], "smaller than the model (7.6e+09 parameters): `100000` makes"),
        (["model.lora_parameters=1e7"], "model.lora_parameters needs lora_rank: `1e+07`."),
        (["model.lora_rank=8", "model.lora_parameters=1e10"], "`1e+10` makes 1e+10. Use less"),
        (["efficiency.lora_decode_slowdown=0.5"], "lora_decode_slowdown must be >= 1.0: `0.5`."),
        (["lora_rank=8"], "Did you mean `model.lora_rank`"),
    ],
)
@pytest.mark.parametrize("command", ["simulate", "plan"])
def test_bad_values_are_refused_with_the_fix(
    command: str, values: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [part for value in values for part in ("--set", value)]
    assert cli.main([command, "default", *options]) == 2
    captured = capsys.readouterr()
    assert not captured.out
    assert message in captured.err


def test_constants_of_full_weights_are_not_those_of_adapters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    steps = ["--set", "run.steps=2", "--set", "scenario.warmup_steps=0"]
    small = ["--set", "orchestration.groups_per_step=8", "--set", "model.lora_rank=16"]
    small += ["--set", "orchestration.pipeline_depth=8", "--paradigms", "sync"]
    assert cli.main(["simulate", "paper-64", *steps, *small]) == 0
    assert "used for LoRA versions instead of full weights" in capsys.readouterr().err
