"""A trajectory with its KV as a message to another engine of its kind, and back.

The KV is bytes, a part for each layer. What does not fit here is refused; version and digest are
the engine's to check.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dora_rl.engines.base import Request
from dora_rl.engines.errors import KvRefused
from dora_rl.engines.wire import Export

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def export(
    request: Request,
    digest: str,
    kind: str,
    kv: Tensor,
    tokens: int,
    *,
    generated: Sequence[int],
    turn_start: int,
    held: bool,
) -> Export:
    """All that a trajectory needs to continue elsewhere, with the KV of its first `tokens`.

    The first axis of the KV is the layer; `kind` is what an engine must have to read it.
    """
    return Export(
        model=kind,
        trajectory=request.trajectory,
        version=request.version,
        digest=digest,
        prompt=request.prompt,
        generated=tuple(generated),
        seed=request.seed,
        sampling=request.sampling,
        hold=request.hold,
        held=held,
        turn_start=turn_start,
        kv_tokens=tokens,
        kv_dtype=dtype_name(kv.dtype),
        kv_shape=tuple(kv.shape),
        kv=tuple(_bytes_of(layer).tobytes() for layer in kv.contiguous()),
    )


def kv_of(export: Export, kind: str, shape: tuple[int, ...]) -> Tensor:
    """The KV of an exported trajectory, if it is of this kind and shape."""
    known = len(export.prompt) - 1 + len(export.generated)
    kv = None
    if export.model == kind and 0 <= export.kv_tokens <= known and export.kv_shape == shape:
        kv = _from_parts(export.kv, shape, export.kv_dtype)
    if kv is None:
        raise KvRefused(
            f"the KV of trajectory {export.trajectory} is `{export.model}` of shape "
            f"{export.kv_shape} in {export.kv_dtype}, of {export.kv_tokens} tokens: here it must "
            f"be `{kind}`, with at most {known} tokens. Move it to an instance of the same model "
            "and engine, on the same kind of processor."
        )
    return kv


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _from_parts(parts: Sequence[bytes], shape: tuple[int, ...], dtype: str) -> Tensor | None:
    """The tensor of this shape; None if the parts are not that, before anything is allocated."""
    layers, *layer = shape
    if dtype not in _DTYPES:
        return None
    size = math.prod(layer) * _DTYPES[dtype].itemsize
    if [len(part) for part in parts] != [size] * layers:
        return None
    kv = torch.empty(shape, dtype=_DTYPES[dtype])
    for place, part in zip(kv, parts, strict=True):
        _bytes_of(place)[:] = np.frombuffer(part, np.uint8)
    return kv


def _bytes_of(tensor: Tensor) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    """The memory of a contiguous tensor, as bytes."""
    return tensor.flatten().view(torch.uint8).numpy()
