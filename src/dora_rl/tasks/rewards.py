r"""Rewards: the built-in ones, how a user's function is called, and how several are combined.

A reward is any callable, plain or async, that takes of `response`, `prompt`, `example`,
`answer` and `trajectory` those that it names, and returns a number, a bool, or numbers by name.
Runs in the workers, so it imports little; the libraries that built-ins need come when called.

What counts as the answer in a text, for all built-ins: the last `<answer>…</answer>`, else the
last `\boxed{…}`, else what follows the last `####`, else the whole text.
"""

import functools
import importlib
import inspect
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dora_rl.extras import require
from dora_rl.tasks.errors import TaskError

CONTEXT = ("response", "prompt", "example", "answer", "trajectory")
BUILT_IN = {
    name: f"dora_rl.tasks.rewards:{name}" for name in ("exact", "numeric", "tags", "gym")
} | {"math_verify": "dora_rl.tasks.rewards:math_answer"}

Bound = Callable[[Mapping[str, Any]], Any]
_LIBRARIES = {"math_verify": "math_verify", "gym": "reasoning_gym"}
_NUMBER = re.compile(
    r"(?:(?<![\d)])[-+])?"  # no sign but a minus in 5-3
    r"(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
    r"(?:[eE][-+]?\d{1,3})?"
)
_LONGEST_NUMBER = 400  # digits; more fit no float


