"""What changed between two versions, as bytes: exact, whatever the bits mean.

    magic     16 bytes, with the number of the format
    length    of the header: 8 bytes, little-endian
    header    JSON: version, digest, base, base_digest, tensors (name -> blocks; unchanged: absent)
    blocks    one after the other, without a hole

A block is 4 Mi elements of a tensor. Where many have changed, it is the elements themselves:
`[bytes]`. Else `[bytes, changed, gap_bytes, step_bytes]`: how far each changed element is from the
one before, then how far it moved as a whole number, lowest bytes first, as zlib where that is
smaller. A delta may come from anyone: `apply` refuses what does not fit, and the digest of the
result is the proof.
"""

import json
import struct
import zlib
from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dora_rl.core.protocol.types import Version
from dora_rl.weights import checks
from dora_rl.weights.errors import WeightsError
from dora_rl.weights.manifest import MAX_BYTES

Words = npt.NDArray[Any]  # unsigned whole numbers, as wide as the tensor's elements

BLOCK = 1 << 22  # elements: small enough to compare in a cache-friendly piece, large for zlib
_MAGIC = b"dora-rl delta 1\n"
_LENGTH = struct.Struct("<Q")
_KEYS = frozenset({"version", "digest", "base", "base_digest", "tensors"})
_DENSE = 4  # a block of which more than one in so many changed takes longer to pack than to send
_WORTH = 2  # a delta that is not so many times smaller than the whole does not pay
_THREADS = 2  # numpy and zlib let go of the interpreter; the trainer needs the other cores
_GAP_BYTES = 4
_INTS = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, slots=True)
class Link:
    """From which weights to which; both digests are those of manifests."""

    base: Version
    base_digest: str
    version: Version
    digest: str


def encode(
    link: Link, old: Mapping[str, torch.Tensor], new: Mapping[str, torch.Tensor]
) -> bytes | None:
    """What turns `old` into `new`; None if they differ in more than numbers, or it does not pay.

    The tensors are on the CPU and contiguous.
    """
    if _shapes(old) != _shapes(new):
        return None
    most = sum(tensor.nbytes for tensor in new.values()) // _WORTH
    tensors: dict[str, list[list[int]]] = {}
    parts: list[bytes] = []
    size = 0
    with closing(_blocks(old, new)) as blocks:
        for name, entry, data in blocks:
            tensors.setdefault(name, []).append(entry)
            parts.append(data)
            size += len(data)
            if size > most:
                return None
    tensors = {name: listed for name, listed in tensors.items() if any(e[0] for e in listed)}
    header = _header(link, tensors)
    if len(header) > MAX_BYTES or len(header) + size > most:
        return None
    return b"".join([_MAGIC, _LENGTH.pack(len(header)), header, *parts])


def link_of(delta: bytes, where: str) -> Link:
    """What a delta says that it is."""
    return _parse(delta, where)[0]


def apply(delta: bytes, tensors: Mapping[str, torch.Tensor], where: str) -> None:
    """Turn the base's tensors into the others, in place; the caller checks the digest.

    A `WeightsError` leaves them half changed: they are of no use any more.
    """
    _, entries, start = _parse(delta, where)
    rest = memoryview(delta)[start:]
    for name, listed in entries.items():
        if name not in tensors:
            raise _refusal(where, f"tensor {checks.shown(name)} is not in its base")
        words = _words(tensors[name])
        blocks = [words[at : at + BLOCK] for at in _starts(words)]
        if len(blocks) != len(listed):
            raise _refusal(where, f"{len(listed)} blocks of `{name}`, which has {len(blocks)}")
        for block, entry in zip(blocks, listed, strict=True):
            if entry[0] > len(rest):
                raise _refusal(where, f"it is cut within `{name}`")
            _apply_block(block, entry, rest[: entry[0]], f"`{name}` in {where}")
            rest = rest[entry[0] :]
    if rest:
        raise _refusal(where, f"{len(rest)} bytes after its last block")


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}


def _words(tensor: torch.Tensor) -> Words:
    """The memory of a tensor itself as unsigned whole numbers."""
    flat = tensor.detach().reshape(-1).view(_INTS[tensor.itemsize]).numpy()
    return flat.view(f"<u{tensor.itemsize}")


def _starts(words: Words) -> range:
    return range(0, len(words), BLOCK)


# Blocks


def _blocks(
    old: Mapping[str, torch.Tensor], new: Mapping[str, torch.Tensor]
) -> Generator[tuple[str, list[int], bytes], None, None]:
    """Every block in order of name; nothing is encoded any more once the caller closes it."""

    def one(job: tuple[str, int]) -> tuple[str, list[int], bytes]:
        name, at = job
        here = slice(at, at + BLOCK)
        return name, *_encode_block(_words(old[name])[here], _words(new[name])[here])

    jobs = [(name, at) for name in sorted(new) for at in _starts(_words(new[name]))]
    with ThreadPoolExecutor(_THREADS) as pool:
        try:
            yield from pool.map(one, jobs)
        finally:
            pool.shutdown(cancel_futures=True)


