"""Shapes of well-known models, and the choices that follow from a model and a device.

What a user leaves out is derived here, by rules that are written down: the devices of one
instance and the slots of its batch. Nothing here may know of candidates or of the search.
"""

import difflib
import re
from math import log
from types import MappingProxyType
from typing import Any

from dora_rl.config import load_toml
from dora_rl.core.protocol.errors import UserError
from dora_rl.simulator.cost_parameters import Device, Efficiency, Model
from dora_rl.simulator.costs import Costs
from dora_rl.simulator.planning.bounds import Lengths


def _dense(parameters: float, layers: int, heads: int, kv_heads: int, head_dim: int = 128) -> Model:
    return Model(
        parameters=parameters, layers=layers, heads=heads, kv_heads=kv_heads, head_dim=head_dim
    )


def _sparse(parameters: float, active: float, layers: int, heads: int, kv_heads: int) -> Model:
    return Model(
        parameters=parameters,
        active_parameters=active,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=128,
        experts=128,
        experts_per_token=8,
    )


# The `config.json` and the parameter count of each model's page on huggingface.co, embeddings
# included, and once where the output layer shares them.
_OWN = {
    "qwen3-0.6b": _dense(0.596e9, 28, 16, 8),
    "qwen3-1.7b": _dense(1.72e9, 28, 16, 8),
    "qwen3-4b": _dense(4.02e9, 36, 32, 8),
    "qwen3-8b": _dense(8.19e9, 36, 32, 8),
    "qwen3-14b": _dense(14.8e9, 40, 40, 8),
    "qwen3-32b": _dense(32.8e9, 64, 64, 8),
    "qwen3-30b-a3b": _sparse(30.5e9, 3.3e9, 48, 32, 4),
    "qwen3-235b-a22b": _sparse(235e9, 22e9, 94, 64, 4),
    "qwen2.5-0.5b": _dense(0.494e9, 24, 14, 2, 64),
    "qwen2.5-1.5b": _dense(1.54e9, 28, 12, 2),
    "qwen2.5-3b": _dense(3.09e9, 36, 16, 2),
    "qwen2.5-7b": _dense(7.62e9, 28, 28, 4),
    "qwen2.5-14b": _dense(14.8e9, 48, 40, 8),
    "qwen2.5-32b": _dense(32.8e9, 64, 40, 8),
    "qwen2.5-72b": _dense(72.7e9, 80, 64, 8),
    "llama-3.2-1b": _dense(1.24e9, 16, 32, 8, 64),
    "llama-3.2-3b": _dense(3.21e9, 28, 24, 8),
    "llama-3-8b": _dense(8.03e9, 32, 32, 8),
    "llama-3-70b": _dense(70.6e9, 80, 64, 8),
    "llama-3.1-405b": _dense(406e9, 126, 128, 8),
    "mistral-7b": _dense(7.25e9, 32, 32, 8),
    "mistral-small-24b": _dense(23.6e9, 40, 32, 8),
    "phi-4": _dense(14.7e9, 40, 40, 10),
    "smollm2-135m": _dense(0.135e9, 30, 9, 3, 64),
    "smollm2-360m": _dense(0.362e9, 32, 15, 5, 64),
    "smollm2-1.7b": _dense(1.71e9, 24, 32, 32, 64),
    "smollm3-3b": _dense(3.08e9, 36, 16, 4),
}
_SAME_SHAPE = {
    "llama-3.1-8b": "llama-3-8b",
    "llama-3.1-70b": "llama-3-70b",
    "llama-3.3-70b": "llama-3-70b",
    "deepseek-r1-distill-qwen-1.5b": "qwen2.5-1.5b",
    "deepseek-r1-distill-qwen-7b": "qwen2.5-7b",
    "deepseek-r1-distill-qwen-14b": "qwen2.5-14b",
    "deepseek-r1-distill-qwen-32b": "qwen2.5-32b",
    "deepseek-r1-distill-llama-8b": "llama-3-8b",
    "deepseek-r1-distill-llama-70b": "llama-3-70b",
}
SHAPES: MappingProxyType[str, Model] = MappingProxyType(
    _OWN | {name: _OWN[other] for name, other in _SAME_SHAPE.items()}
)
# What names of models carry besides the shape: Qwen/Qwen2.5-Math-7B-Instruct, Qwen3-4B-Base.
_OWNER = re.compile(r"^(.*/)?(meta-)?")
_KIND = re.compile(r"-(math|coder)(?=-)|(-(instruct|base|chat|it|hf|thinking|v[\d.]+|\d{4}))+$")
_PARAMETERS = re.compile(r"(\d+|\d*\.\d+)([bm])")
_UNITS = {"b": 1e9, "m": 1e6}

