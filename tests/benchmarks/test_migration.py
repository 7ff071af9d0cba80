"""Moves of a trajectory: their order and arithmetic with fakes, then for real on a tiny model."""

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dora_rl.benchmarks import migration
from dora_rl.benchmarks.migration import COMPARED, Length, Move, Plan, measure
from dora_rl.core.protocol.errors import UserError
from dora_rl.engines.registry import EngineName
from tests.benchmarks import stubs

STAYED = list(range(100, 100 + COMPARED))


class Fake:
    """A side of the move. `goes_on` is what it makes of a trajectory that came by each way."""

    def __init__(self, name: str, log: list[Any], goes_on: dict[str, list[int]]) -> None:
        self.name, self._log, self._goes_on = name, log, goes_on
        self._answers: list[Any] = []
        self._way = "stay"

    def settle(self) -> bool:
        return True

    def ask(self, request: str, **given: Any) -> Any:
        self.send(request, **given)
        return self.receive()

    def send(self, request: str, **given: Any) -> None:
        self._log.append((self.name, request, given))
        answer: Any
        match request:
            case "begin":
                self._way = "stay" if self.name == "source" else "reprefill"
                answer = [99] if self.name == "source" else self._goes_on[self._way][:1]
            case "hand_over":
                answer = {"export_s": 0.25, "bytes": 1000}
            case "take_over":
                self._way = "kv"
                tokens = self._goes_on[self._way][:1]
                answer = {"transfer_s": 0.5, "import_s": 1.0, "tokens": tokens}
            case "go_on":
                tokens = self._goes_on[self._way]
                answer = tokens[len(tokens) - given["count"] :]
            case "empty":
                answer = None
        self._answers.append(answer)

    def receive(self) -> Any:
        return self._answers.pop(0)


def moved(monkeypatch: pytest.MonkeyPatch, plan: Plan, **goes_on: list[int]) -> Any:
    """A measurement with fakes, and the log of what they were asked."""
    log: list[Any] = []
    ways = {"stay": STAYED, "kv": STAYED, "reprefill": STAYED, **goes_on}

    def fakes(stack: ExitStack, starts: Any, *rest: Any) -> list[Fake]:
        return [Fake(start.name, log, ways) for start in starts]

    monkeypatch.setattr(migration, "start_all", fakes)
    monkeypatch.setattr(migration, "_publish", lambda *given: Path("weights"))
    return measure(replace(plan, dtype="float32")), log


def test_both_ways_are_taken_in_alternating_order_and_find_nothing_cached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, log = moved(monkeypatch, Plan("tiny", (10,), repeats=2))
    emptied = [("target", "empty")]
    by_kv = [*emptied, ("target", "take_over"), ("source", "hand_over"), ("target", "go_on")]
    again = [*emptied, ("target", "begin"), ("target", "go_on")]
    begin, end = [("source", "begin")], [("source", "go_on")]
    warm_and_second = begin + by_kv + again + end
    first = begin + again + by_kv + end
    assert [entry[:2] for entry in log] == warm_and_second + first + warm_and_second


def test_the_target_is_given_all_that_the_source_knew(monkeypatch: pytest.MonkeyPatch) -> None:
    _, log = moved(monkeypatch, Plan("tiny", (2, 200), repeats=3))
    begun: dict[int, dict[str, Any]] = {}
    for name, request, given in log:
        if request == "begin" and name == "source":
            assert len(given["prompt"]) + len(given["prefix"]) in (2, 200)
            assert len(given["prompt"]) in (1, 64)
            begun[given["trajectory"]] = given
    for name, request, given in log:
        if request == "begin" and name == "target":
            there = begun[given["trajectory"]]
            assert given["prompt"] == there["prompt"]
            assert given["prefix"] == [*there["prefix"], 99]
            # Both may make the same number of tokens in all.
            assert len(given["prefix"]) + given["more"] == len(there["prefix"]) + there["more"]
    assert len({tuple(given["prompt"] + given["prefix"]) for given in begun.values()}) == 8


def test_a_continuation_that_differs_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan("tiny", (10,), repeats=3)
    same, _ = moved(monkeypatch, plan)
    assert same.lengths[0].mismatches == {"kv": 0, "reprefill": 0}
    for way in ("kv", "reprefill"):
        for place in (0, COMPARED - 1):  # the first token comes by another request than the rest
            other = [*STAYED]
            other[place] = 7
            result, _ = moved(monkeypatch, plan, **{way: other})
            assert result.lengths[0].mismatches == {"kv": 0, "reprefill": 0, way: 3}


