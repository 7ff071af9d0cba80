"""The sender of the contract, a process: it publishes the policy of a step on request.

`kill` is `never`, `writing` (it kills itself within the write of a version) or `sending` (within a
broadcast). Before the last, and as `never, in small chunks`, it broadcasts few bytes at once.
"""

import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from dora_rl.transports.weights import broadcast
from dora_rl.transports.weights.registry import make_publisher
from dora_rl.transports.weights.settings import WeightTransportSettings
from dora_rl.weights import disk
from tests.weights.publisher import MortalOS

Policy = dict[str, torch.Tensor]
SMALL_CHUNK = 1 << 10
_WRITES = 2  # the second is within the first tensor


def policy(step: int) -> Policy:
    """Weights of which every step changes a few, the same in every process."""
    source = torch.Generator().manual_seed(5)
    found = {
        "model.embed_tokens.weight": torch.randn(200, 64, generator=source).bfloat16(),
        "model.layers.0.mlp.up_proj.weight": torch.randn(96, 64, generator=source).bfloat16(),
        "model.norm.weight": torch.randn(64, generator=source),
        "unused": torch.empty(0, 3),
    }
    for taken in range(step):
        found["model.embed_tokens.weight"][taken, ::7] += 0.25
        found["model.norm.weight"][taken % 64] += 1.0
    return found


def main(line: Connection, store: str, settings: str, kill: str) -> None:
    torch.set_num_threads(1)
    if kill == "writing":
        vars(disk)["os"] = MortalOS(_WRITES)
    if kill in ("sending", "never, in small chunks"):
        vars(broadcast)["CHUNK"] = SMALL_CHUNK
    if kill == "sending":
        group: Any = broadcast.Group
        group._broadcast = dying_after(group._broadcast, 3)
    publisher = make_publisher(WeightTransportSettings.model_validate_json(settings), Path(store))
    line.send("ready")
    while True:
        version, step = line.recv()
        publisher.publish(version, policy(step))
        line.send("published")


def dying_after(broadcast: Callable[..., None], count: int) -> Callable[..., None]:
    left = iter(range(count))

    def call(*args: Any) -> None:
        if next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        broadcast(*args)

    return call
