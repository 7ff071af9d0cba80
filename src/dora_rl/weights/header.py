"""The safetensors format: headers written and read strictly. Free of torch.

    8 bytes    length of the header, little-endian
    header     JSON: name -> dtype, shape, data_offsets; padded with spaces
    tensors    one after the other, without a hole

What is read may come from anyone: every offset is checked before a tensor is made of it.
"""

import json
import mmap
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dora_rl.weights import checks, disk
from dora_rl.weights.errors import WeightsError

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library too
_LENGTH = struct.Struct("<Q")
_METADATA = "__metadata__"
_KEYS = frozenset({"dtype", "shape", "data_offsets"})
_PICKLE = re.compile(rb"\x80[\x02-\x05]|PK\x03\x04")  # plain, or in a zip as torch.save writes it
_ALIGN = 64  # a cache line: where sizes are multiples of it, every tensor starts on one


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a tensor is in its file, in bytes from the file's start."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def encode_head(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """Length and header of a file with these (name, dtype, shape), in their order."""
    header: dict[str, Any] = {_METADATA: {"format": "pt"}}  # Hugging Face asks for it
    end = 0
    for name, dtype, shape in tensors:
        begin, end = end, end + checks.num_bytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-(_LENGTH.size + len(text)) % _ALIGN)
    return _LENGTH.pack(len(text)) + text


def read(path: Path, *, follow_links: bool = False) -> tuple[mmap.mmap, bytes, dict[str, Stored]]:
    """The file mapped, its length and header as they are, and where its tensors lie."""
    data = disk.map_file(path, follow_links=follow_links)
    where = f"`{path}`"
    if data is None or len(data) < _LENGTH.size:
        raise WeightsError(f"{where} is too short to be safetensors. Write it again.")
    start = _data_start(data[: _LENGTH.size], len(data), where)
    head = data[:start]
    return data, head, _parse_header(head[_LENGTH.size :], start, len(data), where)


def _data_start(first: bytes, size: int, where: str) -> int:
    """Refuse a header that is too long, before a byte of it is read."""
    length: int = _LENGTH.unpack(first)[0]
    if length > size - _LENGTH.size and _PICKLE.match(first):
        raise WeightsError(
            f"{where} is a pickle under another name, which can run code when it is read. It is "
            "not read: save the model with `save_pretrained`, which writes safetensors."
        )
    if length > MAX_HEADER_BYTES:
        raise WeightsError(
            f"the header of {where} has {length} bytes; the limit is {MAX_HEADER_BYTES}. "
            "It is not safetensors, or it was altered."
        )
    if length > size - _LENGTH.size:
        raise WeightsError(
            f"the header of {where} has {length} bytes, the file only {size}. It is truncated."
        )
    return _LENGTH.size + length


def _parse_header(raw: bytes, start: int, size: int, where: str) -> dict[str, Stored]:
    """Every tensor in order of its place; together they fill the file exactly."""
    header = checks.json_object(raw, f"the header of {where}")
    metadata = checks.entries(header.pop(_METADATA, {}), f"`{_METADATA}` in {where}")
    if not all(isinstance(value, str) for value in metadata.values()):
        raise WeightsError(f"`{_METADATA}` in {where} must hold strings only.")
    found = {
        checks.tensor_name(name, where): _parse_entry(entry, start, f"tensor `{name}` in {where}")
        for name, entry in header.items()
    }
    ordered = sorted(found.items(), key=lambda item: (item[1].begin, item[1].end))
    expected = start
    for name, stored in ordered:
        if stored.begin != expected:
            what = "overlaps the one before" if stored.begin < expected else "leaves a hole before"
            raise WeightsError(f"tensor `{name}` in {where} {what}. Write it again.")
        if stored.end > size:
            raise WeightsError(
                f"tensor `{name}` in {where} ends at byte {stored.end}, the file at {size}. "
                "It is truncated: write it again."
            )
        expected = stored.end
    if expected != size:
        raise WeightsError(f"{where} has {size - expected} bytes after its last tensor.")
    return dict(ordered)


def _parse_entry(value: Any, start: int, where: str) -> Stored:
    entry = checks.record(value, _KEYS, where)
    dtype = checks.dtype(entry["dtype"], where)
    shape = checks.shape(entry["shape"], where)
    offsets = entry["data_offsets"]
    if not isinstance(offsets, list) or len(offsets) != 2:
        raise WeightsError(f"data_offsets of {where} must be two: {checks.shown(offsets)}.")
    begin, end = (checks.number(offset, f"an offset of {where}") for offset in offsets)
    if end - begin != checks.num_bytes(dtype, shape):
        raise WeightsError(
            f"{where} takes {end - begin} bytes; its dtype and shape ask for "
            f"{checks.num_bytes(dtype, shape)}: `{dtype}`, `{list(shape)}`."
        )
    return Stored(dtype, shape, start + begin, start + end)
