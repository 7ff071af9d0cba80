"""The two ends of the transport that a configuration names."""

from pathlib import Path

from dora_rl.transports.objects.link import ObjectLink
from dora_rl.transports.weights import WeightPublisher, WeightReceiver
from dora_rl.transports.weights.delta_directory import DeltaPublisher, DeltaReceiver
from dora_rl.transports.weights.object_store import LAYER_GROUP_BYTES, ObjectReceiver
from dora_rl.transports.weights.process_group import GroupPublisher, GroupReceiver
from dora_rl.transports.weights.settings import WeightTransportSettings
from dora_rl.transports.weights.shared_directory import (
    MAX_FILE_BYTES,
    DirectoryReceiver,
    WeightStore,
)


def make_publisher(settings: WeightTransportSettings, root: Path) -> WeightPublisher:
    """The trainer's end; `root` is the store of whole versions."""
    by_objects = settings.transport == "object_store"
    store = WeightStore(root, max_file_bytes=LAYER_GROUP_BYTES if by_objects else MAX_FILE_BYTES)
    publisher = DeltaPublisher(store) if settings.deltas else store
    if settings.transport == "process_group":
        return GroupPublisher(publisher, backend=settings.backend, timeout_s=settings.timeout_s)
    return publisher


def make_receiver(
    settings: WeightTransportSettings, root: Path, cache: Path, objects: ObjectLink | None = None
) -> WeightReceiver:
    """An instance's end; `cache` is a directory for its copies, on its machine.

    `objects` is its way to the object store, where the launcher has one.
    """
    timeout_s = settings.timeout_s
    if settings.transport == "object_store":
        assert objects is not None, "a configuration names it for a launcher that has one"
        return ObjectReceiver(objects, root, cache, timeout_s=timeout_s)
    if settings.transport == "process_group":
        return GroupReceiver(root, cache, backend=settings.backend, timeout_s=timeout_s)
    return DeltaReceiver(root, cache) if settings.deltas else DirectoryReceiver(root)