def test_what_was_measured_can_be_shown_at_any_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan("tiny", (10, 20), repeats=2)
    moved(monkeypatch, plan)  # fakes from here on
    shown = stubs.interrupted_everywhere(partial(measure, replace(plan, dtype="float32")))
    assert list(shown[0].to_json()["tokens"]) == ["10"]
    assert list(shown[-1].to_json()["tokens"]) == ["10", "20"]


def test_moves_that_do_not_fit_are_left_out_and_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migration, "repeats", lambda count, budget_s: range(count - 1))
    result, _ = moved(monkeypatch, Plan("tiny", (10,), repeats=3, phase_seconds=7))
    assert len(result.lengths[0].moves) == 2
    assert "10 tokens: 2 of 3 repeats within --phase-seconds 7." in result.notes


def test_medians_by_hand() -> None:
    def move(kv_s: float, reprefill_s: float) -> Move:
        parts = {"export_s": kv_s / 4, "transfer_s": kv_s / 2, "import_s": kv_s / 4}
        return Move(kv_s, reprefill_s, 3_000_000, parts, True, False)

    length = Length(500, [move(1.0, 9.0), move(3.0, 6.0), move(2.0, 7.0)])
    assert (length.kv_s, length.reprefill_s, length.ratio) == (2.0, 7.0, 3.5)
    report = length.to_json()
    assert report["megabytes_per_s"] == 1.5
    assert report["reprefill/kv"] == 3.5
    assert report["kv_parts"] == {"export_s": 0.5, "transfer_s": 1.0, "import_s": 0.5}
    assert report["mismatches"] == {"kv": 0, "reprefill": 3}
    assert len(report["samples"]) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": ()}, "--tokens is empty"),
        ({"tokens": (1,)}, "--tokens must be >= 2: `1`"),
        ({"tokens": (-500,)}, "--tokens must be >= 1: `-500`"),
        ({"repeats": -1}, "--repeats must be >= 1: `-1`"),
        ({"model": "nothing"}, "no such model"),
    ],
)
def test_bad_plans_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Plan(**{"model": "tiny", **changes})


def test_a_trajectory_must_fit_the_context() -> None:
    with pytest.raises(UserError, match=r"--tokens .* 8193 tokens.*`8192`"):
        measure(Plan("tiny", (8192 - COMPARED,), dtype="float32"))


@pytest.mark.slow
def test_moves_for_real_go_on_as_if_there_had_been_none() -> None:
    told = stubs.Told()
    plan = Plan("tiny", (70, 9), repeats=1, threads=1, dtype="float32")
    result = measure(plan, told)
    assert [length.tokens for length in result.lengths] == [9, 70]
    short, long = result.lengths
    # The KV of 61 tokens more: 4 layers, keys and values of 2 heads of 32 numbers, 4 bytes each.
    # Lists of tokens and numbers take a few bytes more.
    assert 61 * 4 * 2 * 2 * 32 * 4 <= long.bytes - short.bytes < 61 * 4 * 2 * 2 * 32 * 4 + 500
    for length in result.lengths:
        assert length.mismatches == {"kv": 0, "reprefill": 0}
        assert 0 < sum(length.moves[0].parts_s.values()) <= length.kv_s * 1.5
    assert told.lines[:4] == [
        "loading publisher",
        "publishing the model",
        "loading source",
        "loading target",
    ]
    text = "\n".join(result.summary())
    assert "tiny, a random Llama, float32, embedded engine, 1 threads" in text


@pytest.mark.vllm
def test_moves_between_engines_of_vllm() -> None:
    """Read again for real: without the emptying, one of two would be found in a cache."""
    plan = Plan("tiny", (40, 4000), repeats=2, threads=1, dtype="float32", engine=EngineName.VLLM)
    result = measure(plan)
    short, long = result.lengths
    assert result.to_json()["engine"] == "vllm"
    # Whole blocks of 32 tokens: 2 and 125, of 4 layers, keys and values of 2 heads of 32 numbers.
    assert 0 <= long.bytes - short.bytes - 123 * 32 * 4 * 2 * 2 * 32 * 4 < 20_000
    for length in result.lengths:
        assert length.mismatches["kv"] == 0
    least = min(move.reprefill_s for move in long.moves)
    assert least > 3 * short.reprefill_s and least > long.kv_s
