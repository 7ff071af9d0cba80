"""Shapes of well-known models, and the choices that follow from a model and a device.

What a user leaves out is derived here, by rules that are written down: the devices of one
instance and the slots of its batch. Nothing here may know of candidates or of the search.
"""

import difflib
from math import log
from types import MappingProxyType
from typing import Any

from dora_rl.config import load_toml
from dora_rl.core.errors import UserError
from dora_rl.simulator.costs import Costs, Device, Efficiency, Model
from dora_rl.simulator.planning.bounds import Lengths

# The `config.json` and the parameter count of each model's page on huggingface.co, embeddings
# included: Qwen/Qwen2.5-*, Qwen/Qwen3-*, meta-llama/Meta-Llama-3-*.
SHAPES: MappingProxyType[str, Model] = MappingProxyType(
    {
        "qwen2.5-1.5b": Model(parameters=1.54e9, layers=28, heads=12, kv_heads=2, head_dim=128),
        "qwen2.5-7b": Model(parameters=7.62e9, layers=28, heads=28, kv_heads=4, head_dim=128),
        "llama-3-8b": Model(parameters=8.03e9, layers=32, heads=32, kv_heads=8, head_dim=128),
        "qwen2.5-14b": Model(parameters=14.8e9, layers=48, heads=40, kv_heads=8, head_dim=128),
        "qwen2.5-32b": Model(parameters=32.8e9, layers=64, heads=40, kv_heads=8, head_dim=128),
        "llama-3-70b": Model(parameters=70.6e9, layers=80, heads=64, kv_heads=8, head_dim=128),
        "qwen2.5-72b": Model(parameters=72.7e9, layers=80, heads=64, kv_heads=8, head_dim=128),
        "qwen3-30b-a3b": Model(
            parameters=30.5e9,
            active_parameters=3.3e9,
            layers=48,
            heads=32,
            kv_heads=4,
            head_dim=128,
            experts=128,
            experts_per_token=8,
        ),
        "qwen3-235b-a22b": Model(
            parameters=235e9,
            active_parameters=22e9,
            layers=94,
            heads=64,
            kv_heads=4,
            head_dim=128,
            experts=128,
            experts_per_token=8,
        ),
    }
)

# The weights may take this share of an instance's memory; the rest is for KV.
_WEIGHTS_SHARE = 0.5
# Slots that an inference engine usually offers at most (vLLM's `max_num_seqs` is 256).
_MOST_SLOTS = 256
# Of the KV memory that mean lengths would fill: lengths vary, and a full memory preempts.
_KV_HEADROOM = 0.9


def model_named(text: str) -> tuple[dict[str, Any], str | None]:
    """The `[model]` table that `--model` means, and a note where something was assumed."""
    shape = SHAPES.get(text.lower())
    if shape is not None:
        return shape.model_dump(exclude_none=True), None
    if text.endswith(".toml"):
        data = load_toml(text)
        inner = data.get("model", data)
        if not isinstance(inner, dict):
            raise UserError(f"no [model] table in `{text}`. Give parameters, layers, heads, ….")
        return inner, None
    try:
        parameters = float(text)
    except ValueError:
        near = difflib.get_close_matches(text.lower(), SHAPES, n=1)
        hint = f" Did you mean `{near[0]}`?" if near else ""
        raise UserError(
            f"unknown model: `{text}`.{hint} Known: {', '.join(SHAPES)}; or give a number of "
            "parameters, such as 32.8e9, or a TOML file of model figures."
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
