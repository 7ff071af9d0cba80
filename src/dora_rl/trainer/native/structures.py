"""What Python and C hand to each other: the structs of layers.c and attention.h, field by field."""

import ctypes
import functools
from ctypes import POINTER, Structure, c_float, c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any

from torch import Tensor

from dora_rl.models.native.library import compiled

_MAIN = Path(__file__).parent / "layers.c"


class NormForward(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("x", "weight", "delta", "sum", "scale", "out")),
        *((name, c_int64) for name in ("rows", "width")),
        *((name, c_int) for name in ("delta_bf16", "out_bf16")),
        ("eps", c_float),
    )


class NormBackward(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("sum", "weight", "scale", "grad_sum", "grad_out")),
        *((name, c_void_p) for name in ("grad", "partial")),
        *((name, c_int64) for name in ("rows", "width")),
        ("out_bf16", c_int),
    )


class Gated(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("gate", "up", "grad_out", "out", "grad_gate", "grad_up")),
        ("numbers", c_int64),
        ("bf16", c_int),
    )


class Attention(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("q", "k", "v", "cos", "sin", "out", "normaliser")),
        *((name, c_void_p) for name in ("grad_out", "grad_q", "grad_k", "grad_v")),
        *((name, c_void_p) for name in ("groups", "segments", "prefixes")),
        *((name, c_int64) for name in ("num_groups", "heads", "kv_heads", "size", "most_keys")),
        ("scale", c_float),
        *((name, c_int) for name in ("bf16", "failed")),
    )


_CALLS = {
    "dora_norm": NormForward,
    "dora_norm_back": NormBackward,
    "dora_gate": Gated,
    "dora_gate_back": Gated,
    "dora_attend": Attention,
    "dora_attend_back": Attention,
}


@functools.cache
def library() -> ctypes.CDLL:
    """The kernels, compiled if they are not in the cache, or `Unavailable`."""
    loaded = compiled(_MAIN)
    for name, kind in _CALLS.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = c_int, [POINTER(kind), c_int64]
    loaded.dora_norm_partials.restype, loaded.dora_norm_partials.argtypes = c_int64, [c_int64]
    return loaded


def call(name: str, threads: int, **fields: Any) -> None:
    """Call a kernel; a tensor is given by its memory, which must be contiguous."""
    given = {
        key: value.data_ptr() if isinstance(value, Tensor) else value
        for key, value in fields.items()
    }
    if not getattr(library(), name)(ctypes.byref(_CALLS[name](**given)), threads):
        raise MemoryError(f"no memory for the scratch of `{name}`")
