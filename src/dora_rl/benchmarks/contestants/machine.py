"""The machine itself: what memory and processor can do at most, on as many threads."""

from typing import Any

import torch

from dora_rl.benchmarks import limits


class Machine:
    """Sizes and budgets are those of `limits`."""

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)

    def limits(self, **sizes: Any) -> dict[str, Any]:
        return limits.measure(**sizes).to_json()

    def peaks(self, **sizes: Any) -> dict[str, float]:
        return limits.measure_peaks(**sizes)


def load(**settings: Any) -> Machine:
    return Machine(**settings)