# The weights may take this share of an instance's memory; the rest is for KV.
_WEIGHTS_SHARE = 0.5
# Slots that an inference engine usually offers at most (vLLM's `max_num_seqs` is 256).
_MOST_SLOTS = 256
# Of the KV memory that mean lengths would fill: lengths vary, and a full memory preempts.
_KV_HEADROOM = 0.9


def model_named(text: str) -> tuple[dict[str, Any], str | None]:
    """The `[model]` table that `--model` means, and a note where something was assumed."""
    name = _KIND.sub("", _OWNER.sub("", text.lower().strip()))
    shape = SHAPES.get(name)
    if shape is not None:
        return shape.model_dump(exclude_none=True), None
    if text.endswith(".toml"):
        data = load_toml(text)
        inner = data.get("model", data)
        if not isinstance(inner, dict):
            raise UserError(f"no [model] table in `{text}`. Give parameters, layers, heads, ….")
        return inner, None
    counted = _PARAMETERS.fullmatch(name)
    try:
        parameters = float(counted[1]) * _UNITS[counted[2]] if counted else float(text)
    except ValueError:
        near = difflib.get_close_matches(name, SHAPES, n=1)
        hint = f" Did you mean `{near[0]}`?" if near else ""
        raise UserError(
            f"unknown model: `{text}`.{hint} dora-rl plan --help lists those that are known; or "
            "give a number of parameters, such as 32.8e9 or 8B, or a TOML file of model figures."
        ) from None
    if not 1e6 <= parameters <= 1e14:
        raise UserError(f"--model must be 1e6 to 1e14 parameters: `{text}`.")
    return _like_the_nearest(parameters)


def _like_the_nearest(parameters: float) -> tuple[dict[str, Any], str]:
    """Layers and heads of the dense model that is nearest in size."""
    dense = {name: shape for name, shape in SHAPES.items() if shape.experts is None}
    name = min(dense, key=lambda name: abs(log(dense[name].parameters / parameters)))
    table = dense[name].model_dump(exclude_none=True) | {"parameters": parameters}
    return table, f"layers and heads are those of {name}; use --set model.layers=… to change them"


def devices_per_instance(model: Model, device: Device, efficiency: Efficiency, devices: int) -> int:
    """The fewest devices, dividing the cluster, on which the weights leave half to the KV."""
    memory = device.memory_bytes * efficiency.kv_memory_fraction
    needed = model.weight_bytes / (_WEIGHTS_SHARE * memory)
    for count in range(1, devices + 1):
        if count >= needed and devices % count == 0:
            return count
    raise UserError(
        f"the weights ({model.weight_bytes / 1e9:.0f} GB) leave too little memory for KV on "
        f"{devices} device(s): give more --devices, or --devices-per-instance."
    )


def slots_of(costs: Costs, lengths: Lengths) -> int:
    """As many trajectories as the KV memory holds on average, up to what engines offer."""
    fitting = int(_KV_HEADROOM * costs.kv_capacity_tokens / lengths.context)
    return max(1, min(_MOST_SLOTS, fitting))
