"""The two ends of the transport that a configuration names."""

from pathlib import Path

from dora_rl.transports.weights import WeightPublisher, WeightReceiver
from dora_rl.transports.weights.delta_directory import DeltaPublisher, DeltaReceiver
from dora_rl.transports.weights.process_group import GroupPublisher, GroupReceiver
from dora_rl.transports.weights.settings import WeightTransportSettings
from dora_rl.transports.weights.shared_directory import DirectoryReceiver, WeightStore


def make_publisher(settings: WeightTransportSettings, root: Path) -> WeightPublisher:
    """The trainer's end; `root` is the store of whole versions."""
    store = WeightStore(root)
    publisher = DeltaPublisher(store) if settings.deltas else store
    if settings.transport == "process_group":
        return GroupPublisher(publisher, backend=settings.backend, timeout_s=settings.timeout_s)
    return publisher


def make_receiver(settings: WeightTransportSettings, root: Path, cache: Path) -> WeightReceiver:
    """An instance's end; `cache` is a directory for its copies, on its machine."""
    if settings.transport == "process_group":
        backend, timeout_s = settings.backend, settings.timeout_s
        return GroupReceiver(root, cache, backend=backend, timeout_s=timeout_s)
    return DeltaReceiver(root, cache) if settings.deltas else DirectoryReceiver(root)
