"""The machine itself: what memory and processor can do at most, on as many threads."""

from typing import Any

import torch

from dora_rl.benchmarks import limits


class Machine:
    """Sizes are those of `limits.measure`."""

    def __init__(self, threads: int, **sizes: int) -> None:
        torch.set_num_threads(threads)
        self._sizes = sizes

    def limits(self) -> dict[str, Any]:
        return limits.measure(**self._sizes).to_json()


def load(**settings: Any) -> Machine:
    return Machine(**settings)
