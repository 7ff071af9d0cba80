"""What the contestants took, and the rates that follow; how figures are written."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dora_rl.benchmarks.contestants.process import ContestantFailed

WARM_TOKENS = 8  # generated before a batch size is measured
_CELL = 8


@dataclass(frozen=True, slots=True)
class Samples:
    """What one contestant took for one batch size; one of each for every repeat."""

    batch: int
    prompt_tokens: int
    new_tokens: int
    seconds: Sequence[tuple[float, float]]  # prefill and total of each repeat

    @property
    def prefill_s(self) -> list[float]:
        return [prefill for prefill, _ in self.seconds]

    @property
    def prefill_tokens_per_s(self) -> float:
        rates = [self.batch * self.prompt_tokens / seconds for seconds in self.prefill_s]
        return median(rates) or 0.0

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Of the repeats in which the noise was less than what was to be measured."""
        return median(self._decode_rates())

    @property
    def lost(self) -> int:
        """Repeats in which one token took longer than all of them."""
        return self._decode_rates().count(None)

    def _decode_rates(self) -> list[float | None]:
        return [
            self.batch * (self.new_tokens - 1) / (total - prefill) if total > prefill else None
            for prefill, total in self.seconds
        ]

    def to_json(self) -> dict[str, Any]:
        return {
            "decode_tokens_per_s": self.decode_tokens_per_s,
            "prefill_tokens_per_s": self.prefill_tokens_per_s,
            "samples": [
                {"prefill_s": prefill, "total_s": total} for prefill, total in self.seconds
            ],
        }


def median(samples: Sequence[float | None]) -> float | None:
    """Of the samples that are there."""
    there = [sample for sample in samples if sample is not None]
    return statistics.median(there) if there else None


def seconds_of(name: str, done: Mapping[str, Any], tokens: int) -> float:
    """The time of an answer that did all of the work."""
    if done["tokens"] != tokens or done["logprobs"] != tokens:
        raise ContestantFailed(
            f"{name} was to generate {tokens} tokens, and gave `{done['tokens']}` with "
            f"`{done['logprobs']}` log-probabilities."
        )
    return float(done["seconds"])


def ratio(over: float | None, under: float | None) -> float | None:
    return over / under if over and under else None


def rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def table(columns: Sequence[tuple[str, Sequence[str]]], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns in groups with a title each, numbers to the right."""
    titles: list[str] = []
    heads: list[str] = []
    widths: list[int] = []
    for title, names in columns:
        if names:
            gaps = len(names) - 1
            width = max(_CELL, *map(len, names), -(-(len(title) - gaps) // len(names)))
            titles.append(f"{title:>{width * len(names) + gaps}}")
            heads += names
            widths += [width] * len(names)
    lines = [" ".join(titles)]
    for row in [heads, *rows]:
        lines.append(" ".join(f"{v:>{width}}" for v, width in zip(row, widths, strict=True)))
    return lines
