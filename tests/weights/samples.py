"""Weights, and ways to damage them, that the tests of the weight store share."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from dora_rl.weights.manifest import FILE_NAME, checksum_of

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """A small policy with every dtype, a scalar and a tensor without elements."""
    source = torch.Generator().manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, generator=source).to(dtype)

    return {
        "model.embed_tokens.weight": normal(7, 4),
        "model.layers.0.self_attn.q_proj.weight": normal(4, 4),
        "model.layers.0.mlp.up_proj.weight": normal(5, 4, dtype=torch.float16),
        "model.norm.weight": normal(4, dtype=torch.float32),
        "scale": normal(dtype=torch.float32),
        "unused": normal(0, 3),
    }


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist())


def identical(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> bool:
    """The same names, dtypes, shapes and bits."""
    return left.keys() == right.keys() and all(
        (left[n].dtype, left[n].shape, raw(left[n])) == (t.dtype, t.shape, raw(t))
        for n, t in right.items()
    )


def replace(path: Path, data: bytes) -> None:
    """Other content under the same name; published files are read-only."""
    path.unlink()
    path.write_bytes(data)


@contextmanager
def replaced(path: Path, data: bytes) -> Iterator[None]:
    """The same, until the end of the block."""
    before = path.read_bytes()
    replace(path, data)
    try:
        yield
    finally:
        replace(path, before)


def forged(manifest: bytes, change: Callable[[Any], Any]) -> bytes:
    """A changed manifest whose checksum is right: only what it says can give it away."""
    content = json.loads(manifest)
    change(content)
    if content.pop("checksum", None) is not None:
        content["checksum"] = checksum_of(content)
    return spelled(content)


def spelled(content: Any) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def forge(directory: Path, change: Callable[[Any], Any]) -> None:
    path = directory / FILE_NAME
    replace(path, forged(path.read_bytes(), change))
