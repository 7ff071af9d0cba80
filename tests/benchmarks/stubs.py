"""Contestants that cost nothing: real processes that answer at once, without any library."""

import sys
from pathlib import Path
from typing import Any

from dora_rl.benchmarks.contestants.process import Start

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


def load(**settings):
    return Stub(**settings)
"""


def start(folder: Path, name: str, code: str = STUB, **settings: Any) -> Start:
    """A contestant of this code."""
    file = folder / f"{name}.py"
    file.write_text(code, encoding="utf-8")
    return Start(name, [sys.executable, "-P"], file, settings)
