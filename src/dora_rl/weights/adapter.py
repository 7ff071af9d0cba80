"""A version that is a LoRA adapter: what it is of, and the files that PEFT knows it by. No torch.

Its tensors alone do not say what they compute: the base, the rank and alpha do, so that they are
part of the version's digest. `adapter_config.json` follows from them, in one spelling.
"""

import json
import math
from dataclasses import dataclass
from typing import Any

from dora_rl.weights import checks
from dora_rl.weights.errors import WeightsError

CONFIG_FILE = "adapter_config.json"
TENSORS_FILE = "adapter_model.safetensors"
MAX_RANK = 512  # the largest that vLLM serves
_PREFIX = "base_model.model."  # of PEFT, before the name of a module
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"
_KEYS = frozenset({"base", "rank", "alpha", "targets"})


@dataclass(frozen=True, slots=True)
class Adapter:
    """`base` is the digest of the weights that it is added to; `targets` end their modules' names.

    The weights of a target are those of the base plus `alpha / rank` times B A.
    """

    base: str
    rank: int
    alpha: float
    targets: tuple[str, ...]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def encoded(self) -> dict[str, Any]:
        """As a manifest has it."""
        return {
            "base": self.base,
            "rank": self.rank,
            "alpha": self.alpha,
            "targets": list(self.targets),
        }

    def config(self, base_path: str | None = None) -> bytes:
        """The content of `adapter_config.json`; `base_path` is where PEFT finds the base."""
        content = {
            "base_model_name_or_path": base_path,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "lora_alpha": self.alpha,
            "lora_dropout": 0.0,
            "peft_type": "LORA",
            "r": self.rank,
            "target_modules": list(self.targets),
            "task_type": "CAUSAL_LM",
        }
        return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode("ascii")


def decode(value: Any, where: str) -> Adapter:
    """What `encoded` gave, or a refusal that names the entry."""
    entry = checks.record(value, _KEYS, where)
    rank = checks.number(entry["rank"], f"rank of {where}")
    alpha = entry["alpha"]
    if not 1 <= rank <= MAX_RANK:
        raise WeightsError(f"rank of {where} must be from 1 to {MAX_RANK}: `{rank}`.")
    if type(alpha) is not float or not 0 < alpha < math.inf:
        raise WeightsError(f"alpha of {where} must be a number > 0: {checks.shown(alpha)}.")
    targets = checks.items(entry["targets"], f"targets of {where}")
    for target in targets:
        checks.tensor_name(target, where)
    base = checks.sha256(entry["base"], f"base of {where}")
    return Adapter(base, rank, alpha, tuple(targets))


def tensor_names(module: str) -> tuple[str, str]:
    """PEFT's names of A and B of a module, by the module's own name."""
    return f"{_PREFIX}{module}{_DOWN}", f"{_PREFIX}{module}{_UP}"


def module_of(name: str) -> str | None:
    """The module that a tensor of an adapter is of; None if it is none of an adapter's."""
    for ending in (_DOWN, _UP):
        if name.startswith(_PREFIX) and name.endswith(ending):
            return name.removeprefix(_PREFIX).removesuffix(ending)
    return None
