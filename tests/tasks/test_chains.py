"""Chains: rows are a pure function, answers are right, and no response can fool the reward."""

import itertools
import statistics
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_rl.core.protocol.errors import UserError
from dora_rl.tasks import chains

POSITIONS = st.integers(0, 10**9)
SEEDS = st.integers(-(10**9), 2**64)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "max_terms": st.integers(1, 99),
        "tail": st.floats(0.05, 100),
        "max_step": st.integers(1, 99),
    },
)
ARABIC = {ord(c): 0x0660 + int(c) for c in "0123456789"}
FULLWIDTH = {ord(c): 0xFF10 + int(c) for c in "0123456789"}
PROMPTS = st.builds(lambda p, s, o: chains.row(p, s, **o)["prompt"], POSITIONS, SEEDS, OPTIONS)


def numbers(prompt: str) -> tuple[int, int, int]:
    """Start, step with its sign, terms: by position in the text, not by the task's own parser."""
    return int(prompt[:2]), int(prompt[2:5]), int(prompt[6:8])


@given(POSITIONS, SEEDS, OPTIONS)
def test_a_row_is_a_pure_function_and_its_answer_right(
    position: int, seed: int, options: dict[str, Any]
) -> None:
    for make in (chains.row, chains.held_out):
        row = make(position, seed, **options)
        assert row == make(position, seed, **options)
        start, step, terms = numbers(row["prompt"])
        assert row["answer"] == f"{(start + step * terms) % 100:02d}"
        assert 1 <= terms <= options.get("max_terms", 48)
        assert 1 <= abs(step) <= options.get("max_step", 9)
        assert set(row["prompt"]) <= set(chains.ALPHABET)


@given(PROMPTS)
def test_the_solution_has_one_right_line_a_term(prompt: str) -> None:
    start, step, terms = numbers(prompt)
    text, answer = chains.solution(prompt).split("=")
    lines = [tuple(map(int, line.split(":"))) for line in text.split(",")]
    values = [(start + step * n) % 100 for n in range(1, terms + 1)]
    assert lines == list(zip(values, reversed(range(terms)), strict=True))
    assert int(answer) == values[-1]
    assert len(chains.solution(prompt)) == 6 * terms + 2
    assert set(chains.solution(prompt)) <= set(chains.ALPHABET)


def test_by_hand() -> None:
    assert chains.solution("37+45*03=") == "82:02,27:01,72:00=72"
    assert chains.solution("05-09*01=") == "96:00=96"
    example = {"prompt": "37+45*03="}
    assert chains.reward("82:02,27:01,72:00=72", example) == 1.0
    assert chains.reward("82:02,27:01,72:00=71", example) == pytest.approx(0.2)
    assert chains.reward("82:02,27:01,71:00=71", example) == pytest.approx(0.2 * 2 / 3)
    assert chains.reward("82:02,28:01,73:00=73", example) == pytest.approx(0.2 / 3)
    assert chains.reward("=72", example) == chains.reward("72", example) == 0.0
    assert chains.reward("", example) == 0.0


def test_positions_and_seeds_give_other_rows() -> None:
    rows = [chains.row(p, s)["prompt"] for p, s in itertools.product(range(100), range(3))]
    assert len(set(rows)) > 280
    assert chains.row(11, 2) != chains.row(1, 12)  # numbers that read alike when joined


def test_no_prompt_is_both_trained_on_and_held_out() -> None:
    for max_step in (1, 2, 99):
        options = {"max_step": max_step, "max_terms": 2}
        trained = {chains.row(p, 0, **options)["prompt"] for p in range(3000)}
        kept = {chains.held_out(p, 0, **options)["prompt"] for p in range(3000)}
        assert trained and kept
        assert not trained & kept


def test_lengths_have_a_long_tail() -> None:
    lengths = [len(chains.solution(chains.row(p, 0)["prompt"])) + 1 for p in range(4096)]
    assert 18 < statistics.mean(lengths) < 25
    assert statistics.median(lengths) < 12
    assert max(lengths) == 6 * 48 + 3
    for batch in range(0, 4096, 512):
        part = lengths[batch : batch + 512]
        assert max(part) >= 10 * statistics.mean(part)


