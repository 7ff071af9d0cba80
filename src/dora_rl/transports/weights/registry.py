"""The two ends of the transport that a configuration names."""

from pathlib import Path

from dora_rl.transports.weights import WeightPublisher, WeightReceiver
from dora_rl.transports.weights.delta_directory import DeltaPublisher, DeltaReceiver
from dora_rl.transports.weights.settings import WeightTransportSettings
from dora_rl.transports.weights.shared_directory import DirectoryReceiver, WeightStore


def make_publisher(settings: WeightTransportSettings, root: Path) -> WeightPublisher:
    """The trainer's end; `root` is the store of whole versions."""
    store = WeightStore(root)
    return DeltaPublisher(store) if settings.delta else store


def make_receiver(settings: WeightTransportSettings, root: Path, cache: Path) -> WeightReceiver:
    """An instance's end; `cache` is a directory for its copies, on its machine."""
    return DeltaReceiver(root, cache) if settings.delta else DirectoryReceiver(root)
