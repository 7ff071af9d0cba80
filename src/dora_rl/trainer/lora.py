"""The adapter of a policy: PEFT's layers over a frozen base, and their first values.

Injected on the meta device, like all of the model: memory is taken when the policy is sharded.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dora_rl import extras
from dora_rl.models.errors import ModelError
from dora_rl.trainer.settings import LoraSettings
from dora_rl.weights.adapter import tensor_names

_NAME = "default"  # PEFT's of an adapter that has no other
_DOWN, _UP = f".lora_A.{_NAME}.weight", f".lora_B.{_NAME}.weight"
_BASE = ".base_layer."  # PEFT's place of what an adapter is added to


def inject(model: Any, lora: LoraSettings) -> None:
    """Give every target an adapter, and freeze all the rest."""
    extras.require("model.lora", "lora")
    _check_targets(model, lora.target_modules)
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # which PEFT only divides
        target_modules=list(lora.target_modules),
        lora_dropout=lora.dropout,
        bias="none",
        init_lora_weights=False,
    )
    inject_adapter_in_model(config, model, adapter_name=_NAME, low_cpu_mem_usage=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith((_DOWN, _UP)))
    for dropout in dropouts(model):
        dropout.eval()


def _check_targets(model: Any, targets: Sequence[str]) -> None:
    found: dict[str, type] = {}
    for name, module in model.named_modules():
        found.setdefault(name.rpartition(".")[2], type(module))
    linear = sorted(name for name, kind in found.items() if kind is nn.Linear and name != "lm_head")
    for target in targets:
        if target not in linear:
            kind = f", but a {found[target].__name__}" if target in found else ""
            raise ModelError(
                f"model.lora.target_modules names no linear layer of the model{kind}: `{target}`. "
                f"Its layers have {', '.join(linear)}."
            )


def plain(name: str) -> str:
    """The name of a parameter of the base as it is without an adapter."""
    return name.replace(_BASE, ".")


def saved_name(name: str) -> str | None:
    """PEFT's name, in a file, of a parameter of the model; None if it is of the base."""
    for ending, which in ((_DOWN, 0), (_UP, 1)):
        if name.endswith(ending):
            return tensor_names(name.removesuffix(ending))[which]
    return None


def initial(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    """The adapter of version 0, by the names in files: A as PEFT draws it, B zero.

    So it computes what the base does. Each A is a function of the seed and its name.
    """
    tensors = {}
    for name, shape in shapes.items():
        tensor = torch.zeros(shape)
        if name.endswith(".lora_A.weight"):
            generator = torch.Generator().manual_seed(_seed_of(seed, name))
            nn.init.kaiming_uniform_(tensor, a=math.sqrt(5), generator=generator)
        tensors[name] = tensor
    return tensors


def dropouts(model: Any) -> list[nn.Module]:
    """The dropout layers of the adapter, where it has any."""
    return [
        module[_NAME]
        for name, module in model.named_modules()
        if name.endswith(".lora_dropout") and isinstance(module[_NAME], nn.Dropout)
    ]


@contextmanager
def dropping(layers: Sequence[nn.Module], device: torch.device, *place: int) -> Iterator[None]:
    """Dropout within, drawn as a function of `place`; without layers, nothing is done."""
    if not layers:
        yield
        return
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(_seed_of(*place))
        for layer in layers:
            layer.train()
        try:
            yield
        finally:
            for layer in layers:
                layer.eval()


def _seed_of(*what: object) -> int:
    digest = hashlib.blake2b(repr(what).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1  # torch's are signed
