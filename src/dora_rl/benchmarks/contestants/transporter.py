"""One end of a transport of weights, in a process of its own; loaded by `serving.py`."""

import socket
import time
from pathlib import Path
from typing import Any

import torch

from dora_rl.transports.objects.link import ObjectLink
from dora_rl.transports.weights.registry import make_publisher, make_receiver
from dora_rl.transports.weights.settings import WeightTransportSettings
from dora_rl.weights.loading import open_version
from dora_rl.weights.versions import delete_version

_TENSOR = 1 << 22  # elements of a tensor, as a large model's


class Sender:
    """The trainer's end, with weights in bfloat16 that change a little with every version."""

    def __init__(self, weights: str, settings: dict[str, Any], parameters: int, changed: float):
        self._publisher = make_publisher(WeightTransportSettings(**settings), Path(weights))
        self._noise = torch.Generator().manual_seed(0)
        self._changed = changed
        self._tensors = {
            f"layers.{at}.weight": self._normal(min(_TENSOR, parameters - at))
            for at in range(0, parameters, _TENSOR)
        }

    def _normal(self, size: int) -> torch.Tensor:
        return (torch.randn(size, generator=self._noise) * 0.02).bfloat16()

    def change(self) -> None:
        """Move so many of the elements to the next number of bfloat16, as a small step does."""
        for tensor in self._tensors.values():
            count = max(1, round(self._changed * len(tensor)))
            places = torch.randint(len(tensor), (count,), generator=self._noise)
            bits = tensor.view(torch.int16)
            bits[places] = bits[places] ^ 1

    def publish(self, version: int) -> float:
        """Seconds that it took."""
        began = time.perf_counter()
        self._publisher.publish(version, self._tensors)
        seconds = time.perf_counter() - began
        if version >= 2:
            delete_version(self._publisher.root, version - 2)
        return seconds

    def close(self) -> None:
        self._publisher.close()


class Receiver:
    """An instance's end."""

    def __init__(
        self, weights: str, settings: dict[str, Any], cache: str, objects: str | None = None
    ) -> None:
        """`objects` is a path where whoever puts and gets objects for this process will connect."""
        self._ends = WeightTransportSettings(**settings), Path(weights), Path(cache)
        self._listener: socket.socket | None = None
        if objects is None:
            self._receiver = make_receiver(*self._ends)
        else:
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(objects)
            self._listener.listen()

    def accept(self) -> None:
        """Who was to connect has."""
        assert self._listener is not None
        with self._listener:
            link, _ = self._listener.accept()
        self._receiver = make_receiver(*self._ends, ObjectLink(link))

    def receive(self, version: int) -> dict[str, float]:
        """Until an engine would have it: mapped, and compared with its digests."""
        traffic = self._receiver.traffic
        before = traffic.sent_bytes, traffic.whole_bytes
        began = time.perf_counter()
        open_version(self._receiver.receive(version))
        seconds = time.perf_counter() - began
        self._receiver.release(version)
        if traffic.fallbacks:
            raise RuntimeError("a version did not come by the transport that is measured")
        return {
            "seconds": seconds,
            "sent_bytes": traffic.sent_bytes - before[0],
            "whole_bytes": traffic.whole_bytes - before[1],
        }

    def close(self) -> None:
        self._receiver.close()


def load(**settings: Any) -> Sender | Receiver | None:
    """Nothing at first: what it is to be comes with each case."""
    if not settings:
        return None
    return Receiver(**settings) if "cache" in settings else Sender(**settings)
