"""Prompts and tools of the workloads of `dora-rl bench modes`: chains of chosen lengths.

Every row is a pure function of its position and seed, and so are the waits of its tools: all
paradigms see the same ones. Runs in the workers of rewards, so the standard library alone.
"""

import math
import random
import time
from typing import Any

from dora_rl.tasks import chains
from dora_rl.tasks.environments import Step

MOST_TERMS = 48  # of a chain: the quickstart's model has learnt to count so far, and no further
LINE_TOKENS = 6  # of one term, `82:02,`
COUNT_TOKENS = 3  # of them, what the tool answers: `02,`
END_TOKENS = 4  # what a response has besides: `=02` less a comma, and the end of text


def response_tokens(terms: float) -> float:
    """Tokens of the right response to a chain of so many terms."""
    return LINE_TOKENS * terms + END_TOKENS - 1


def lognormal_row(position: int, seed: int, *, mean: float, sigma: float) -> dict[str, Any]:
    """A chain whose number of terms is lognormal with this mean, from 1 to 48."""
    terms = _terms(random.Random(f"terms {seed} {position}"), mean, sigma)
    return {**chains.row_of_terms(position, seed, terms=terms), "terms": terms}


def one_long_row(
    position: int, seed: int, *, every: int, ratio: float, sigma: float
) -> dict[str, Any]:
    """Of every `every` chains in a row one is the longest, `ratio` times the mean of them all."""
    if position % every == random.Random(f"long {seed} {position // every}").randrange(every):
        return {**chains.row_of_terms(position, seed, terms=MOST_TERMS), "terms": MOST_TERMS}
    return lognormal_row(position, seed, mean=mean_of_the_others(every, ratio), sigma=sigma)


def mean_of_the_others(every: int, ratio: float) -> float:
    """Terms of the chains beside the long one, for its tokens to be `ratio` times the mean."""
    longest = response_tokens(MOST_TERMS)
    tokens = (every / ratio - 1.0) * longest / max(1, every - 1)
    return max(1.0, (tokens - response_tokens(0)) / LINE_TOKENS)


def tool_row(
    position: int,
    seed: int,
    *,
    fewest: int,
    most: int,
    median_wait_s: float,
    wait_sigma: float,
    longest_wait_s: float,
) -> dict[str, Any]:
    """A chain whose every term takes a call of a tool, with the seconds that each call takes."""
    source = random.Random(f"tools {seed} {position}")
    terms = source.randint(fewest, most)
    waits = [
        min(longest_wait_s, median_wait_s * math.exp(source.gauss(0.0, wait_sigma)))
        for _ in range(terms)
    ]
    row = chains.row_of_terms(position, seed, terms=terms)
    return {**row, "terms": terms, "waits_s": [round(wait, 4) for wait in waits]}


class CountingTool:
    """The policy writes a value of the chain and a colon; the tool answers how many are left.

    Together they write what the policy would have written alone: `92:` `02,` `97:` `01,` `02:`
    `00=` `02`. Every call takes as long as the row says, and is really waited for.
    """

    def __init__(self) -> None:
        self._example: dict[str, Any] = {}
        self._lines: list[str] = []
        self._text = ""

    def reset(self, example: dict[str, Any]) -> None:
        """The prompt is the row's."""
        self._example = example
        self._lines = chains.solution_lines(example["prompt"])

    def step(self, text: str) -> Step:
        """The count after a value; the reward after the answer, or after what is no call."""
        self._text += text
        calls = self._text.count(":")
        if not text.endswith(":") or calls > len(self._lines):
            return Step(reward=chains.reward(self._text, self._example), done=True)
        time.sleep(self._example["waits_s"][calls - 1])
        left = len(self._lines) - calls
        observation = f"{left:02d}" + ("," if left else "=")
        self._text += observation
        return Step(observation)


def _terms(source: random.Random, mean: float, sigma: float) -> int:
    drawn = mean * math.exp(source.gauss(0.0, sigma) - sigma**2 / 2)
    return min(MOST_TERMS, max(1, round(drawn)))
