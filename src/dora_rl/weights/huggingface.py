"""The tensors of a Hugging Face model directory: safetensors only, one file or shards.

Pickles are never opened. Configuration and tokenizer are none of its business.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dora_rl.weights import checks, disk, header
from dora_rl.weights.errors import WeightsError
from dora_rl.weights.header import Stored
from dora_rl.weights.manifest import MAX_BYTES

if TYPE_CHECKING:
    import torch

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
T = TypeVar("T")
_SAVE = "Save the model with `save_pretrained`, which writes safetensors."


def map_model(directory: Path) -> "dict[str, torch.Tensor]":
    """Every tensor of the model, mapped from its file. Links are followed: a hub cache has them."""
    from dora_rl.weights.files import map_tensors

    return _read(directory, lambda path: map_tensors(path, follow_links=True).tensors)


def stored_tensors(directory: Path) -> dict[str, Stored]:
    """Dtype and shape of every tensor of the model, from the headers alone; without torch."""
    return _read(directory, lambda path: header.read(path, follow_links=True)[2])


def _read(directory: Path, read: Callable[[Path], dict[str, T]]) -> dict[str, T]:
    """All tensors of the files of a model, as `read` finds them in one file."""
    names = disk.names(directory)
    if _SINGLE in names and _INDEX in names:
        raise WeightsError(
            f"`{directory}` holds both `{_SINGLE}` and `{_INDEX}`. Remove the one that is stale."
        )
    if _INDEX in names:
        return _read_shards(directory, read)
    if _SINGLE in names:
        return read(directory / _SINGLE)
    pickle = next((name for name in names if name.endswith(_PICKLES)), None)
    if pickle is not None:
        raise WeightsError(
            f"`{directory / pickle}` is a pickle, which can run code when it is read. {_SAVE}"
        )
    raise WeightsError(f"no `{_SINGLE}` and no `{_INDEX}` in `{directory}`. {_SAVE}")


def _read_shards(directory: Path, read: Callable[[Path], dict[str, T]]) -> dict[str, T]:
    path = directory / _INDEX
    shards = _read_index(path)
    tensors: dict[str, T] = {}
    for file, names in sorted(shards.items()):
        mapped = read(directory / file)
        if foreign := sorted(mapped.keys() - names):
            raise WeightsError(
                f"tensor `{foreign[0]}` in `{directory / file}` is not in `{path}`. {_SAVE}"
            )
        if missing := sorted(names - mapped.keys()):
            raise WeightsError(
                f"tensor `{missing[0]}` should be in `{directory / file}`, says `{path}`, and "
                f"is not. {_SAVE}"
            )
        tensors |= mapped
    return tensors


def _read_index(path: Path) -> dict[str, set[str]]:
    """The names of the tensors in each file."""
    index = checks.json_object(disk.read_small(path, MAX_BYTES, follow_links=True), f"`{path}`")
    weight_map: Any = index.get("weight_map")
    shards: dict[str, set[str]] = {}
    for name, file in checks.entries(weight_map, f"weight_map in `{path}`").items():
        checks.tensor_name(name, f"`{path}`")
        if isinstance(file, str) and file.endswith(_PICKLES):
            raise WeightsError(
                f"tensor `{name}` in `{path}` is in the pickle {checks.shown(file)}. {_SAVE}"
            )
        file = checks.file_name(file, f"tensor `{name}` in `{path}`")
        shards.setdefault(file, set()).add(name)
    return shards
