"""The instances' end of the transport of KV that a configuration names."""

from pathlib import Path

from dora_rl.transports.kv import KvTransport
from dora_rl.transports.kv.object_store import KvObjects
from dora_rl.transports.kv.settings import KvTransportSettings
from dora_rl.transports.kv.shared_directory import KvDirectory
from dora_rl.transports.objects.link import ObjectLink


def make_kv(
    settings: KvTransportSettings, exchange: Path, objects: ObjectLink | None, scratch: str | None
) -> KvTransport:
    """`exchange` is a directory that all instances see; the others are as a launcher has them."""
    if settings.transport != "object_store":
        return KvDirectory(exchange)
    assert objects is not None and scratch is not None, "named for a launcher that has them"
    return KvObjects(objects, Path(scratch), timeout_s=settings.timeout_s)
