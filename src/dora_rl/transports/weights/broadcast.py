"""One group of torch.distributed for one transfer: rank 0 sends, the others receive.

The groups of a process stay apart: this is never its default one, which training may have. gloo on
the CPU, NCCL on GPUs: what differs is the device of the buffer. A peer that is gone or hangs is a
`RuntimeError` after the timeout at the latest.
"""

import mmap
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from dora_rl.transports.handshake import LOOPBACK, Address, listen
from dora_rl.weights.errors import WeightsError

CHUNK = 1 << 24  # bytes of one broadcast: above it gloo is no faster, and the buffer larger


def open_store(size: int, timeout_s: float) -> tuple[TCPStore, int]:
    """Where the processes of a group find each other, and its port; of this machine alone."""
    listener: socket.socket = listen(LOOPBACK)
    port = listener.getsockname()[1]
    store = TCPStore(
        LOOPBACK.host,
        port,
        size,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, port


def connect_store(port: int, size: int, timeout_s: float) -> TCPStore:
    timeout = timedelta(seconds=timeout_s)
    address = Address(LOOPBACK.host, port)
    return TCPStore(*address, size, is_master=False, timeout=timeout, wait_for_workers=False)


def check_backend(backend: str) -> None:
    """Refuse NCCL where it cannot work."""
    if backend == "nccl" and not (dist.is_nccl_available() and torch.cuda.is_available()):
        raise WeightsError(
            f"runtime.weights.backend needs a GPU that torch can use: `{backend}`. Use gloo."
        )


class Group:
    """A process among `size`, for as long as a transfer takes."""

    def __init__(
        self, store: TCPStore, rank: int, size: int, backend: str, timeout_s: float
    ) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        self._root = dist.BroadcastOptions()
        self._root.rootRank = 0
        self._group: Any  # torch has no types for the groups of a backend
        if backend == "nccl":
            self._device = torch.device("cuda", torch.cuda.current_device())
            nccl: Any = dist.ProcessGroupNCCL
            nccl_options = nccl.Options()
            nccl_options._timeout = self._timeout
            self._group = nccl(store, rank, size, nccl_options)
        else:
            self._device = torch.device("cpu")
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()
            options._devices = [gloo.create_device(hostname=LOOPBACK.host)]
            options._timeout = self._timeout
            self._group = gloo(store, rank, size, options)

    def send(self, data: mmap.mmap | None) -> None:
        """Broadcast a mapped file, from where it is mapped."""
        whole = torch.empty(0) if data is None else torch.frombuffer(data, dtype=torch.uint8)
        for at in range(0, len(whole), CHUNK):
            self._broadcast(whole[at : at + CHUNK].to(self._device))

    def receive(self, num_bytes: int) -> Iterator[memoryview]:
        """So many bytes, as they come; each piece until the next is asked for."""
        for at in range(0, num_bytes, CHUNK):
            size = min(CHUNK, num_bytes - at)
            buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
            self._broadcast(buffer)
            yield buffer.cpu().numpy().data

    def _broadcast(self, tensor: torch.Tensor) -> None:
        self._group.broadcast([tensor], self._root).wait(self._timeout)
        if tensor.is_cuda:  # waiting is for the stream alone
            torch.cuda.synchronize(self._device)
