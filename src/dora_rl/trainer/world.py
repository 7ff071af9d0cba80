"""The processes that train together: sums over them, and the sharding of a policy (FSDP2).

A world of one needs no process group and adds nothing to any call.
"""

import os
import socket
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

from dora_rl.trainer.errors import TrainerError
from dora_rl.trainer.model import Policy
from dora_rl.trainer.rendezvous import Address, listen

_LOOPBACK_ONLY = {"GLOO_SOCKET_IFNAME": "{}", "NCCL_SOCKET_IFNAME": "={}"}  # `=`: no mere prefix
_interfaces_set: set[str] = set()  # by `join`, until `leave`; global, as the process group is

# Within a step processes wait for each other's slowest micro-batch; between steps they do not.
_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class World:
    """This process among `size`, of which 0 leads; all of them compute on one kind of device."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def total(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def largest(self, tensor: Tensor) -> Tensor:
        if self.size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor

    def agree(self, value: int) -> bool:
        """Whether all processes give the same."""
        highest, lowest = self.largest(torch.tensor([value, -value])).tolist()
        return bool(highest == -lowest)

    def gather(self, part_KT: Tensor, width: int) -> list[Tensor] | None:
        """Every process's part, `width` wide where it was narrower: the leader's, else None."""
        sent = _widened(part_KT, width)
        if self.rank:
            dist.gather(sent, None, dst=0)
            return None
        parts = [torch.empty_like(sent) for _ in range(self.size)]
        dist.gather(sent, parts, dst=0)
        return parts

    def scatter(self, parts: list[Tensor] | None, width: int) -> Tensor:
        """This process's of the `parts` that the leader has, `width` wide; the others give None."""
        lines = torch.tensor([0 if parts is None else len(parts[0])])
        dist.broadcast(lines, src=0)
        mine = torch.empty(int(lines), width)
        sent = None if parts is None else [_widened(part, width) for part in parts]
        dist.scatter(mine, sent, src=0)
        return mine

    def leader_says(self, yes: bool = False) -> bool:
        """What the leader gives; whatever the others do."""
        said = torch.tensor([int(yes)])
        if self.size > 1:
            dist.broadcast(said, src=0)
        return bool(said)

    def shard(self, policy: Policy) -> None:
        """Give each process its part of the weights, which may have no memory yet.

        Passes gather one layer at a time; what is in no layer (embeddings, head) at once.
        """
        if self.size == 1:
            return
        mesh = init_device_mesh(self.device.type, (self.size,))
        kinds = policy.model._no_split_modules or ()
        layers = [m for m in policy.modules() if type(m).__name__ in kinds]
        for module in (*layers, policy):
            # The root too: weights change between two passes, and it must not keep old ones.
            fully_shard(module, mesh=mesh, reshard_after_forward=True)
            assert isinstance(module, FSDPModule)
            # The loss is a sum whose weights are those of the whole mini-batch.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        register_fsdp_forward_method(policy, "both_logits")

    def sync_gradients(self, policy: Policy, last: bool) -> None:
        """Reduce gradients with the last micro-batch alone."""
        if self.size > 1:
            assert isinstance(policy, FSDPModule)
            policy.set_requires_gradient_sync(last)


def _widened(part_KT: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(part_KT, (0, width - part_KT.shape[1])).contiguous()


def loopback_interface() -> str | None:
    """Its name: `lo` on Linux, `lo0` on macOS and BSD."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), None)


def open_store(address: Address, size: int) -> TCPStore:
    """The leader's store, at a free port of this address and of no other."""
    listener = listen(Address(address.host, 0))
    port = listener.getsockname()[1]
    return TCPStore(
        address.host,
        port,
        size,
        is_master=True,
        timeout=_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def connect_store(address: Address, size: int) -> TCPStore:
    """A follower's view of it."""
    return TCPStore(
        address.host, address.port, size, is_master=False, timeout=_TIMEOUT, wait_for_workers=False
    )


def join(
    store: Store, rank: int, size: int, device: torch.device, *, loopback: bool = True
) -> World:
    """Become one of `size` processes that know each other by a store.

    Each computes on a `device` of its own. Sums of tensors on the CPU go by gloo in any case; on
    `loopback` gloo and NCCL use this machine's, else the interfaces that they choose, or that
    GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name. `leave` undoes it, not earlier: FSDP and NCCL
    form groups of their own later.
    """
    if dist.is_initialized():
        raise TrainerError(
            "this process is in a process group already. Close the other trainer first."
        )
    if loopback and (interface := loopback_interface()) is not None:
        _use_interface(interface)
    backend = "gloo"
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
            backend = "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_TIMEOUT)
    except BaseException:
        _forget_interface()
        raise
    return World(rank, size, device)


def leave(world: World) -> None:
    """The opposite of `join`: this process is in no group, its environment as before."""
    try:
        if world.size > 1 and dist.is_initialized():
            dist.destroy_process_group()
    finally:
        _forget_interface()


def _use_interface(interface: str) -> None:
    """This one alone, unless the user has named another."""
    for name, form in _LOOPBACK_ONLY.items():
        if name not in os.environ:
            os.environ[name] = form.format(interface)
            _interfaces_set.add(name)


def _forget_interface() -> None:
    while _interfaces_set:
        os.environ.pop(_interfaces_set.pop(), None)
