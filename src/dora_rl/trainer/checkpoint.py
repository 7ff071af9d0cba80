"""A checkpoint on disk: a Hugging Face model directory, with the trainer's state inside.

    config.json, tokenizer files, …   copied from the model that training started from
    model.safetensors                 the policy as it is published (several files above 5 GB)
    trainer/state.json                step, settings, and the sha256 of every other file
    trainer/version-…/                optimizer, value head and float32 weights, by the weight store

All is written to a hidden sibling, synced, and appears by one rename. It knows files, not what
stands in them.
"""

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from dora_rl.trainer.errors import CheckpointError
from dora_rl.weights.store import MAX_FILE_BYTES, WeightStore
from dora_rl.weights.writing import split

FORMAT = 1
_STATE = "state.json"
_TRAINER = "trainer"
_COPIED = (".json", ".txt", ".model", ".jinja")  # configuration and tokenizer, never weights
_INDEX = "model.safetensors.index.json"


def write(
    directory: Path,
    source: Path,
    weights: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    facts: Mapping[str, Any],
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write a checkpoint, whole or not at all; `facts` is plain data with a `step`."""
    directory = Path(directory)
    if directory.exists() or directory.is_symlink():
        raise CheckpointError(f"`{directory}` exists. Name a new directory for the checkpoint.")
    hidden = directory.parent / f".{directory.name}-{secrets.token_hex(8)}"
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        hidden.mkdir()
        _copy_rest(source, hidden)
        _set_dtype(hidden / "config.json", weights)
        _write_weights(hidden, weights, max_file_bytes)
        # The weight store checks what it writes, syncs it, and refuses it if it is damaged later.
        (hidden / _TRAINER).mkdir()
        if state:
            WeightStore(hidden / _TRAINER).publish(facts["step"], state)
        content = {"format": FORMAT, "files": _digests(hidden), **facts}
        text = json.dumps(content, indent=2, sort_keys=True, allow_nan=False) + "\n"
        (hidden / _TRAINER / _STATE).write_text(text, encoding="utf-8")
        _sync(hidden)
        os.rename(hidden, directory)
        _sync_one(directory.parent)
    except OSError as error:
        raise CheckpointError(
            f"cannot write the checkpoint `{directory}`: {error.strerror or error}. "
            "Check the disk and the permissions."
        ) from error
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def read(directory: Path) -> dict[str, Any]:
    """The facts of a checkpoint, after a check of every file that they name."""
    directory = Path(directory)
    path = directory / _TRAINER / _STATE
    try:
        facts: Any = json.loads(path.read_text(encoding="utf-8"))
        files = facts["files"]
        found = _digests(directory)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"`{path}` is missing or damaged: {type(error).__name__}. "
            "Give a directory that a run saved under checkpoints/."
        ) from error
    if facts.get("format") != FORMAT:
        raise CheckpointError(
            f"`{path}` has the format `{facts.get('format')}`: this trainer reads {FORMAT}. "
            "Restore it with the dora-rl that wrote it."
        )
    for name, sha256 in files.items():
        if found.get(name) != sha256:
            state = "was altered" if name in found else "is missing"
            raise CheckpointError(f"`{directory / name}` {state}. Restore an earlier checkpoint.")
    return dict(facts)


def state_tensors(directory: Path, step: int) -> dict[str, Tensor]:
    """The trainer's tensors, mapped and checked."""
    store = WeightStore(Path(directory) / _TRAINER)
    return store.load(step).tensors if step in store.versions() else {}


def _copy_rest(source: Path, target: Path) -> None:
    """Configuration and tokenizer."""
    for path in sorted(source.iterdir()):
        if path.is_file() and path.name.endswith(_COPIED) and path.name != _INDEX:
            shutil.copyfile(path, target / path.name)


def _set_dtype(path: Path, weights: Mapping[str, Tensor]) -> None:
    """transformers loads in the dtype that the configuration names: that of the weights."""
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()}
    config = json.loads(path.read_text(encoding="utf-8"))
    if len(dtypes) == 1 and (dtype := dtypes.pop()) != config.get("dtype"):
        config.pop("torch_dtype", None)
        text = json.dumps({**config, "dtype": dtype}, indent=2) + "\n"
        path.write_text(text, encoding="utf-8")


def _write_weights(directory: Path, weights: Mapping[str, Tensor], max_file_bytes: int) -> None:
    shards = split(weights, max_file_bytes)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = "model.safetensors"
        if len(shards) > 1:
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weight_map |= dict.fromkeys(names, file)
        part = {name: weights[name].cpu().contiguous() for name in names}
        save_file(part, directory / file, metadata={"format": "pt"})
    if len(shards) > 1:
        size = sum(tensor.nbytes for tensor in weights.values())
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (directory / _INDEX).write_text(text, encoding="utf-8")


def _digests(directory: Path) -> dict[str, str]:
    """The sha256 of each file at the top; the weight store answers for those below."""
    found = {}
    for path in sorted(directory.iterdir()):
        if path.is_file():
            with open(path, "rb") as file:
                found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def _sync(directory: Path) -> None:
    for path in sorted(directory.iterdir()):
        if path.is_dir():
            _sync(path)
        else:
            _sync_one(path)
    _sync_one(directory)


def _sync_one(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