def test_the_tail_is_as_promised_and_can_be_set() -> None:
    for tail in (0.8, 1.2, 2.0):
        terms = [numbers(chains.row(p, 1, tail=tail)["prompt"])[2] for p in range(4000)]
        for n in (2, 4, 8):
            share = sum(t >= n for t in terms) / len(terms)
            assert share == pytest.approx(n**-tail, abs=0.03)


@given(PROMPTS, st.data())
def test_only_the_right_text_earns_everything(prompt: str, data: st.DataObject) -> None:
    right = chains.solution(prompt)
    assert chains.reward(right, {"prompt": prompt}) == 1.0
    place = data.draw(st.integers(0, len(right)))
    other = data.draw(st.text(max_size=8) | st.text(chains.ALPHABET, max_size=8))
    wrong = right[:place] + other + right[place + data.draw(st.integers(0, 8)) :]
    if wrong != right:
        assert 0.0 <= chains.reward(wrong, {"prompt": prompt}) <= chains.PARTIAL_CREDIT


@given(PROMPTS, st.data())
def test_credit_grows_by_whole_right_lines(prompt: str, data: st.DataObject) -> None:
    right, terms = chains.solution(prompt), numbers(prompt)[2]
    place = data.draw(st.integers(0, len(right) - 1))
    credit = chains.reward(right[:place] + "?" + right[place + 1 :], {"prompt": prompt})
    assert credit == pytest.approx(chains.PARTIAL_CREDIT * (place // 6) / terms)


@given(st.text())
def test_no_text_breaks_the_reward(response: str) -> None:
    assert chains.reward(response, {"prompt": "37+45*48="}) == 0.0


@pytest.mark.parametrize(
    "response",
    [
        "82:02,27:01,72:00=72".translate(FULLWIDTH),
        "82:02,27:01,72:00=72".translate(ARABIC),
        "82:02,27:01,72:00=72 ",
        " 82:02,27:01,72:00=72",
        "82:02,27:01,72:00=72\n",
        "82:02,27:01,72:00=072",
        "82:02,27:01,72:00=72=72",
        "__import__('os').abort()",
        "\x00" * 20,
        "\ud800",
        "(" * 1_000_000,
        "9" * 10_000_000,
        "82:02," * 2_000_000,
    ],
    ids=range(13),
)
def test_hostile_responses_earn_little_and_take_no_time(response: str) -> None:
    before = time.process_time()
    assert chains.reward(response, {"prompt": "37+45*03="}) <= chains.PARTIAL_CREDIT
    assert time.process_time() - before < 0.1


@pytest.mark.parametrize(
    "prompt",
    [None, 3, "", "1+1=", "37+45*00=", "37+45*03=\n", "37+45*03=".translate(ARABIC), "x" * 100_000],
)
def test_what_is_no_chain_is_refused(prompt: object) -> None:
    with pytest.raises(UserError, match=r"not a chain: `.{0,45}`\. A prompt is like"):
        chains.reward("82:00=82", {"prompt": prompt})
    with pytest.raises(UserError, match="not a chain"):
        chains.reward("82:00=82", {})


@pytest.mark.parametrize(
    "bad",
    [
        {"max_terms": 0},
        {"max_terms": 100},
        {"max_terms": 2.5},
        {"max_step": 0},
        {"max_step": 100},
        {"tail": 0},
        {"tail": float("nan")},
        {"tail": True},
        {"tail": "1"},
        {"position": -1},
        {"position": True},
        {"seed": 0.5},
    ],
    ids=str,
)
def test_a_parameter_out_of_range_is_named(bad: dict[str, Any]) -> None:
    arguments = {"position": 0, "seed": 0, **bad}
    ((name, value),) = bad.items()
    with pytest.raises(UserError, match=f"{name} must be .*: `{value}`"):
        chains.row(**arguments)
