"""Tokens that may follow, guessed from text that is there: when to propose some, and which.

Pure and free of torch: counts in, tokens out. An engine feeds what is proposed in the same pass as
a sequence's last token and draws at every position. A proposed token that is the one drawn has
saved a pass, any other costs its row; nothing that comes out depends on it.
"""

from bisect import bisect_left
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

MOST_SEQUENCES = 4  # of a step, that drafts are looked for
_LONG_S = 1e-3  # of a pass for each of its rows: then looking for drafts is nothing beside it
MOST_TOKENS = 15  # that are proposed at once: with the last token, 16 rows
_CONTEXTS = (6, 3, 2)  # lengths of the contexts that are counted, the longest first
_DOUBT = 2.0  # unseen continuations that every context is taken to have
_LEAST = 0.1  # probability of a token that any pass has a row for
_TRIALS = 8.0  # accepted before any was: a new sequence is trusted
_MEMORY = 64.0  # trials that are remembered


class Speculation(StrEnum):
    """What `rollout.speculation` may be."""

    AUTO = "auto"  # where it has been measured to be faster
    ON = "on"
    OFF = "off"


class PassCosts(NamedTuple):
    """What passes of a few numbers of rows take, in any unit: at least two, ascending."""

    rows: tuple[int, ...]
    costs: tuple[float, ...]

    def of(self, rows: int) -> float:
        """On the line through the two nearest."""
        at = min(max(bisect_left(self.rows, rows), 1), len(self.rows) - 1)
        (low, high), (less, more) = self.rows[at - 1 : at + 1], self.costs[at - 1 : at + 1]
        return less + (more - less) * (rows - low) / (high - low)


# Where none were measured: weights are read once for all rows, and that takes as long as 8 rows.
TYPICAL = PassCosts((1, 16), (9.0, 24.0))


def most_sequences(mode: Speculation, costs: PassCosts) -> int:
    """Sequences of a step, at most, that drafts are looked for; costs are in seconds, if measured.

    Looking takes some 30 us for each, as much as two rows of the quickstart's model: there a lone
    sequence gets on faster, and with two or four it takes what it saves.
    """
    few = mode is Speculation.AUTO and costs.of(MOST_SEQUENCES) < MOST_SEQUENCES * _LONG_S
    return 1 if few else MOST_SEQUENCES


def worthwhile(probabilities: Sequence[float], sequences: int, costs: PassCosts) -> int:
    """How many proposed tokens of one of so many sequences give the most tokens for the time.

    Each has this probability after those before it, and is a row more in the pass.
    """
    most, best, together = sequences / costs.of(sequences), 0, 1.0
    expected = float(sequences)
    for count, probability in enumerate(probabilities, 1):
        together *= probability
        expected += together
        if (rate := expected / costs.of(sequences + count)) > most:
            most, best = rate, count
    return best


class Acceptance:
    """How often the proposals for one sequence were right, beside how often they should be."""

    __slots__ = ("_accepted", "_expected")

    def __init__(self) -> None:
        self._accepted = self._expected = _TRIALS

    @property
    def trust(self) -> float:
        """What estimated probabilities are to be multiplied by, at most 1."""
        return min(1.0, self._accepted / self._expected)

    def add(self, probabilities: Sequence[float], accepted: int) -> None:
        """So many of the tokens proposed with these probabilities were accepted, one by one."""
        self._expected += sum(probabilities[: accepted + 1])
        self._accepted += accepted
        if self._expected > _MEMORY:
            self._expected /= 2
            self._accepted /= 2

    def fade(self) -> None:
        """Nothing was proposed: what is distrusted is tried again after a while."""
        self._expected += (_TRIALS - self._expected) / _MEMORY
        self._accepted += (_TRIALS - self._accepted) / _MEMORY


class Draft(NamedTuple):
    """Proposed tokens, and the estimated probability of each after those before it."""

    tokens: tuple[int, ...] = ()
    probabilities: tuple[float, ...] = ()

    def cut(self, count: int) -> "Draft":
        if count == len(self.tokens):
            return self
        return Draft(self.tokens[:count], self.probabilities[:count])


NOTHING = Draft()


class Continuations:
    """How often each token followed each context of a few tokens, in some texts."""

    def __init__(self) -> None:
        self.counted = 0  # tokens
        self._after: dict[tuple[int, ...], dict[int, int]] = {}

    def count(self, text: Sequence[int], start: int, stop: int) -> None:
        """The tokens of the text from `start` to `stop`, each after those before it."""
        after = self._after
        for at in range(start, stop):
            token = text[at]
            for length in _CONTEXTS:
                if length <= at:
                    counts = after.setdefault(tuple(text[at - length : at]), {})
                    counts[token] = counts.get(token, 0) + 1
        self.counted += stop - start

    def clear(self) -> None:
        self.counted = 0
        self._after.clear()

    def likely(self, text: Sequence[int], trust: float = 1.0) -> Draft:
        """The likeliest tokens after this text, while all of them together are likely enough."""
        recent = list(text[-_CONTEXTS[0] :])
        tokens, probabilities = list[int](), list[float]()
        together = 1.0
        while len(tokens) < MOST_TOKENS:
            token, probability = self._next(recent)
            probability *= trust
            together *= probability
            if together < _LEAST:
                break
            tokens.append(token)
            probabilities.append(probability)
            recent.append(token)
        return Draft(tuple(tokens), tuple(probabilities))

    def _next(self, recent: list[int]) -> tuple[int, float]:
        """By the longest context that has been seen; with probability 0 if none has."""
        for length in _CONTEXTS:
            if length <= len(recent) and (counts := self._after.get(tuple(recent[-length:]))):
                token = max(counts, key=counts.__getitem__)  # the first of equals: no randomness
                return token, counts[token] / (sum(counts.values()) + _DOUBT)
        return 0, 0.0
