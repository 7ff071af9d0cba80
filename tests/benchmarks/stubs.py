"""Contestants that cost nothing: real processes that answer at once, without any library."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dora_rl.benchmarks.contestants.process import Start
from dora_rl.benchmarks.reporting import Reporter, Result

LIMITS = {
    "bandwidth_bytes_per_s": 1e9,
    "mm_flops_per_s": {"bfloat16": 2e9, "float32": 1e9},
}
# One token takes `first` seconds, each further one `more`.
STUB = f"""
class Stub:
    def __init__(self, first=1.0, more=0.5, **settings):
        self.first, self.more = first, more

    def about(self):
        return {{"version": "1", "torch": "2", "threads": 1, "notes": []}}

    def generate(self, prompts, new_tokens, versions=1):
        tokens = len(prompts) * new_tokens
        seconds = self.first + self.more * (new_tokens - 1)
        return {{"seconds": seconds, "tokens": tokens, "logprobs": tokens}}

    def limits(self):
        return {LIMITS!r}

    def peaks(self, **sizes):
        return {LIMITS["mm_flops_per_s"]!r}


def load(**settings):
    return Stub(**settings)
"""


class Told(Reporter):
    """Keeps what it was told; interrupts when it is told for the `until`-th time."""

    def __init__(self, until: int | None = None) -> None:
        super().__init__(self._keep)
        self.lines: list[str] = []
        self._until = until

    def _keep(self, line: str, begins: bool) -> None:
        self.lines.append(line)
        if len(self.lines) == self._until:
            raise KeyboardInterrupt


def interrupted_everywhere(measure: Callable[[Reporter], Result]) -> list[Result]:
    """Interrupt a measurement whenever it tells something; what there was to show each time.

    Every result must be one that can be shown, and there is never less than before.
    """
    whole = Told()
    measure(whole)
    shown: list[Result] = []
    for until in range(1, len(whole.lines) + 1):
        told = Told(until)
        with pytest.raises(KeyboardInterrupt):
            measure(told)
        result = told.so_far()
        assert result is not None or not shown
        if result is not None:
            assert all(isinstance(line, str) for line in result.summary())
            json.dumps(result.to_json())
            shown.append(result)
    return shown


def start(folder: Path, name: str, code: str = STUB, **settings: Any) -> Start:
    """A contestant of this code."""
    file = folder / f"{name}.py"
    file.write_text(code, encoding="utf-8")
    return Start(name, [sys.executable, "-P"], file, settings)
