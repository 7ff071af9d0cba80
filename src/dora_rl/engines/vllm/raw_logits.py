"""Log-probabilities of the unfiltered distribution at temperature 1, where a request asks for them.

vLLM reports one kind of log-probability for all requests, that of the distribution it samples from.
This processor changes nothing: it sees the logits before temperature and filters, and keeps those
of the rows that asked. It is in the process of the engine, and the engine reads it after each step.
"""

from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessor  # type: ignore[import-not-found]

KEY = "dora_rl_raw"  # in `SamplingParams.extra_args`: the id of the request


class RawLogits(LogitsProcessor):  # type: ignore[misc]
    """The last one made is that of the engine that is made now: see `Backend`."""

    newest: "RawLogits"

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, str] = {}
        self._logprobs: dict[str, Tensor] = {}
        RawLogits.newest = self

    def is_argmax_invariant(self) -> bool:
        return False  # such run after the temperature, and not at all for greedy requests

    def update_state(self, batch_update: Any) -> None:
        if batch_update is None:
            return
        rows = self._rows
        for row in batch_update.removed:
            rows.pop(row, None)
        for row, params, *_ in batch_update.added:
            rows.pop(row, None)
            if (request := (params.extra_args or {}).get(KEY)) is not None:
                rows[row] = request
        for source, target, direction in batch_update.moved:
            moved, other = rows.pop(source, None), rows.pop(target, None)
            if moved is not None:
                rows[target] = moved
            if other is not None and direction.name == "SWAP":
                rows[source] = other

    def apply(self, logits: Tensor) -> Tensor:
        for row, request in self._rows.items():
            self._logprobs[request] = logits[row].float().log_softmax(-1)
        return logits

    def forget(self, request: str) -> None:
        """It ended before a token of it was taken."""
        self._logprobs.pop(request, None)

    def take(self, request: str, token: int) -> float:
        """The log-probability of the token that was sampled in the last step."""
        return float(self._logprobs.pop(request)[token])
