"""Plans of LoRA versions: when adapters pay against full weights, by how much, and how sure."""

import json
from dataclasses import replace
from math import inf

import pytest

from dora_rl import cli
from dora_rl.core.protocol.settings import ParadigmName
from dora_rl.simulator.planning import Plan, Question
from dora_rl.simulator.planning.adapters import SLOWDOWNS, search_full_weights
from dora_rl.simulator.planning.reduction import reduce, with_full_weights, without_own_sizes
from dora_rl.simulator.planning.search import OURS, choose
from dora_rl.simulator.scenarios import load_scenario
from tests.simulator.plans import LONG_TAIL, SMALL, interrupt_after, planned, searched

pytestmark = pytest.mark.slow
RANK = "model.lora_rank=16"
# Long prompts and short responses: training bounds the step.
TRAINING = Question(
    model="qwen2.5-1.5b",
    devices=4,
    batch=(16, 4),
    mean_length=100,
    max_length=400,
    overrides=(
        "rollout.slots=8",
        "efficiency.switch_s=2",
        "workload.prompt_tokens=16000",
        RANK,
    ),
)
SMALL_LORA = replace(SMALL, overrides=(*SMALL.overrides, RANK))


@pytest.fixture(scope="module")
def training() -> Plan:
    return planned(TRAINING)


@pytest.fixture(scope="module")
def long_tail() -> Plan:
    return planned(replace(LONG_TAIL, overrides=(*LONG_TAIL.overrides, RANK)))


def test_adapters_pay_where_training_bounds_the_step(training: Plan) -> None:
    found = training.adapters
    assert found is not None and found.full is not None and found.ratio is not None
    assert found.lora is training.best
    assert found.ratio == training.best.tokens_per_s / found.full.tokens_per_s > 1.05
    assert found.parts["train_s"].ratio < 0.95
    said = found.describe()
    assert f"train {found.ratio:.2f} times" in said and "adapters pay" in said
    report = training.to_json()["lora"]
    assert report["pay"] is True and report["speedup_over_full_weights"] == found.ratio
    assert report["reason"] == said


def test_adapters_do_not_pay_where_decode_bounds_the_step(long_tail: Plan) -> None:
    found = long_tail.adapters
    assert found is not None and found.ratio is not None
    assert found.ratio < 1 / 1.05
    assert found.parts["decode_step_s"].ratio == pytest.approx(1.3, rel=0.05)
    assert "adapters do not pay, and model.lora_rank is better left out" in found.describe()
    assert long_tail.to_json()["lora"]["pay"] is False


def test_full_weights_are_planned_as_if_nobody_had_said_lora(long_tail: Plan) -> None:
    full = planned(LONG_TAIL)
    assert full.adapters is None and "lora" not in full.to_json()
    found = long_tail.adapters
    assert found is not None and found.full is not None
    assert found.full.tokens_per_s == pytest.approx(full.best.tokens_per_s, rel=0.02)


def test_every_live_version_is_on_every_instance(long_tail: Plan) -> None:
    ours = [t.candidate for t in long_tail.trials if t.paradigm is OURS]
    assert ours[0].version_slots == ours[0].max_staleness + 1 > 2
    assert {c.version_slots for c in ours if c.version_slots != c.max_staleness + 1} == {1}


def test_the_slowdown_of_decode_is_varied_unless_it_was_measured(long_tail: Plan) -> None:
    found = long_tail.adapters
    assert found is not None and set(found.ratios) == {1.3, *SLOWDOWNS}
    low, planned_ratio, high = found.ratios.values()
    assert low > planned_ratio == found.ratio > high
    assert "Over the slowdown of decode by adapters: " in found.describe()
    given = (*SMALL_LORA.overrides, "efficiency.lora_decode_slowdown=1.5")
    measured = planned(replace(SMALL, overrides=given)).adapters
    assert measured is not None and set(measured.ratios) == {1.5}
    assert "Over the slowdown" not in measured.describe()


def test_the_reduced_problem_has_the_same_adapters() -> None:
    real = without_own_sizes(load_scenario("paper-64", [RANK]))
    small = reduce(real, 20_000, 3)
    assert small.peers > 1
    mine, theirs = (s.setup(ParadigmName.SYNC).params.costs() for s in (small.scenario, real))
    peers = small.peers
    assert mine.decode.step_time(8, 16_000, 3) == pytest.approx(
        theirs.decode.step_time(8 * peers, 16_000 * peers, 3)
    )
    assert mine.install_time() == pytest.approx(theirs.install_time())
    assert mine.train_time(1000, 4) == pytest.approx(theirs.train_time(1000 * peers, 4))
    full = with_full_weights(small)
    assert full.scenario == reduce(without_own_sizes(load_scenario("paper-64")), 20_000, 3).scenario


def test_the_trainer_of_adapters_needs_less_memory() -> None:
    question = Question(model="qwen2.5-7b", devices=8, batch=(8, 2), mean_length=100)
    # 16 bytes a parameter are 122 GB; the frozen weights alone are 15 of a device's 72 GB.
    assert searched(question).least_train == 2
    assert searched(replace(question, overrides=(RANK,))).least_train == 1


@pytest.mark.parametrize(("first_s", "then_s"), [(1e-9, inf), (inf, 1e-9)])
def test_neither_side_loses_by_an_early_end_of_the_budget(first_s: float, then_s: float) -> None:
    search = searched(replace(LONG_TAIL, overrides=(*LONG_TAIL.overrides, RANK)))
    search.budget_s = first_s
    search.run()
    search.budget_s = then_s
    mine = choose(search)[0].candidate
    other = search_full_weights(search)
    assert other is not None and search.cut == "budget"
    theirs = choose(other)[0].candidate
    assert mine.paradigm is theirs.paradigm is OURS
    assert replace(mine, version_slots=1) in other.trials
    assert replace(theirs, version_slots=theirs.max_staleness + 1) in search.trials


def test_every_run_is_announced() -> None:
    said: list[tuple[int, str]] = []
    planned(SMALL_LORA, progress=lambda done, what: said.append((done, what)))
    assert [done for done, _ in said] == list(range(len(said)))
    assert any(what.startswith("full weights, ") for _, what in said)
    assert any("adapters slow decode 2 times" in what for _, what in said)


def test_an_interruption_leaves_the_comparison_out(monkeypatch: pytest.MonkeyPatch) -> None:
    first = len(planned(SMALL).trials)
    interrupt_after(first + 6, monkeypatch)
    plan = planned(SMALL_LORA)
    found = plan.adapters
    assert plan.cut == "interrupted" and found is not None
    assert found.ratio is None and "not compared with full weights" in found.describe()
    assert plan.to_json()["lora"]["pay"] is None


def test_the_command_says_it_in_text_and_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "qwen2.5-1.5b", "--devices", "2", "--batch", "4x2", "--budget", "1e-9"]
    flags += ["--mean-length", "500", "--max-length", "1000", "--set", RANK]
    flags += ["--set", "rollout.slots=8"]
    assert cli.main(["plan", *flags]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "LoRA versions of rank 16 train " in text and "In this plan, against full" in text
    assert cli.main(["plan", *flags, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["problem"]["lora_rank"] == 16
    assert set(report["lora"]["parts"]) == {"train_s", "publish_s", "install_s", "decode_step_s"}
    assert " ".join(report["lora"]["reason"].split()) in text
