"""Tool calls out of hostile text, and what a step may return."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_rl.tasks.environments import BadCall, Step, ToolCall, as_step, parse_tool_calls
from dora_rl.tasks.errors import TaskError

NAMES = st.text(min_size=1, max_size=8)
ARGUMENTS = st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=8), max_size=3)
FORMS = ["<tool>{}</tool>", "<tool_call>\n{}\n</tool_call>", "```json\n{}\n```", "```tool {}```"]


@given(st.lists(st.tuples(NAMES, ARGUMENTS, st.sampled_from(FORMS)), max_size=4))
def test_calls_are_read_in_order(calls: list[tuple[str, dict[str, Any], str]]) -> None:
    text = "I call\n".join(
        # No `<` or backtick inside: a text that ends its own block is cut there, by design.
        form.format(
            json.dumps({"name": name, "arguments": arguments})
            .replace("<", "\\u003c")
            .replace("`", "\\u0060")
        )
        for name, arguments, form in calls
    )
    assert parse_tool_calls(text) == [ToolCall(name, arguments) for name, arguments, _ in calls]


@given(st.text() | st.text(alphabet='<tol>/{}"`json:[]1e,', max_size=60))
def test_any_text_is_read(text: str) -> None:
    for call in parse_tool_calls(text):
        assert isinstance(call, ToolCall | BadCall)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("__import__('os').system('true')", "not JSON"),
        ("[1]", "not a JSON object"),
        ("{}", "it has no `name`"),
        ('{"name": 3}', "it has no `name`"),
        ('{"name": "f", "arguments": [1]}', "its `arguments` are not an object"),
        ("[" * 60_000, "not JSON"),
        (" " * 70_000, "a call of 70000 characters"),
    ],
)
def test_what_is_no_call_says_why(content: str, why: str) -> None:
    (call,) = parse_tool_calls(f"<tool>{content}</tool>")
    assert isinstance(call, BadCall) and call.why.startswith(why)


def test_calls_are_bounded() -> None:
    assert len(parse_tool_calls("<tool>{}</tool>" * 1000)) == 16
    assert parse_tool_calls("<tool>" * 100_000) == []


@pytest.mark.parametrize(
    ("result", "step"),
    [
        (("x",), Step("x", 0.0, False)),
        (("x", 1), Step("x", 1.0, False)),
        (("x", True, 1), Step("x", 1.0, True)),
        ((None, 0.5, True), Step("", 0.5, True)),
        (Step("x"), Step("x", 0.0, False)),
    ],
)
def test_a_step_is_a_tuple(result: Any, step: Step) -> None:
    assert as_step(result) == step


@pytest.mark.parametrize(
    "result",
    [None, "x", (), ("x", 1.0, True, {}), (3, 1.0), ("x", "1"), ("x", None), ("x", float("nan"))],
)
def test_other_results_are_refused(result: Any) -> None:
    with pytest.raises(TaskError, match=r"step must return"):
        as_step(result)
