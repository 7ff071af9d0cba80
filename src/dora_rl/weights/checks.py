"""Strict reading of JSON that others may have written: manifests, safetensors headers, indexes.

Each check returns the value with its type, or refuses it naming where it stands. Names are
checked here too, so that no name from a file ever becomes a path outside its directory.
"""

import json
import math
import re
from typing import Any

from dora_rl.core.protocol.types import Version
from dora_rl.weights.errors import WeightsError

# The dtypes that a policy may have, by their names in safetensors, with their bytes.
ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2}

_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,230}\.safetensors", re.ASCII)
_TENSOR_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,511}", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
_RESERVED = "__metadata__"  # safetensors keeps this name for itself
_MAX_RANK = 16
_MAX_NUMBER = 2**63 - 1
_MAX_ELEMENTS = 2**56  # far beyond any tensor, and far from an overflow in torch
_SHOWN = 80


def shown(value: object) -> str:
    """A value for a message: in backticks, and never longer than a line."""
    text = value if isinstance(value, str) and value.isprintable() else repr(value)
    return f"`{text if len(text) <= _SHOWN else text[:_SHOWN] + '…'}`"


def json_object(raw: bytes, where: str) -> dict[str, Any]:
    """The object that these bytes are; a key that occurs twice is refused, like NaN."""
    try:
        value = json.loads(
            raw.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant
        )
    except (ValueError, RecursionError) as error:
        raise WeightsError(
            f"{where} is not strict JSON: {error}. It is damaged: write it again."
        ) from None
    if not isinstance(value, dict):
        raise WeightsError(f"{where} must be a JSON object: {shown(value)}.")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the key {shown(name)} occurs twice")
        found[name] = value
    return found


def _no_constant(text: str) -> Any:
    raise ValueError(f"{shown(text)} is not a number")


def entries(value: Any, where: str) -> dict[str, Any]:
    """An object with any keys."""
    if not isinstance(value, dict):
        raise WeightsError(f"{where} must be an object: {shown(value)}.")
    return value


def items(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise WeightsError(f"{where} must be a list: {shown(value)}.")
    return value


def record(value: Any, keys: frozenset[str], where: str) -> dict[str, Any]:
    """An object with exactly these keys."""
    found = entries(value, where)
    if unknown := sorted(found.keys() - keys):
        raise WeightsError(f"{where} has an unknown key: {shown(unknown[0])}.")
    if missing := sorted(keys - found.keys()):
        raise WeightsError(f"{where} lacks the key {shown(missing[0])}.")
    return found


def number(value: Any, where: str) -> int:
    """A whole number >= 0 of 63 bits (`true` is none)."""
    if type(value) is not int or not 0 <= value <= _MAX_NUMBER:
        raise WeightsError(f"{where} must be a whole number >= 0: {shown(value)}.")
    return value


def logprob(value: Any, where: str) -> float:
    """A number <= 0, not endless."""
    if type(value) is not float or not -math.inf < value <= 0:
        raise WeightsError(f"{where} has a log-probability that is none: {shown(value)}.")
    return value


def version_number(value: Any) -> Version:
    return number(value, "version")


def sha256(value: Any, where: str) -> str:
    if not isinstance(value, str) or not _SHA256.fullmatch(value):
        raise WeightsError(f"{where} must be 64 hexadecimal digits: {shown(value)}.")
    return value


def dtype(value: Any, where: str) -> str:
    if not isinstance(value, str) or value not in ITEM_BYTES:
        known = ", ".join(ITEM_BYTES)
        raise WeightsError(f"{where} has the dtype {shown(value)}. Convert it to one of {known}.")
    return value


def shape(value: Any, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > _MAX_RANK:
        raise WeightsError(f"the shape of {where} must be a list of sizes: {shown(value)}.")
    sizes = tuple(number(size, f"a size in the shape of {where}") for size in value)
    # Without the zeros: torch computes strides even where there is nothing to step over.
    if math.prod(size for size in sizes if size) > _MAX_ELEMENTS:
        raise WeightsError(f"the shape of {where} is too large: {shown(value)}.")
    return sizes


def num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * ITEM_BYTES[dtype]


def file_name(value: Any, where: str) -> str:
    """The plain name of a safetensors file: no folder, not hidden."""
    if not isinstance(value, str) or not _FILE_NAME.fullmatch(value):
        raise WeightsError(
            f"{where} must name a safetensors file in the same directory: {shown(value)}. "
            "Use letters, digits, `_`, `-` and `.`, and the ending `.safetensors`."
        )
    return value


def tensor_name(value: Any, where: str) -> str:
    if not isinstance(value, str) or not _TENSOR_NAME.fullmatch(value) or value == _RESERVED:
        raise WeightsError(
            f"{where} has a tensor of a name that is not allowed: {shown(value)}. "
            "Use letters, digits and `_.:-`, not a dot or a dash first."
        )
    return value
