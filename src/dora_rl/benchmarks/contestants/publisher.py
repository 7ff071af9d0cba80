"""Versions for the engines to install: the model itself, or LoRA adapters of it.

With fingerprints, which some engines ask for, by the trainer's own code. A process of its own: the
memory that this takes is free again when the engines are measured.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dora_rl.benchmarks.models import PERTURBATION
from dora_rl.models.config import read_config
from dora_rl.trainer.settings import Dtype, LoraSettings, TrainSettings
from dora_rl.transports.weights.shared_directory import WeightStore
from dora_rl.weights.adapter import Adapter, tensor_names
from dora_rl.weights.fingerprint import Fingerprint
from dora_rl.weights.huggingface import map_model
from dora_rl.weights.tensors import weights_digest

# Of tensors by their names in files.
_Fingerprints = Callable[[dict[str, Tensor]], Fingerprint | None]


class Publisher:
    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)

    def publish_model(self, directory: str, weights: str, fingerprints: bool) -> None:
        """Version 0 in the store `weights`: the model itself."""
        tensors = map_model(Path(directory))
        with _fingerprints(Path(directory), None, fingerprints) as fingerprint:
            WeightStore(Path(weights)).publish(0, tensors, fingerprint=fingerprint(tensors))

    def publish_adapters(
        self, directory: str, weights: str, versions: int, rank: int, fingerprints: bool
    ) -> None:
        """Versions 0 to `versions` - 1 in the store `weights`, each another adapter."""
        lora = LoraSettings(rank=rank, alpha=2.0 * rank)
        base = map_model(Path(directory))
        digest = weights_digest(base)
        adapter = Adapter(digest, lora.rank, lora.alpha, lora.target_modules)
        linears = read_config(directory).linears(lora.target_modules)
        store = WeightStore(Path(weights))
        with _fingerprints(Path(directory), lora, fingerprints) as fingerprint:
            for version in range(versions):
                tensors = _adapter(adapter, linears, version)
                found = fingerprint(tensors)
                store.publish(version, tensors, fingerprint=found, adapter=adapter)


def _adapter(adapter: Adapter, linears: dict[str, tuple[int, int]], seed: int) -> dict[str, Tensor]:
    """What it adds to the output of a module has the size of the perturbation, for inputs of 1."""
    source = torch.Generator().manual_seed(seed)
    up_scale = PERTURBATION / adapter.scale / math.sqrt(adapter.rank)
    found = {}
    for module, (outputs, inputs) in linears.items():
        down, up = tensor_names(module)
        a = torch.randn(adapter.rank, inputs, generator=source)
        found[down] = a / math.sqrt(inputs)
        found[up] = up_scale * torch.randn(outputs, adapter.rank, generator=source)
    return found


@contextmanager
def _fingerprints(
    directory: Path, lora: LoraSettings | None, wanted: bool
) -> Iterator[_Fingerprints]:
    """What the trainer would record with tensors that it publishes; nothing unless wanted."""
    if not wanted:
        yield lambda tensors: None
        return
    from dora_rl.trainer.model import load, other_weights

    policy, source = load(directory, TrainSettings(dtype=Dtype.FLOAT32), 1.0, lora=lora)

    def fingerprint(tensors: dict[str, Tensor]) -> Fingerprint | None:
        with other_weights(policy, source.names, tensors):
            return policy.fingerprint()

    yield fingerprint


def load(**settings: Any) -> Publisher:
    return Publisher(**settings)
