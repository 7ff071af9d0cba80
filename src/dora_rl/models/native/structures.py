"""What Python and C hand to each other: the structs of decoder.c and products.h, field by field."""

from ctypes import POINTER, Array, Structure, c_double, c_int64, c_void_p
from enum import IntEnum
from typing import Any, TypeVar

_Struct = TypeVar("_Struct", bound=Structure)


class Product(IntEnum):
    """The products of a layer, in the order of C's enum."""

    QKV = 0
    OUT = 1
    GATE = 2
    UP = 3
    DOWN = 4


class Stored(IntEnum):
    """How weights are stored and multiplied, in the order of C's enum; KV alone has halves."""

    FLOATS = 0
    HALVES = 1
    PAIRS = 2
    DOTS = 3


class Matrix(Structure):
    """Weights in panels; without them there is no such product."""

    _fields_ = (
        ("panels", c_void_p),
        ("bias", c_void_p),
        ("inputs", c_int64),
        ("outputs", c_int64),
        ("stored", c_int64),
    )


class Layer(Structure):
    _fields_ = (
        ("attention_norm", c_void_p),
        ("qk_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("products", Matrix * len(Product)),
    )


class Weights(Structure):
    _fields_ = (
        ("embedding", c_void_p),
        ("embedding_bf16", c_int64),
        ("layers", POINTER(Layer)),
        ("norm", c_void_p),
        ("head", Matrix),
    )


class Span(Structure):
    _fields_ = (("start", c_int64), ("stop", c_int64), ("weights", POINTER(Weights)))


class Delta(Structure):
    _fields_ = (("lower", Matrix), ("upper", Matrix))


class AdapterSpan(Structure):
    _fields_ = (("start", c_int64), ("stop", c_int64), ("deltas", POINTER(Delta)))


class AdapterTile(Structure):
    _fields_ = (("start", c_int64), ("stop", c_int64), ("adapter", c_int64))


class Shape(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("layers", "hidden", "inner", "heads", "kv_heads", "width")),
        ("eps", c_double),
        ("keys", c_void_p),
        ("values", c_void_p),
        *((name, c_int64) for name in ("num_blocks", "block_tokens", "kv_bf16")),
    )


class Batch(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("rows", "num_spans", "num_adapters", "num_tiles")),
        *((name, c_int64) for name in ("dots", "rank")),
        ("spans", POINTER(Span)),
        ("adapters", POINTER(AdapterSpan)),
        ("tiles", POINTER(AdapterTile)),
        *((name, c_void_p) for name in ("tokens", "positions", "cosines", "sines", "places")),
        *((name, c_void_p) for name in ("first", "shared", "own", "blocks", "logits")),
        ("logits_stride", c_int64),
        ("longest", c_int64),
        ("workspace", c_void_p),
    )


class LoneProduct(Structure):
    """One product by itself."""

    _fields_ = (
        ("matrix", POINTER(Matrix)),
        ("x", c_void_p),
        ("narrow", c_void_p),
        ("x_stride", c_int64),
        ("rows", c_int64),
        ("out", c_void_p),
        ("out_stride", c_int64),
    )


def array_of(kind: type[_Struct], items: list[Any]) -> "Array[_Struct]":
    """The items as C has them, one behind the other."""
    return (kind * len(items))(*items)