def bind(name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> Bound:
    """The function as one of the whole context, of which it gets what its signature names.

    Parameters that cannot be named get the response and the example, in this order.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        raise TaskError(
            f"reward `{name}` has no signature that can be read. Wrap it in a function."
        ) from None
    by_place: list[str] = []
    wanted: set[str] = set()
    takes_all = False
    for parameter in parameters:
        if parameter.kind is parameter.POSITIONAL_ONLY and len(by_place) < 2:
            by_place.append(("response", "example")[len(by_place)])
        elif parameter.kind is parameter.VAR_KEYWORD:
            takes_all = True
        elif parameter.kind is parameter.VAR_POSITIONAL or parameter.name in options:
            continue
        elif parameter.name in CONTEXT:
            wanted.add(parameter.name)
        elif parameter.default is parameter.empty:
            raise TaskError(
                f"reward `{name}` asks for `{parameter.name}`. It may name "
                f"{', '.join(CONTEXT)}, or take it from `options`."
            )
    known = {parameter.name for parameter in parameters}
    for option in options:
        if option not in known and not takes_all:
            raise TaskError(f"reward `{name}` takes no option `{option}`. Remove it.")
    if takes_all:
        wanted = set(CONTEXT) - set(by_place)

    def call(context: Mapping[str, Any]) -> Any:
        given = {key: context.get(key) for key in wanted if key not in options}
        return function(*(context.get(key) for key in by_place), **given, **options)

    return call


def load_library(name: str) -> None:
    """Import what a built-in needs, before the workers are forked: it takes a second or two."""
    library = _LIBRARIES.get(name)
    if library is not None:
        require(f"task.reward = {name}", "tasks")
        importlib.import_module(library)


def combine(results: Iterable[tuple[str, float, Any]]) -> tuple[float, dict[str, float]]:
    """The weighted sum of (name, weight, value) and the values by name, before weighting.

    Values by name count with their sum, and are called `reward.name`.
    """
    total = 0.0
    parts: dict[str, float] = {}
    for name, weight, value in results:
        if isinstance(value, Mapping):
            if not value:
                raise TaskError(f"reward `{name}` returned no number: `{{}}`. Return one.")
            values = {f"{name}.{key}": number(f"{name}.{key}", v) for key, v in value.items()}
            parts |= values
            total += weight * math.fsum(values.values())
        else:
            parts[name] = number(name, value)
            total += weight * parts[name]
    if not math.isfinite(total):
        raise TaskError(f"the weighted sum of the rewards is not finite: `{total}`.")
    return total, parts


def number(name: str, value: Any) -> float:
    """A reward as a finite float; everything else is refused by name and value."""
    if isinstance(value, str | bytes | complex) or not hasattr(value, "__float__"):
        raise TaskError(f"reward `{name}` returned no number: `{value!r:.80}`. Return a float.")
    result = float(value)
    if not math.isfinite(result):
        raise TaskError(f"reward `{name}` returned `{result}`. Return a finite number.")
    return result


def exact(response: str, answer: Any) -> float:
    """1 if the answer in the response is, but for space around it, the answer."""
    return float(find_answer(response) == find_answer(_text(answer)))


def numeric(response: str, answer: Any, tolerance: float = 1e-6) -> float:
    """1 if the last number of the answer in the response equals the answer's, relatively."""
    wanted = find_number(find_answer(_text(answer)))
    if wanted is None:
        raise TaskError(f"numeric needs a number as the answer: `{answer!r:.80}`. Check the rows.")
    found = find_number(find_answer(response))
    close = found is not None and math.isclose(found, wanted, rel_tol=tolerance, abs_tol=tolerance)
    return float(close)


def tags(response: str, tags: Iterable[str] = ("think", "answer")) -> float:
    """1 if the response is `<think>…</think><answer>…</answer>` and nothing else."""
    rest = response.strip()
    for tag in tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        if not rest.startswith(opening) or rest.count(opening) != 1 or rest.count(closing) != 1:
            return 0.0
        rest = rest.partition(closing)[2].strip()
    return float(not rest)


def math_answer(response: str, answer: Any) -> float:
    """1 if math-verify holds the answer in the response to be equal to the answer."""
    require("task.reward = math_verify", "tasks")
    from math_verify import parse, verify

    wanted = _text(answer)
    if "\\" in wanted and "$" not in wanted and "\\boxed" not in wanted:
        wanted = f"${wanted}$"
    # Their time limits use signals; ours kills the process.
    gold = parse(wanted, parsing_timeout=None)
    if not gold:
        raise TaskError(f"math_verify cannot read the answer: `{answer!r:.80}`. Check the rows.")
    found = parse(response, parsing_timeout=None)
    return float(verify(gold, found, timeout_seconds=None))


def gym(response: str, example: dict[str, Any]) -> float:
    """The score that reasoning-gym itself gives; for prompts of `gym:NAME`."""
    origin = example.get("gym")
    if not isinstance(origin, dict):
        raise TaskError("reward `gym` needs prompts of reasoning-gym. Set task.prompts = gym:NAME.")
    # The problem is made again, since JSON has no tuples, and not every scorer takes a list.
    dataset = gym_dataset(origin["name"], origin["seed"], origin["options"])
    return float(dataset.score_answer(find_answer(response), dataset[origin["index"]]))


@functools.lru_cache(maxsize=8)
def gym_dataset(name: str, seed: int, options: str) -> Any:
    """A generator of reasoning-gym; the options as JSON, by which it is kept."""
    require(f"gym:{name}", "tasks")
    import reasoning_gym

    return reasoning_gym.create_dataset(name, seed=seed, **json.loads(options))


def find_answer(text: str) -> str:
    """What counts as the answer in a text; see the top of this file."""
    closing = text.rfind("</answer>")
    opening = text.rfind("<answer>", 0, closing) if closing >= 0 else -1
    if opening >= 0:
        return text[opening + len("<answer>") : closing].strip()
    boxed = _last_boxed(text)
    if boxed is not None:
        return boxed.strip()
    return text.rpartition("####")[2].strip()


def find_number(text: str) -> float | None:
    """The last number in a text; `1,234.5`, `3/4` and `50%` are read, and nothing evaluated."""
    last = None
    for last in _NUMBER.finditer(text):  # noqa: B007
        pass
    if last is None or last.end() - last.start() > _LONGEST_NUMBER:
        return None
    value = float(last.group().replace(",", ""))
    if not math.isfinite(value):
        return None
    over = text[: last.start()].rstrip()
    if over.endswith("/"):
        before = find_number(over[:-1][-_LONGEST_NUMBER:])
        if before is not None:
            return before / value if value else None
    return value / 100 if text[last.end() :].lstrip().startswith("%") else value


def _last_boxed(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    begin = start + len("\\boxed{")
    depth = 1
    for index in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return text[begin:index]
    return None


def _text(answer: Any) -> str:
    if answer is None:
        raise TaskError("the row has no answer. Set task.answer_key to the key that has it.")
    return answer if isinstance(answer, str) else str(answer)
