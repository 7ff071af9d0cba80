"""The directory of versions as files: where one is, whether it is whole, how it goes. No torch.

version-00000007/   manifest.json and safetensors files, never changed
delta-6-7           what changed from version 6 to version 7, for who has 6; goes with 7
.publishing-…       a publication that is under way, or whose process died
.deleted-…          a version that is being deleted
"""

import hashlib
import re
import secrets
from pathlib import Path

from dora_rl.core.protocol.types import Version
from dora_rl.weights import checks, disk
from dora_rl.weights.errors import WeightsError
from dora_rl.weights.manifest import Manifest, directory_name, read_manifest, version_of

PUBLISHING = ".publishing-"
DELETED = ".deleted-"
_DELTA = re.compile(r"delta-(0|[1-9][0-9]{0,18})-(0|[1-9][0-9]{0,18})", re.ASCII)


def path_of(root: Path, version: Version) -> Path:
    """Where a version is, or would be."""
    return root / directory_name(checks.version_number(version))


def published_versions(root: Path) -> list[Version]:
    """The versions that are complete in a store, in order."""
    found = disk.names(root) if disk.exists(root) else []
    return sorted(v for v in map(version_of, found) if v is not None)


def delta_path(root: Path, base: Version, version: Version) -> Path:
    """Where the delta from one version to another is, or would be."""
    return root / f"delta-{base}-{version}"


def deltas(root: Path) -> dict[Version, list[Version]]:
    """The bases of the deltas to each version, the newest first."""
    found: dict[Version, list[Version]] = {}
    for match in map(_DELTA.fullmatch, disk.names(root) if disk.exists(root) else []):
        if match is not None:
            found.setdefault(int(match[2]), []).append(int(match[1]))
    return {version: sorted(bases, reverse=True) for version, bases in found.items()}


def delta_route(root: Path, base: Version, manifest: Manifest) -> list[Path] | None:
    """The deltas that lead from one version to another, in order; None if the whole is better."""
    offered, path, size = deltas(root), [], 0
    at = manifest.version
    while at > base:
        nearer = [v for v in offered.get(at, []) if base <= v < at]
        if not nearer:
            return None
        path.append(delta_path(root, nearer[-1], at))
        size += disk.size(path[-1])
        at = nearer[-1]
    return path[::-1] if at == base and size < manifest.num_bytes else None


def check_files(directory: Path) -> Manifest:
    """Refuse a version one of whose files is not, to the byte, what its manifest says."""
    manifest = read_manifest(directory)
    for name, entry in manifest.files.items():
        found = hashlib.sha256(disk.map_file(directory / name) or b"").hexdigest()
        if found != entry.sha256:
            raise WeightsError(
                f"`{directory / name}` has the sha256 `{found}`, the manifest has "
                f"`{entry.sha256}`: it was cut or altered."
            )
    return manifest


def delete_version(root: Path, version: Version) -> None:
    """Free a version's storage. Unknown: does nothing."""
    target = path_of(root, version)
    if disk.exists(target):
        try:
            disk.rename(target, hidden(root, DELETED))
        except WeightsError:
            if disk.exists(target):
                raise  # else another process was faster
        disk.sync_directory(root)  # before a file goes: half a version is never back
    if disk.exists(root):
        sweep(root, DELETED)
        drop_deltas(root, version)


def drop_deltas(root: Path, version: Version) -> None:
    """Remove the deltas to a version."""
    for base in deltas(root).get(version, []):
        disk.remove_tree(delta_path(root, base, version))


def sweep(root: Path, *prefixes: str) -> None:
    """Remove what is hidden and nobody's; `.publishing-…` is, for the holder of the lock."""
    for name in disk.names(root):
        if name.startswith(prefixes):
            disk.remove_tree(root / name)


def hidden(root: Path, prefix: str) -> Path:
    """A name that no reader looks at."""
    return root / f"{prefix}{secrets.token_hex(8)}"