def _encode_block(old: Words, new: Words) -> tuple[list[int], bytes]:
    """The entry of a block in the header, and its bytes."""
    changed = np.flatnonzero(old != new)
    if len(changed) * _DENSE > len(new):
        data = new.tobytes()
        return [len(data)], data
    if not len(changed):
        return [0, 0, 0, 0], b""
    gaps = np.diff(changed, prepend=-1) - 1
    steps = _folded(new[changed] - old[changed])
    packed = [_planes(gaps.astype("<u4")), _planes(steps)]
    raw = b"".join(data for _, data in packed)
    # Equal bytes come in runs, the rest is noise: of zlib's ways this is the fastest and smallest.
    compressor = zlib.compressobj(1, strategy=zlib.Z_RLE)
    data = min(raw, compressor.compress(raw) + compressor.flush(), key=len)
    return [len(data), len(changed), *(width for width, _ in packed)], data


def _apply_block(block: Words, entry: list[int], data: memoryview, where: str) -> None:
    if len(entry) == 1:
        if len(data) != block.nbytes:
            raise _refusal(where, f"a whole block of {len(data)} bytes for {block.nbytes}")
        block[:] = np.frombuffer(data, dtype=block.dtype)
        return
    _, count, gap_bytes, step_bytes = entry
    if count == 0 and not data:
        return
    if not 0 < count <= len(block) or gap_bytes > _GAP_BYTES or step_bytes > block.itemsize:
        raise _refusal(where, f"a block that cannot be: {checks.shown(entry)}")
    gaps_end, size = count * gap_bytes, count * (gap_bytes + step_bytes)
    raw = data if len(data) == size else _inflated(data, size, where)
    gaps = _numbers(raw[:gaps_end], count, "<u4").astype(np.int64)
    places = np.cumsum(gaps + 1) - 1
    if places[-1] >= len(block):
        raise _refusal(where, f"an element at {places[-1]} of {len(block)}")
    block[places] += _unfolded(_numbers(raw[gaps_end:], count, block.dtype.str))


def _inflated(data: memoryview, size: int, where: str) -> memoryview:
    inflater = zlib.decompressobj()
    try:
        raw = inflater.decompress(data, size + 1)
    except zlib.error as error:
        raise _refusal(where, f"a block that is no zlib ({error})") from None
    if len(raw) != size or not inflater.eof or inflater.unused_data:
        raise _refusal(where, f"a block of another size than {size} bytes")
    return memoryview(raw)


def _folded(steps: Words) -> Words:
    """Small numbers of small steps, up or down: 0, -1, 1, -2, 2 are 0, 1, 2, 3, 4."""
    signed = steps.view(f"<i{steps.itemsize}")
    return ((signed << 1) ^ (signed >> (8 * steps.itemsize - 1))).view(steps.dtype)


def _unfolded(folded: Words) -> Words:
    return (folded >> 1) ^ np.negative(folded & 1)  # type: ignore[no-any-return]


def _planes(numbers: Words) -> tuple[int, bytes]:
    """All lowest bytes, then all second ones, and so on, as far as any is not 0."""
    width = (int(numbers.max()).bit_length() + 7) // 8
    planes = numbers.view(np.uint8).reshape(-1, numbers.itemsize).T[:width]
    return width, np.ascontiguousarray(planes).tobytes()


def _numbers(data: memoryview, count: int, dtype: str) -> Words:
    """The opposite of `_planes`."""
    numbers = np.zeros(count, dtype)
    planes = np.frombuffer(data, dtype=np.uint8).reshape(-1, count)
    numbers.view(np.uint8).reshape(count, -1).T[: len(planes)] = planes
    return numbers


# The header


def _header(link: Link, tensors: Mapping[str, list[list[int]]]) -> bytes:
    content = {
        "version": link.version,
        "digest": link.digest,
        "base": link.base,
        "base_digest": link.base_digest,
        "tensors": tensors,
    }
    return json.dumps(content, separators=(",", ":")).encode("ascii")


def _parse(delta: bytes, where: str) -> tuple[Link, dict[str, list[list[int]]], int]:
    """What it is, the blocks of each tensor, and where the first one begins."""
    begin = len(_MAGIC) + _LENGTH.size
    if delta[: len(_MAGIC)] != _MAGIC or len(delta) < begin:
        raise _refusal(where, f"it begins with {checks.shown(bytes(delta[: len(_MAGIC)]))}")
    (length,) = _LENGTH.unpack_from(delta, len(_MAGIC))
    if length > min(MAX_BYTES, len(delta) - begin):
        raise _refusal(where, f"a header of {length} bytes in {len(delta)}")
    start = begin + length
    content = checks.record(
        checks.json_object(bytes(delta[begin:start]), f"the header of {where}"), _KEYS, where
    )
    link = Link(
        checks.version_number(content["base"]),
        checks.sha256(content["base_digest"], f"base_digest in {where}"),
        checks.version_number(content["version"]),
        checks.sha256(content["digest"], f"digest in {where}"),
    )
    tensors = checks.entries(content["tensors"], f"tensors in {where}")
    blocks = {name: list(_entries(listed, name, where)) for name, listed in tensors.items()}
    return link, blocks, start


def _entries(listed: Any, name: str, where: str) -> Iterator[list[int]]:
    about = f"a block of {checks.shown(name)} in {where}"
    for entry in checks.items(listed, about):
        numbers = [checks.number(number, about) for number in checks.items(entry, about)]
        if len(numbers) not in (1, 4):
            raise _refusal(where, f"{about} has {len(numbers)} numbers")
        yield numbers


def _refusal(where: str, what: str) -> WeightsError:
    return WeightsError(f"the delta {where} is damaged: {what}. The whole version is needed.")
