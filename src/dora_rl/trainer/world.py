"""The processes that train together: sums over them, and the sharding of a policy (FSDP2).

A world of one needs no process group and adds nothing to any call.
"""

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from dora_rl.trainer.errors import TrainerError
from dora_rl.trainer.model import Policy

# Within a step processes wait for each other's slowest micro-batch; between steps they do not.
_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class World:
    """This process among `size`, of which 0 leads."""

    rank: int = 0
    size: int = 1

    def total(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def largest(self, tensor: Tensor) -> Tensor:
        if self.size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor

    def shard(self, policy: Policy) -> None:
        """Give each process its part of the weights; layers are gathered one at a time."""
        if self.size == 1:
            return
        mesh = init_device_mesh(policy.device.type, (self.size,))
        kinds = policy.model._no_split_modules or ()
        layers = [m for m in policy.modules() if type(m).__name__ in kinds]
        for module in (*layers, policy):
            # The root too: weights change between two passes, and it must not keep old ones.
            fully_shard(module, mesh=mesh, reshard_after_forward=True)
            assert isinstance(module, FSDPModule)
            # The loss is a sum whose weights are those of the whole mini-batch.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)

    def sync_gradients(self, policy: Policy, last: bool) -> None:
        """Reduce gradients with the last micro-batch alone."""
        if self.size > 1:
            assert isinstance(policy, FSDPModule)
            policy.set_requires_gradient_sync(last)


def loopback_interface() -> str | None:
    """Its name: `lo` on Linux, `lo0` on macOS and BSD."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), None)


def join(rendezvous: Path, rank: int, size: int) -> World:
    """Become one of `size` processes that meet at a file in a private directory."""
    if dist.is_initialized():
        raise TrainerError(
            "this process is in a process group already. Close the other trainer first."
        )
    # The group is this machine's: gloo would else bind whatever the host name resolves to.
    if (loopback := loopback_interface()) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
        backend = "nccl"
    store = dist.FileStore(str(rendezvous), size)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_TIMEOUT)
    return World(rank, size)


def leave(world: World) -> None:
    if world.size > 1 and dist.is_initialized():
        dist.destroy_process_group()
