"""A sequence with its KV as a message to another engine, and back.

The KV travels as [layer, k or v, token, head, width], whatever the blocks on either side. What
does not fit the model here is refused; version and digest are the engine's to check.
"""

import numpy as np
import torch
from torch import Tensor

from dora_rl.engines.embedded.sequences import Sequence, Stage
from dora_rl.engines.errors import ImportRefused
from dora_rl.engines.wire import Export
from dora_rl.models.config import ModelConfig

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def export(config: ModelConfig, sequence: Sequence, digest: str, kv_L2TKD: Tensor) -> Export:
    """All that the sequence needs to continue elsewhere."""
    request = sequence.request
    return Export(
        model=_kind(config),
        trajectory=sequence.id,
        version=sequence.version,
        digest=digest,
        prompt=request.prompt,
        generated=tuple(sequence.generated),
        seed=request.seed,
        sampling=request.sampling,
        hold=request.hold,
        held=sequence.stage is Stage.HELD,
        turn_start=sequence.turn_start,
        kv_dtype=str(kv_L2TKD.dtype).removeprefix("torch."),
        kv_shape=tuple(kv_L2TKD.shape),
        kv=tuple(_bytes_of(layer).tobytes() for layer in kv_L2TKD.contiguous()),
    )


def kv_of(config: ModelConfig, export: Export, dtype: torch.dtype) -> Tensor:
    """The KV of an exported trajectory, in this dtype."""
    known = len(export.prompt) - 1 + len(export.generated)
    *_, tokens, _, _ = export.kv_shape if len(export.kv_shape) == 5 else (-1,) * 5
    shape = (config.num_layers, 2, tokens, config.num_kv_heads, config.head_dim)
    fits = (
        export.model == _kind(config)
        and export.kv_dtype in _DTYPES
        and 0 <= tokens <= known
        and export.kv_shape == shape
    )
    dtype_there = _DTYPES.get(export.kv_dtype, torch.float32)
    layer_bytes = 2 * tokens * config.num_kv_heads * config.head_dim * dtype_there.itemsize
    # Before anything is allocated: the shape is what a message claims.
    if not fits or [len(part) for part in export.kv] != [layer_bytes] * config.num_layers:
        raise ImportRefused(
            f"the KV of trajectory {export.trajectory} is `{export.model}` of shape "
            f"{export.kv_shape} in {export.kv_dtype}: here it must be `{_kind(config)}`, with at "
            f"most {known} tokens. Move it to an instance of the same model."
        )
    kv = torch.empty(shape, dtype=dtype_there)
    for layer, part in zip(kv, export.kv, strict=True):
        _bytes_of(layer)[:] = np.frombuffer(part, np.uint8)
    return kv.to(dtype)


def _kind(config: ModelConfig) -> str:
    """What KV must have in common to be read by the same attention."""
    return f"{config.family} {config.num_layers}x{config.num_kv_heads}x{config.head_dim}"


def _bytes_of(tensor: Tensor) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    """The memory of a contiguous tensor, as bytes."""
    return tensor.flatten().view(torch.uint8).numpy()
