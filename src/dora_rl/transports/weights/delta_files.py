"""Deltas beside the versions of a store: written by the publisher, found by whoever needs them.

A delta is an offer. It may be missing, or go at any time with its version: then the whole is used.
"""

import logging
from pathlib import Path

from dora_rl.transports.weights.version_cache import map_copy
from dora_rl.weights import delta, disk
from dora_rl.weights.errors import WeightsError
from dora_rl.weights.manifest import Manifest, read_manifest
from dora_rl.weights.versions import (
    PUBLISHING,
    delta_path,
    deltas,
    drop_deltas,
    hidden,
    path_of,
    published_versions,
)

_log = logging.getLogger(__name__)


def offer(root: Path, manifest: Manifest) -> None:
    """Write the delta to a published version from the one before it, if there is one and it pays.

    What goes wrong costs bytes and nothing else: the whole is there.
    """
    try:
        _sweep(root)
        before = [v for v in published_versions(root) if v < manifest.version]
        if before and before[-1] not in deltas(root).get(manifest.version, []):
            _write(root, read_manifest(path_of(root, before[-1])), manifest)
    except WeightsError as error:
        _log.warning("no delta to version %d: %s", manifest.version, error)


def read(path: Path, manifest: Manifest) -> bytes:
    """A delta that a route named; one that is as large as the whole is not read."""
    return disk.read_small(path, manifest.num_bytes)


def _write(root: Path, base: Manifest, manifest: Manifest) -> None:
    link = delta.Link(base.version, base.digest, manifest.version, manifest.digest)
    old, new = (map_copy(path_of(root, m.version), m) for m in (base, manifest))
    data = delta.encode(link, old, new)
    if data is None:
        return
    partial = hidden(root, PUBLISHING)
    with disk.new_file(partial, durable=False) as write:
        write(data)
    disk.rename(partial, delta_path(root, base.version, manifest.version))


def _sweep(root: Path) -> None:
    """Of a version that is gone: its deleter died before it came to them."""
    published = published_versions(root)
    for version in deltas(root):
        if version not in published:
            drop_deltas(root, version)
