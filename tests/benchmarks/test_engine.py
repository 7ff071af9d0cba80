"""What is asked of whom, in which order, and what comes out; and each contestant for real."""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dora_rl.benchmarks import engine
from dora_rl.benchmarks.contestants import common, roster
from dora_rl.benchmarks.contestants.process import ContestantFailed, start_all
from dora_rl.benchmarks.contestants.samples import seconds_of
from dora_rl.benchmarks.dtypes import DtypeChoice
from dora_rl.benchmarks.engine import GOALS, Plan, Result, measure
from dora_rl.benchmarks.models import open_model
from dora_rl.benchmarks.reporting import Reporter
from dora_rl.core.protocol.errors import UserError
from tests.benchmarks import stubs

SPEEDS = {"ours": (1.0, 0.5), "hf": (2.0, 2.0), "vllm": (0.5, 0.25)}  # first token, each further
SMALL = Plan(
    model="tiny",
    batches=(2, 1),
    prompt_tokens=4,
    new_tokens=3,
    repeats=2,
    threads=1,
    dtype="bfloat16",
)


class Fake:
    """A contestant in this process, which writes down what it was asked."""

    def __init__(self, name: str, log: list[tuple[str, dict[str, Any]]]) -> None:
        self.name, self.log = name, log
        self.cpu = 0.0

    def ask(self, request: str, **given: Any) -> Any:
        self.log.append((self.name, {"do": request, **given}))
        if request == "limits":
            return stubs.LIMITS
        if request == "about":
            return {"version": "1", "notes": [f"I am {self.name}"]}
        first, more = SPEEDS[self.name]
        tokens = len(given["prompts"]) * given["new_tokens"]
        seconds = first + more * (given["new_tokens"] - 1)
        return {"seconds": seconds, "tokens": tokens, "logprobs": tokens}

    def cpu_s(self) -> float:
        return self.cpu

    def settle(self) -> bool:
        return True


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Every request, while contestants are fakes."""
    asked: list[tuple[str, dict[str, Any]]] = []

    def fakes(stack: ExitStack, starts: Sequence[Any], *rest: Any) -> list[Fake]:
        return [Fake(start.name, asked) for start in starts]

    monkeypatch.setattr(engine, "start_all", fakes)
    monkeypatch.setattr(roster, "find_python", lambda: Path("python"))
    return asked


def against(*others: str, **changes: Any) -> Plan:
    given = {name: getattr(SMALL, name) for name in SMALL.__dataclass_fields__}
    return Plan(**{**given, "against": others, **changes})


def test_contestants_take_turns_in_alternating_order(log: list[Any]) -> None:
    measure(against("hf", "vllm"))
    asked = [(name, r["new_tokens"]) for name, r in log if r["do"] == "generate"]
    warm = [("ours", 3), ("hf", 3), ("vllm", 3)]
    there = [(name, tokens) for name in ("ours", "hf", "vllm") for tokens in (1, 3)]
    back = [(name, tokens) for name in ("vllm", "hf", "ours") for tokens in (1, 3)]
    assert asked == (warm + there + back) * 2


def test_all_get_the_same_prompts_and_nobody_gets_one_twice(log: list[Any]) -> None:
    measure(against("hf"))
    by_name: dict[str, list[Any]] = {"ours": [], "hf": []}
    for name, request in log:
        if request["do"] == "generate":
            by_name[name].append((request["prompts"], request["new_tokens"]))
    assert by_name["ours"] != []
    assert sorted(by_name["ours"]) == sorted(by_name["hf"])
    prompts = [tuple(prompt) for batch, _ in by_name["ours"] for prompt in batch]
    assert len(set(prompts)) == len(prompts)
    assert {len(prompt) for prompt in prompts} == {4}
    assert all(0 <= token < 512 for prompt in prompts for token in prompt)


def test_rates_ratios_and_limits_by_hand(log: list[Any]) -> None:
    result = measure(against("hf", "vllm"))
    report = result.to_json()
    assert list(report["batches"]) == ["1", "2"]
    two = report["batches"]["2"]
    # 2 rows, 2 tokens beyond the first, each 0.5 s
    assert two["ours"]["decode_tokens_per_s"] == 4.0
    assert two["ours"]["prefill_tokens_per_s"] == 2 * 4 / 1.0
    assert two["ours"]["samples"] == [{"prefill_s": 1.0, "total_s": 2.0}] * 2
    assert two["ratios"] == {"ours/hf": 4.0, "ours/vllm": 0.5}
    assert two["prefill_ratios"] == {"ours/hf": 2.0, "ours/vllm": 0.5}
    assert report["limits"] == stubs.LIMITS
    assert two["roofline_tokens_per_s"] == result.roofline(2).tokens_per_s
    assert two["roofline_share"] == pytest.approx(4.0 / result.roofline(2).tokens_per_s)
    assert two["rooflines"].keys() == {"bfloat16", "float32"}
    assert two["rooflines"]["bfloat16"]["tokens_per_s"] == two["roofline_tokens_per_s"]
    assert report["goals"]["ours/hf"] == {"wanted": 4.0, "measured": 4.0, "met": True}
    assert report["goals"]["ours/vllm"] == {"wanted": 1.0, "measured": 0.5, "met": False}
    assert report["goals"].keys() == GOALS.keys()
    assert report["contestants"]["hf"]["idle_cpu_share"] == 0.0


def test_vllm_counts_at_every_batch_and_the_others_at_one(
    log: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = Fake.ask

    def slower_in_pairs(self: Fake, request: str, **given: Any) -> Any:
        answer = ask(self, request, **given)
        if self.name == "ours" and len(given.get("prompts", ())) == 2:
            answer["seconds"] *= 10
        return answer

    monkeypatch.setattr(Fake, "ask", slower_in_pairs)
    result = measure(against("hf", "vllm", batches=(2, 1)))
    goals = result.goals()
    assert goals["ours/hf"]["measured"] == result.ratio(2, "hf") == 0.4
    assert not goals["ours/hf"]["met"]
    assert goals["ours/vllm"]["measured"] == result.ratio(2, "vllm")
    assert goals["ours/vllm"]["measured"] < result.ratio(1, "vllm")
    assert goals["roofline_share"]["measured"] == result.roofline_share(2)


def test_the_summary_is_a_table_and_says_what_must_be_known(log: list[Any]) -> None:
    lines = measure(against("hf", "vllm")).summary()
    assert lines[0].startswith("tiny, a random Llama, bfloat16, 1 threads, 4 tokens read and 3")
    names = ["ours", "hf", "vllm"]
    assert lines[2].split() == [
        *("batch", *names, "ours/hf", "ours/vllm", "tokens/s", "share", *names)
    ]
    assert lines[4].split()[:6] == ["2", "4.0", "1.0", "8.0", "4.00", "0.50"]
    assert "Goal ours/vllm >= 1: 0.50, not met." in lines
    assert "Note: vllm: I am vllm." in lines
    alone = measure(against()).summary()
    assert alone[2].split() == ["batch", "ours", "tokens/s", "share", "ours"]


def test_an_idle_contestant_that_computes_is_told_of(
    log: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def spinning(self: Fake) -> float:
        self.cpu += 1.0 if self.name == "hf" else 0.0
        return self.cpu

    monkeypatch.setattr(Fake, "cpu_s", spinning)
    notes = measure(against("hf")).to_json()["notes"]
    assert any(note.startswith("hf used ") for note in notes)
    assert not any(note.startswith("ours used ") for note in notes)


def test_noise_that_hides_everything_is_told_and_meets_no_goal(
    log: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SPEEDS, "ours", (1.0, -0.1))
    result = measure(against("hf"))
    assert result.to_json()["batches"]["1"]["ours"]["decode_tokens_per_s"] is None
    assert not any(goal["met"] for goal in result.goals().values())
    assert any("2 of 2 repeats do not count" in line for line in result.summary())


def test_a_contestant_that_skips_work_is_refused(
    log: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = Fake.ask

    def lazy(self: Fake, request: str, **given: Any) -> Any:
        answer = ask(self, request, **given)
        return {**answer, "tokens": 1} if self.name == "hf" and "tokens" in answer else answer

    monkeypatch.setattr(Fake, "ask", lazy)
    with pytest.raises(ContestantFailed, match="hf was to generate 3 tokens, and gave `1`"):
        measure(against("hf"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batches": ()}, "--batches is empty"),
        ({"batches": (8, -1)}, "--batches must be >= 1: `-1`"),
        ({"batches": (8, 8)}, "--batches names a number twice: `8,8`"),
        ({"prompt_tokens": 0}, "--prompt-tokens must be >= 1: `0`"),
        ({"new_tokens": 1}, "--new-tokens must be >= 2: `1`"),
        ({"repeats": 0}, "--repeats must be >= 1: `0`"),
        ({"threads": 0}, "--threads must be >= 1: `0`"),
        ({"threads": 4096}, "--threads must be <= .*processors.*`4096`"),
        ({"dtype": "int8"}, "--dtype must be one of bfloat16, float32: `int8`"),
        ({"against": ("me",)}, "no such contestant: `me`"),
        ({"model": "nothing"}, "no such model: `nothing`"),
    ],
)
def test_bad_plans_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        against(**changes)


def test_a_sequence_must_fit_the_context(log: list[Any]) -> None:
    with pytest.raises(UserError, match=r"sequences of 8193 tokens.*`8192`\. Give fewer"):
        measure(against(prompt_tokens=8000, new_tokens=193))
    assert log == []


@pytest.mark.slow
def test_the_same_work_from_ours_and_from_transformers(tmp_path: Path) -> None:
    """For real, on a tiny model: both answer with all tokens and log-probabilities."""
    model = open_model("tiny", None, tmp_path)
    shape = roster.Shape(batch=2, prompt_tokens=4, new_tokens=3, threads=1)
    starts = [roster.ours(model, shape, tmp_path), roster.other("hf", model, shape)]
    with ExitStack() as stack:
        for member in start_all(stack, starts, tmp_path, Reporter()):
            assert member.ask("about")["threads"] == 1
            for batch, tokens in ((1, 1), (2, 3), (2, 3)):
                prompts = common.prompts(f"{batch}/{tokens}", model.config, batch, 4)
                done = member.ask("generate", prompts=prompts, new_tokens=tokens)
                assert seconds_of(member.name, done, batch * tokens) > 0


def test_the_limits_are_measured_for_real(tmp_path: Path) -> None:
    with ExitStack() as stack:
        (machine,) = start_all(stack, [roster.machine(1)], tmp_path, Reporter())
        limits = machine.ask("limits", read_bytes=1 << 20, mm_size=64)
        assert limits.keys() == stubs.LIMITS.keys()
        assert machine.ask("peaks", mm_size=64).keys() == limits["mm_flops_per_s"].keys()


def test_the_result_names_what_was_measured(log: list[Any]) -> None:
    result: Result = measure(SMALL)
    report = result.to_json()
    assert report["model"] == {
        "title": "tiny, a random Llama",
        "dtype": "bfloat16",
        "parameters": result.model.parameters,
    }
    assert (report["threads"], report["repeats"]) == (1, 2)
    assert (report["prompt_tokens"], report["new_tokens"]) == (4, 3)


def test_what_was_measured_can_be_shown_at_any_moment(log: list[Any]) -> None:
    shown = stubs.interrupted_everywhere(partial(measure, against("hf", "vllm")))
    first, last = shown[0], shown[-1]
    assert isinstance(first, Result) and isinstance(last, Result)
    assert {batch: set(row) for batch, row in first.batches.items()} == {1: {"ours"}}
    assert first.ratio(1, "hf") is None and first.goals()["ours/hf"]["met"] is False
    assert last.batches.keys() == {1, 2}


def test_repeats_that_do_not_fit_are_left_out_and_told_of(
    log: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "repeats", lambda count, budget_s: range(count - 1))
    result = measure(against("hf", repeats=3, phase_seconds=7))
    samples = result.to_json()["batches"]["2"]["hf"]["samples"]
    assert len(samples) == 2
    assert "Note: batch 2: 2 of 3 repeats within --phase-seconds 7." in result.summary()


def test_the_chosen_dtype_is_told_with_its_reason(
    log: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def chosen(name: str, dtype: str | None, work: Path, reporter: Reporter) -> Any:
        return open_model(name, "float32", work), DtypeChoice("float32", "It is fast.", {"x": 1.0})

    monkeypatch.setattr(engine, "open_in_best_dtype", chosen)
    result = measure(against(dtype=None))
    assert "Note: It is fast." in result.summary()
    assert result.to_json()["dtype_choice"] == {
        "reason": "It is fast.",
        "mm_flops_per_s": {"x": 1.0},
    }
