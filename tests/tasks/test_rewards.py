"""The built-in rewards, the binding of a user's, and their sum."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_rl.tasks import rewards
from dora_rl.tasks.errors import TaskError
from dora_rl.tasks.rewards import bind, combine, exact, find_answer, find_number, numeric, tags

CONTEXT = {"response": "r", "prompt": "p", "example": {"k": 1}, "answer": "a", "trajectory": None}


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("42", "42"),
        ("  so it is\n42 ", "so it is\n42"),
        ("<answer> 1 </answer> no, <answer>2</answer>", "2"),
        ("so \\boxed{1} or \\boxed{\\frac{1}{2}}!", "\\frac{1}{2}"),
        ("\\boxed{open", "\\boxed{open"),
        ("3 + 4 = 7\n#### 7", "7"),
        ("</answer><answer>", "</answer><answer>"),
        ("\\boxed{1} <answer>2</answer>", "2"),
    ],
)
def test_the_answer_in_a_text(text: str, answer: str) -> None:
    assert find_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("it is 42.", 42),
        ("1,234.5", 1234.5),
        ("(1,2)", 2),
        ("3/4", 0.75),
        ("-3 / 4", -0.75),
        ("1/0", None),
        ("50%", 0.5),
        ("1e3", 1000),
        ("5-3", 3),
        ("x = -7", -7),
        (".5", 0.5),
        ("none", None),
        ("1e999", None),
        ("9" * 10_000, None),
    ],
)
def test_the_number_in_a_text(text: str, number: float | None) -> None:
    assert find_number(text) == number


@given(st.text(max_size=200) | st.text(alphabet="0123456789,./-+eE%()", max_size=60))
def test_any_text_is_read(text: str) -> None:
    number = find_number(text)
    assert number is None or math.isfinite(number)
    assert find_answer(text) in text
    assert tags(text) in (0.0, 1.0)


@given(st.floats(allow_nan=False, allow_infinity=False, width=32))
def test_a_number_is_found_again(value: float) -> None:
    found = find_number(f"the answer is {value!r}")
    assert found == value


def test_exact_and_numeric() -> None:
    assert exact("<answer>Paris</answer>", "Paris ") == 1.0
    assert exact("Paris.", "Paris") == 0.0
    assert exact("7", 7) == 1.0
    assert numeric("about 0.3333333", "1/3") == 1.0
    assert numeric("0.33", "1/3") == 0.0
    assert numeric("0.33", "1/3", tolerance=0.02) == 1.0
    assert numeric("I do not know", "1") == 0.0
    assert numeric("72", "48+24 #### 72") == 1.0
    with pytest.raises(TaskError, match=r"numeric needs a number as the answer: `'x'`"):
        numeric("1", "x")
    with pytest.raises(TaskError, match=r"Set task.answer_key"):
        exact("1", None)


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<think>a</think>\n<answer>b</answer>", 1.0),
        (" <think></think><answer></answer>\n", 1.0),
        ("<think>a</think><answer>b</answer>!", 0.0),
        ("well <think>a</think><answer>b</answer>", 0.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("<think>a<think>b</think></think><answer>b</answer>", 0.0),
        ("<think>a</think>", 0.0),
    ],
)
def test_the_form_of_a_response(text: str, score: float) -> None:
    assert tags(text) == score


def test_every_built_in_is_there() -> None:
    for path in rewards.BUILT_IN.values():
        assert callable(getattr(rewards, path.partition(":")[2]))


def seen(function: Any, **options: Any) -> Any:
    return bind("f", function, options)(CONTEXT)


def test_a_function_gets_what_it_names() -> None:
    assert seen(lambda response: response) == "r"
    assert seen(lambda answer, prompt: (answer, prompt)) == ("a", "p")
    assert seen(lambda response, limit=3: (response, limit)) == ("r", 3)
    assert seen(lambda response, limit=3: limit, limit=5) == 5
    assert seen(lambda response, *, trajectory: trajectory) is None
    assert seen(lambda a, b, /: (a, b)) == ("r", {"k": 1})
    assert seen(lambda **context: sorted(context)) == sorted(CONTEXT)
    assert seen(lambda a, /, **context: (a, sorted(context))) == (
        "r",
        sorted(CONTEXT.keys() - {"response"}),
    )
    assert seen(lambda answer, **context: (answer, context["limit"]), limit=5) == ("a", 5)
    assert seen(len) == 1


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (lambda completions: 0, {}, "reward `f` asks for `completions`. It may name response"),
        (lambda response: 0, {"limit": 1}, "reward `f` takes no option `limit`"),
        (dict.fromkeys, {}, None),
        (type, {}, "reward `f` has no signature"),
    ],
)
def test_functions_that_cannot_be_called(
    function: Any, options: dict[str, Any], message: str | None
) -> None:
    if message is None:
        bind("f", function, options)
        return
    with pytest.raises(TaskError, match=message):
        bind("f", function, options)


FINITE = st.floats(-1e6, 1e6)


@given(st.lists(st.tuples(FINITE, FINITE | st.booleans() | st.integers(-99, 99)), max_size=5))
def test_the_sum_is_weighted_and_the_parts_are_not(values: list[tuple[float, Any]]) -> None:
    named = [(f"r{index}", weight, value) for index, (weight, value) in enumerate(values)]
    total, parts = combine(named)
    assert parts == {name: float(value) for name, _, value in named}
    assert total == pytest.approx(sum(w * v for w, v in values), rel=1e-9, abs=1e-6)


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), "1", b"1", None, [], 1j, {}, {"a": None}]
)
def test_what_is_no_reward_is_refused(value: Any) -> None:
    with pytest.raises(TaskError, match=r"reward `f"):
        combine([("f", 1.0, value)])


def test_a_sum_that_overflows_is_refused() -> None:
    with pytest.raises(TaskError, match=r"not finite"):
        combine([("a", 10.0, 1e308)])
