"""Chains: one sum again and again, with a scratchpad; how often is heavy-tailed.

The prompt `87+05*03=` starts at 87 and adds 5 three times, keeping two digits. The response
writes one line a term, the value and how many terms are left, and then the answer:

    92:02,97:01,02:00=02

So the length of a response is set by its prompt, the lengths have a long tail by nature, and
even a tiny model can learn each line from the one before. Needs the standard library alone.
"""

import hashlib
import random
import re
from collections.abc import Mapping
from typing import Any

from dora_rl.core.protocol.errors import UserError

ALPHABET = "0123456789+-*=:,"  # every character of a prompt or a response
PARTIAL_CREDIT = 0.2  # what a wrong response can reach: far less than the right answer
_MODULUS = 100
_MOST_TERMS = 99  # two digits
_LINE = len("82:02,")  # with what separates it from the next one, or from the answer
_HELD_OUT_SHARE = 8  # one sum in so many is for evaluation
_PROMPT = re.compile(r"([0-9]{2})([+-])([0-9]{2})\*([0-9]{2})=")


class ChainError(UserError):
    """A parameter out of its range, or an example that is no chain."""


def row(
    position: int, seed: int, *, max_terms: int = 48, tail: float = 1.2, max_step: int = 9
) -> dict[str, str]:
    """The prompt and its answer at a position: a pure function.

    The chance of n terms or more is n ** -tail: a smaller `tail` is a heavier one, and what
    would pass `max_terms` stops there. `max_step` is the largest number to add or subtract;
    up to 99, and the larger the harder.
    """
    return _row("train", position, seed, max_terms, tail, max_step)


def held_out(
    position: int, seed: int, *, max_terms: int = 48, tail: float = 1.2, max_step: int = 9
) -> dict[str, str]:
    """As `row`, for evaluation: no prompt of one is ever a prompt of the other."""
    return _row("held out", position, seed, max_terms, tail, max_step)


def row_of_terms(position: int, seed: int, *, terms: int, max_step: int = 9) -> dict[str, str]:
    """As `row`, with so many terms: for tasks that draw lengths of their own."""
    _check(position, seed, terms, 1.0, max_step)
    return _drawn(random.Random(f"train {seed} {position}"), "train", terms, max_step)


def solution(prompt: object) -> str:
    """The one right response to a prompt."""
    lines = solution_lines(prompt)
    return ",".join(lines) + "=" + lines[-1][:2]


def solution_lines(prompt: object) -> list[str]:
    """The lines of the scratchpad, one a term, without what separates them."""
    parsed = _PROMPT.fullmatch(prompt) if isinstance(prompt, str) else None
    if parsed is None or parsed[4] == "00":
        raise ChainError(f"not a chain: `{str(prompt)[:40]!r}`. A prompt is like `87+05*03=`.")
    value, terms = int(parsed[1]), int(parsed[4])
    step = int(parsed[3]) if parsed[2] == "+" else -int(parsed[3])
    lines = []
    for left in reversed(range(terms)):
        value = (value + step) % _MODULUS
        lines.append(f"{value:02d}:{left:02d}")
    return lines


def reward(response: str, example: Mapping[str, Any]) -> float:
    """1 for the right answer, worked out line by line; else a little for the first lines.

    An answer without its lines earns nothing, or a policy would learn to skip them.
    """
    right = solution(example.get("prompt"))
    if response == right:
        return 1.0
    # Compared line by line and never parsed: what follows the first wrong line is not read.
    good, terms = 0, len(right) // _LINE
    while good < terms and response.startswith(
        right[good * _LINE : (good + 1) * _LINE], good * _LINE
    ):
        good += 1
    return PARTIAL_CREDIT * (good / terms)


def _row(
    part: str, position: int, seed: int, max_terms: int, tail: float, max_step: int
) -> dict[str, str]:
    _check(position, seed, max_terms, tail, max_step)
    source = random.Random(f"{part} {seed} {position}")
    # 1 - random() is in (0, 1]: its power has the tail that `row` promises.
    terms = int(min(max_terms, (1.0 - source.random()) ** (-1.0 / tail)))
    return _drawn(source, part, terms, max_step)


def _drawn(source: random.Random, part: str, terms: int, max_step: int) -> dict[str, str]:
    while True:
        sum_ = f"{source.randrange(_MODULUS):02d}{source.choice('+-')}"
        sum_ += f"{source.randint(1, max_step):02d}"
        if _is_held_out(sum_) == (part == "held out"):
            break
    prompt = f"{sum_}*{terms:02d}="
    return {"prompt": prompt, "answer": solution(prompt)[-2:]}


def _is_held_out(sum_: str) -> bool:
    return hashlib.blake2b(sum_.encode(), digest_size=1).digest()[0] % _HELD_OUT_SHARE == 0


def _check(position: int, seed: int, max_terms: int, tail: float, max_step: int) -> None:
    if type(position) is not int or position < 0:
        raise ChainError(f"position must be a whole number >= 0: `{position}`.")
    if type(seed) is not int:
        raise ChainError(f"seed must be a whole number: `{seed}`.")
    if type(max_terms) is not int or not 1 <= max_terms <= _MOST_TERMS:
        raise ChainError(f"max_terms must be from 1 to {_MOST_TERMS}: `{max_terms}`.")
    if type(max_step) is not int or not 1 <= max_step < _MODULUS:
        raise ChainError(f"max_step must be from 1 to {_MODULUS - 1}: `{max_step}`.")
    if isinstance(tail, bool) or not isinstance(tail, int | float) or not 0.05 <= tail <= 100:
        raise ChainError(
            f"tail must be from 0.05 to 100: `{tail}`. Smaller is heavier; 1.2 is the default."
        )
