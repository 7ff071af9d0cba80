"""The tensors of safetensors files, mapped without a copy; `header` says where they are."""

import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from dora_rl.weights import header
from dora_rl.weights.errors import WeightsError
from dora_rl.weights.header import Stored
from dora_rl.weights.tensors import DTYPES


@dataclass(frozen=True, slots=True)
class MappedFile:
    """A safetensors file in memory; `head` is its length and header, as they are."""

    num_bytes: int
    head: bytes
    tensors: dict[str, torch.Tensor]


def map_tensors(path: Path, *, follow_links: bool = False) -> MappedFile:
    """Check a file's header and map its tensors; they keep the mapping alive."""
    where = f"`{path}`"
    data, head, stored = header.read(path, follow_links=follow_links)
    try:
        _check_copies(stored.values())
        tensors = {name: _map(data, at) for name, at in stored.items()}
    except MemoryError:  # a sparse file can claim to be of any size
        raise WeightsError(
            f"{where} is larger than this machine's memory: it is not read."
        ) from None
    return MappedFile(len(data), head, tensors)


def _check_copies(tensors: Iterable[Stored]) -> None:
    """Some systems promise memory that they do not have, and kill who uses it."""
    copied = sum(stored.end - stored.begin for stored in tensors if _is_odd(stored))
    if copied > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
        raise MemoryError


def _is_odd(stored: Stored) -> bool:
    """Whether it must be copied, since some processors cannot read it in place."""
    return stored.begin % DTYPES[stored.dtype].itemsize != 0  # never in our files


def _map(data: mmap.mmap, stored: Stored) -> torch.Tensor:
    dtype = DTYPES[stored.dtype]
    count = (stored.end - stored.begin) // dtype.itemsize
    if count == 0:
        return torch.empty(stored.shape, dtype=dtype)
    if _is_odd(stored):
        copy = bytearray(memoryview(data)[stored.begin : stored.end])
        return torch.frombuffer(copy, dtype=dtype).view(stored.shape)
    flat = torch.frombuffer(data, dtype=dtype, count=count, offset=stored.begin)
    return flat.view(stored.shape)
