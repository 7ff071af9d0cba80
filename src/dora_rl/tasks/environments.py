"""What an environment is, and tools as one kind of it.

An environment is a class with `reset(example)` and `step(text)`, plain or async, and perhaps
`close()`; one object of it is one episode. Tool calls are read out of a policy's text as JSON
and nothing else, and dispatched to functions by name. Standard library alone: workers use it.
"""

import inspect
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from dora_rl.tasks.errors import TaskError

_TAGS = ("tool", "tool_call")
_MOST_CALLS = 16  # in one text
_LONGEST_CALL = 1 << 16  # characters


class Step(NamedTuple):
    """What an environment answers: text for the policy, a reward for this turn, the end."""

    observation: str = ""
    reward: float = 0.0
    done: bool = False


class Environment(Protocol):
    """The environment of one episode."""

    def reset(self, example: dict[str, Any]) -> Any:
        """The prompt's text or messages, or None to keep the row's prompt."""

    def step(self, text: str) -> Any:
        """A `Step`, or a tuple like it, in answer to what the policy wrote."""


def as_step(result: Any) -> Step:
    """What a user's `step` returned, checked."""
    if not isinstance(result, tuple) or not 1 <= len(result) <= 3:
        raise TaskError(
            f"step must return (observation, reward, done): `{result!r:.80}`. Return a Step."
        )
    observation: Any
    reward: Any
    observation, reward, done = Step(*result)
    if observation is not None and not isinstance(observation, str):
        raise TaskError(f"step must return text: `{observation!r:.80}`. Write it as a string.")
    if isinstance(reward, str | bytes) or not hasattr(reward, "__float__"):
        raise TaskError(f"step must return a number as reward: `{reward!r:.80}`. Use 0.0 for none.")
    if not math.isfinite(float(reward)):
        raise TaskError(f"step must return a finite reward: `{float(reward)}`. Use 0.0 for none.")
    return Step(observation or "", float(reward), bool(done))


class ToolCall(NamedTuple):
    """A call that a policy asked for."""

    name: str
    arguments: dict[str, Any]


class BadCall(NamedTuple):
    """Something that looks like a call but is none, and why."""

    why: str


def parse_tool_calls(text: str) -> list[ToolCall | BadCall]:
    """The calls in a text, in order: `<tool>{…}</tool>`, `<tool_call>…`, or a fenced `json` block.

    A call is an object with `name` (or `tool`) and `arguments` (or `args`, `parameters`).
    """
    return [_read_call(content) for _, content in sorted(_blocks(text))[:_MOST_CALLS]]


def _blocks(text: str) -> list[tuple[int, str]]:
    blocks = []
    pairs = [(f"<{tag}>", f"</{tag}>") for tag in _TAGS] + [("```json", "```"), ("```tool", "```")]
    for opening, closing in pairs:
        at = text.find(opening)
        while at >= 0:
            begin = at + len(opening)
            end = text.find(closing, begin)
            if end < 0:
                break
            blocks.append((at, text[begin:end]))
            at = text.find(opening, end + len(closing))
    return blocks


def _read_call(content: str) -> ToolCall | BadCall:
    if len(content) > _LONGEST_CALL:
        return BadCall(f"a call of {len(content)} characters; {_LONGEST_CALL} are the most")
    try:
        call = json.loads(content)
    except (ValueError, RecursionError) as error:
        return BadCall(f"not JSON: {str(error)[:100]}")
    if not isinstance(call, dict):
        return BadCall("not a JSON object")
    name = call.get("name", call.get("tool"))
    arguments = call.get("arguments", call.get("args", call.get("parameters", {})))
    if not isinstance(name, str) or not name:
        return BadCall("it has no `name`")
    if not isinstance(arguments, dict):
        return BadCall("its `arguments` are not an object")
    return ToolCall(name, arguments)


class ToolEnvironment:
    """Base of environments whose turns are calls of tools.

    Give `tools`, functions by name, plain or async; override `finish` to reward the text that
    ends the episode by calling no tool.
    """

    tools: Mapping[str, Callable[..., Any]] = {}

    def __init__(self) -> None:
        self.example: dict[str, Any] = {}

    def reset(self, example: dict[str, Any]) -> Any:
        self.example = example
        return None

    def finish(self, text: str) -> float:
        """The reward of the last text."""
        return 0.0

    async def step(self, text: str) -> Step:
        calls = parse_tool_calls(text)
        if not calls:
            return Step("", self.finish(text), True)
        return Step("\n".join([await self._answer(call) for call in calls]))

    async def _answer(self, call: ToolCall | BadCall) -> str:
        """What a tool returned, as text; what went wrong too, since the policy may mend it."""
        if isinstance(call, BadCall):
            return f"error: {call.why}"
        tool = self.tools.get(call.name)
        if tool is None:
            return f"error: no tool `{call.name[:80]}`. Tools: {', '.join(sorted(self.tools))}"
        try:
            bound = inspect.signature(tool).bind(**call.arguments)
            result = tool(*bound.args, **bound.kwargs)
            if inspect.isawaitable(result):
                result = await result
        except MemoryError:
            raise
        except Exception as error:
            return f"error: {type(error).__name__}: {str(error)[:200]}"
        return result if isinstance(result, str) else json.dumps(result, default=str)
