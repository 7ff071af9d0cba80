"""Tensors as bytes: which are taken, whether they are numbers, and their digests.

Digests are computed over the tensor's own memory, never over a copy of it.
"""

import hashlib
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

from dora_rl.weights import checks
from dora_rl.weights.adapter import Adapter
from dora_rl.weights.errors import WeightsError
from dora_rl.weights.manifest import digest_of

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# hashlib lets go of the interpreter: two threads are nearly twice as fast, and loading must
# not take the whole machine from the engine that continues generating.
_HASH_THREADS = 2
_FEW_BYTES = 1 << 20  # hashed in less time than it takes to start threads


def dtype_name(tensor: torch.Tensor) -> str:
    return _NAMES[tensor.dtype]


def check_plain(name: str, tensor: torch.Tensor) -> None:
    """Refuse what is no plain tensor of a known dtype: its bytes would not be its weights."""
    # Subclasses too: a shard of a distributed tensor looks like the whole.
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise WeightsError(
            f"tensor `{name}` is a `{type(tensor).__name__}`. "
            "Give a plain tensor; of a sharded one, its `full_tensor()`."
        )
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        raise WeightsError(
            f"tensor `{name}` has no dense memory: layout `{tensor.layout}`, device "
            f"`{tensor.device}`. Give a dense tensor that holds its values."
        )
    if tensor.dtype not in _NAMES:
        checks.dtype(str(tensor.dtype), f"tensor `{name}`")


def ready(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as it is written: on the CPU, contiguous, finite. A copy only where needed."""
    check_plain(name, tensor)
    tensor = tensor.detach().cpu().contiguous()
    check_finite(name, tensor)
    return tensor


def check_finite(name: str, tensor: torch.Tensor) -> None:
    """Refuse NaN and infinity. Both extremes show them, in one pass without a copy."""
    if tensor.numel() == 0:
        return
    least, most = (extreme.item() for extreme in torch.aminmax(tensor))
    if not (math.isfinite(least) and math.isfinite(most)):
        raise WeightsError(
            f"tensor `{name}` is not finite: from `{least}` to `{most}`. The policy has "
            "diverged: go back to the last version, with a smaller learning rate."
        )


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor itself."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def as_it_is(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def digests(
    tensors: Mapping[str, torch.Tensor],
    prepare: Callable[[str, torch.Tensor], torch.Tensor] = as_it_is,
) -> dict[str, str]:
    """The sha256 of each tensor's bytes, from what is in memory.

    With `ready` as `prepare`, of what would be written; a copy lives only as long as its hash.
    """

    def sha256(name: str) -> str:
        return hashlib.sha256(bytes_of(prepare(name, tensors[name]))).hexdigest()

    largest_first = sorted(tensors, key=lambda name: -tensors[name].nbytes)
    if sum(tensor.nbytes for tensor in tensors.values()) <= _FEW_BYTES:
        return {name: sha256(name) for name in largest_first}
    with ThreadPoolExecutor(_HASH_THREADS) as pool:
        return dict(zip(largest_first, pool.map(sha256, largest_first), strict=True))


def weights_digest(
    tensors: Mapping[str, torch.Tensor],
    sha256: Mapping[str, str] | None = None,
    adapter: Adapter | None = None,
) -> str:
    """The digest of these weights, as a manifest has it; `sha256`, if known, is from `digests`."""
    sha256 = digests(tensors) if sha256 is None else sha256
    rows = (
        (name, dtype_name(tensor), tuple(tensor.shape), sha256[name])
        for name, tensor in tensors.items()
    )
    return digest_of(rows, adapter)
