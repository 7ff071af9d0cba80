"""Opening a version: mapped into memory, and checked there against its manifest.

What an engine serves is what was checked: names, dtypes, shapes and digests are those of the
mapped tensors themselves, not of the file that someone else might read again.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from dora_rl.weights import disk
from dora_rl.weights.adapter import CONFIG_FILE
from dora_rl.weights.errors import WeightsError
from dora_rl.weights.files import MappedFile, map_tensors
from dora_rl.weights.header import encode_head
from dora_rl.weights.manifest import FILE_NAME, Manifest, TensorEntry, read_manifest
from dora_rl.weights.tensors import digests, dtype_name, weights_digest

_AGAIN = "Publish this version again."


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """A version in memory. The tensors keep their files mapped, also after a `delete`."""

    manifest: Manifest
    tensors: dict[str, torch.Tensor]
    digest: str


def open_version(directory: Path) -> LoadedWeights:
    """Map a version's files and check every byte of them; refuses whatever differs.

    The tensors are views of the mapped files: writing to one copies the page, and changes
    neither the file nor what other processes see.
    """
    directory = Path(directory)
    manifest = read_manifest(directory)
    _check_names(directory, manifest)
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(manifest.files):
        mapped = map_tensors(directory / file)
        _check_file(directory / file, mapped, manifest)
        tensors |= mapped.tensors
    sha256 = digests(tensors)
    for name, entry in manifest.tensors.items():
        if sha256[name] != entry.sha256:
            raise WeightsError(
                f"tensor `{name}` in `{directory / entry.file}` was altered: its sha256 is "
                f"`{sha256[name]}`, the manifest has `{entry.sha256}`. {_AGAIN}"
            )
    digest = weights_digest(tensors, sha256, manifest.adapter)
    if digest != manifest.digest:
        raise WeightsError(
            f"the weights in `{directory}` have the digest `{digest}`, the manifest has "
            f"`{manifest.digest}`. {_AGAIN}"
        )
    return LoadedWeights(manifest, tensors, digest)


def _check_names(directory: Path, manifest: Manifest) -> None:
    """Exactly the files of the manifest: a foreign one might be served by mistake."""
    found = set(disk.names(directory)) - {FILE_NAME}
    if manifest.adapter is not None:
        _check_config(directory / CONFIG_FILE, manifest.adapter.config())
        found.remove(CONFIG_FILE)
    if foreign := sorted(found - manifest.files.keys()):
        raise WeightsError(
            f"`{directory / foreign[0]}` is not in the manifest. Remove it: nothing may be "
            "added to a version."
        )
    if missing := sorted(manifest.files.keys() - found):
        raise WeightsError(f"`{directory / missing[0]}` is missing. {_AGAIN}")


def _check_config(path: Path, content: bytes) -> None:
    if disk.read_small(path, len(content) + 1) != content:
        raise WeightsError(f"`{path}` does not say what the manifest does. {_AGAIN}")


def _check_file(path: Path, mapped: MappedFile, manifest: Manifest) -> None:
    """The file holds the tensors of its manifest, and nothing that the digests do not cover."""
    expected = {name for name, entry in manifest.tensors.items() if entry.file == path.name}
    if foreign := sorted(mapped.tensors.keys() - expected):
        raise WeightsError(
            f"tensor `{foreign[0]}` in `{path}` is not listed there by the manifest. {_AGAIN}"
        )
    if missing := sorted(expected - mapped.tensors.keys()):
        raise WeightsError(f"tensor `{missing[0]}` is missing from `{path}`. {_AGAIN}")
    for name, tensor in mapped.tensors.items():
        _check_tensor(name, tensor, manifest.tensors[name], path)
    size = manifest.files[path.name].bytes
    if mapped.num_bytes != size:
        raise WeightsError(
            f"`{path}` has {mapped.num_bytes} bytes, the manifest has {size}. {_AGAIN}"
        )
    # A header has one spelling: what it says besides the tensors cannot differ either.
    rows = ((name, dtype_name(t), tuple(t.shape)) for name, t in mapped.tensors.items())
    if mapped.head != encode_head(rows):
        raise WeightsError(f"the header of `{path}` was altered. {_AGAIN}")


def _check_tensor(name: str, tensor: torch.Tensor, entry: TensorEntry, path: Path) -> None:
    found = (dtype_name(tensor), tuple(tensor.shape))
    if found != (entry.dtype, entry.shape):
        raise WeightsError(
            f"tensor `{name}` in `{path}` is `{found[0]}` of shape `{list(found[1])}`; the "
            f"manifest has `{entry.dtype}` of `{list(entry.shape)}`. {_AGAIN}"
        )
