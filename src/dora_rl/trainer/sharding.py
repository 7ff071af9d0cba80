"""A sharded tensor and its shards: FSDP2 cuts every parameter by rows, rank by rank.

Rank `r` of `n` has rows `r * c` to `(r + 1) * c - 1` with `c = ceil(rows / n)`; the last ranks
may have fewer, or none. A plain tensor is its own only shard.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard


def local(tensor: Tensor) -> Tensor:
    """This process's shard of a tensor, sharing its memory."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full(tensor: Tensor) -> Tensor:
    """The whole of a tensor, in every process; all of the group must ask."""
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


def shard_of(value: Tensor, like: Tensor) -> Tensor:
    """The shard of a whole tensor that this process has of `like`: a view, nothing is read."""
    if not isinstance(like, DTensor):
        return value
    rows = _rows_a_rank(like)
    start = min(like.device_mesh.get_local_rank() * rows, len(value))
    return value[start : start + rows]


def gathered(tensor: Tensor, dtype: torch.dtype | None = None, *, copy: bool) -> Tensor | None:
    """The whole of a tensor on the CPU, in `dtype`: in the leader alone, None elsewhere.

    Every process of the group must ask, and none but the leader ever holds more than its shard.
    Without `copy`, the memory may be the tensor's own.
    """
    shard = local(tensor).to(dtype or tensor.dtype)
    if not isinstance(tensor, DTensor):
        return shard.to("cpu", copy=copy and shard.data_ptr() == tensor.data_ptr())
    mesh, rows = tensor.device_mesh, _rows_a_rank(tensor)
    if len(shard) < rows:  # all ranks must send equally much
        shard = torch.cat([shard, shard.new_zeros(rows - len(shard), *shard.shape[1:])])
    if mesh.get_local_rank():
        dist.gather(shard, None, group=mesh.get_group(), group_dst=0)
        return None
    whole = shard.new_empty(mesh.size() * rows, *shard.shape[1:])
    shards = list(torch.split(whole, rows))
    dist.gather(shard, shards, group=mesh.get_group(), group_dst=0)
    return whole[: tensor.shape[0]].cpu()


def _rows_a_rank(tensor: DTensor) -> int:
    assert tensor.placements == (Shard(0),), tensor.placements
    return -(-tensor.shape[0] // tensor.device_mesh.size())
