"""The functional fingerprint of a version: what its weights say of a fixed text.

The trainer records it when it publishes; an engine that cannot show the weights it computes with
compares it after an install. A digest says which tensors were handed over, this says that they
arrived where they belong. It knows neither tensors nor models.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Log-probabilities at temperature 1 of all tokens but the first, each given those before."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    dtype: str = "float32"
    """Of the products that they were computed with."""

    def distance(self, logprobs: Sequence[float], places: Sequence[int] | None = None) -> float:
        """The largest difference of a log-probability; infinite where one is no number.

        They are those of the tokens at `places`, or of all but the first.
        """
        places = range(1, len(self.tokens)) if places is None else places
        pairs = zip(places, logprobs, strict=True)
        gaps = [abs(self.logprobs[place - 1] - found) for place, found in pairs]
        return max(gaps) if all(map(math.isfinite, gaps)) else math.inf


def probe(vocab_size: int) -> tuple[int, ...]:
    """The text: the same for every model of this vocabulary."""
    digests = (hashlib.blake2b(bytes([i]), digest_size=8).digest() for i in range(_TOKENS))
    return tuple(int.from_bytes(digest, "little") % vocab_size for digest in digests)
