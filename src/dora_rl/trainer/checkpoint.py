"""A checkpoint on disk: a Hugging Face model directory, with the trainer's state inside.

    config.json, tokenizer files, …   copied from the model that training started from
    model.safetensors                 the policy as it is published (several files above 5 GB)
    adapter_config.json, adapter_model.safetensors   instead, where the policy is a LoRA adapter
    trainer/state.json                step, settings, the digests of all the rest, a checksum
    trainer/version-…/                optimizer, value head and float32 weights, by the weight store

`model_directory` writes it, whole or not at all. What is read may come from anyone, and is checked
before it is used. It knows files, not what stands in them.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from dora_rl.trainer.errors import CheckpointError
from dora_rl.trainer.model_directory import (
    OF_WHOLE_MODELS,
    copied_files,
    named,
    new_directory,
    reason_of,
    write_bytes,
    write_weights,
)
from dora_rl.trainer.progress import nothing
from dora_rl.transports.weights.shared_directory import MAX_FILE_BYTES, open_version
from dora_rl.weights import checks, disk
from dora_rl.weights.adapter import CONFIG_FILE, TENSORS_FILE, Adapter
from dora_rl.weights.errors import WeightsError
from dora_rl.weights.files import map_tensors
from dora_rl.weights.huggingface import map_model
from dora_rl.weights.version_writer import check_tensors, write_version
from dora_rl.weights.versions import path_of
from dora_rl.weights.versions import sweep as sweep_hidden

FORMAT = 2
_STATE = "state.json"
_TRAINER = "trainer"
_SAVING = ".saving-"
_OWN = frozenset({"format", "files", "state", "checksum"})  # keys of state.json; the rest is facts
_MAX_STATE = 1 << 22  # bytes of state.json: it has a line a setting, a metric and a file
_EARLIER = "Restore an earlier checkpoint."


# Writing


def write(
    directory: Path,
    source: Path,
    weights: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    facts: Mapping[str, Any],
    *,
    adapter: Adapter | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write a checkpoint, whole or not at all; `facts` is plain data with a `step`.

    With `adapter`, the weights are those of a LoRA adapter of the model in `source`.
    """
    directory = Path(directory)
    with named(f"write the checkpoint `{directory}`", "save again"):
        disk.make_root(directory.parent)
        if disk.exists(directory):
            raise CheckpointError(f"`{directory}` exists. Name a new directory for the checkpoint.")
        with new_directory(directory, _SAVING) as partial:
            _write_all(partial, source, weights, state, facts, adapter, max_file_bytes)


def sweep(parent: Path) -> None:
    """Remove what killed processes left unfinished. Only for the one that saves here."""
    if disk.exists(parent):
        sweep_hidden(parent, _SAVING)


def _write_all(
    partial: Path,
    source: Path,
    weights: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    facts: Mapping[str, Any],
    adapter: Adapter | None,
    max_file_bytes: int,
) -> None:
    """All files, each synced, and the directory inside that names some."""
    files = {}
    for name, data in copied_files(Path(source), weights):
        if adapter is None or name not in OF_WHOLE_MODELS:
            files[name] = write_bytes(partial / name, data)
    if adapter is not None:
        config = adapter.config(str(Path(source).absolute()))
        files[CONFIG_FILE] = write_bytes(partial / CONFIG_FILE, config)
    files |= write_weights(partial, weights, max_file_bytes, whole=adapter is not None)
    trainer = partial / _TRAINER
    disk.make_directory(trainer)
    digest = _write_state(trainer, facts["step"], state, max_file_bytes) if state else None
    content = {**facts, "format": FORMAT, "files": files, "state": digest}
    write_bytes(trainer / _STATE, _signed(content))
    disk.sync_directory(trainer)


def _write_state(root: Path, step: int, state: Mapping[str, Tensor], max_file_bytes: int) -> str:
    """The trainer's tensors as the one version of a weight store; its digest."""
    check_tensors(state)
    directory = path_of(root, step)
    disk.make_directory(directory)
    manifest = write_version(directory, step, state, max_file_bytes)
    disk.sync_directory(directory)
    return manifest.digest


def _signed(content: Mapping[str, Any]) -> bytes:
    """state.json in its one spelling, with the checksum of all its other keys."""
    try:
        checksum = hashlib.sha256(_spelled(content)).hexdigest()
        return _spelled({**content, "checksum": checksum})
    except ValueError as error:
        raise WeightsError(f"what the last step reported cannot be saved: {error}.") from error


def _spelled(content: Mapping[str, Any]) -> bytes:
    text = json.dumps(content, indent=2, sort_keys=True, allow_nan=False) + "\n"
    return text.encode("ascii")


# Reading


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose state.json was checked, and every file that it names."""

    directory: Path
    facts: dict[str, Any]  # what `write` was given
    state: str | None  # the digest of the trainer's tensors, where there are any
    files: dict[str, str]  # the digests of the policy's files, by name

    @property
    def is_adapter(self) -> bool:
        """Whether the policy is a LoRA adapter of another model."""
        return TENSORS_FILE in self.files

    def state_tensors(self) -> dict[str, Tensor]:
        """The trainer's tensors, mapped and checked."""
        if self.state is None:
            return {}
        directory = path_of(self.directory / _TRAINER, self.facts["step"])
        with _refused(self.directory):
            loaded = open_version(directory)
        if loaded.digest != self.state:
            raise CheckpointError(
                f"`{directory}` is of another checkpoint: it has the digest `{loaded.digest}`, "
                f"state.json has `{self.state}`. {_EARLIER}"
            )
        return loaded.tensors

    def weights(self) -> dict[str, Tensor]:
        """The policy, or its adapter, mapped."""
        with _refused(self.directory):
            if self.is_adapter:
                return map_tensors(self.directory / TENSORS_FILE).tensors
            return map_model(self.directory)


def read(directory: Path, progress: Callable[[], None] = nothing) -> Checkpoint:
    """A checkpoint, after a check of every file that its state.json names."""
    directory = Path(directory)
    path = directory / _TRAINER / _STATE
    try:
        raw = disk.read_small(path, _MAX_STATE)
        content = checks.json_object(raw, "it")
    except WeightsError as error:
        raise CheckpointError(
            f"`{path}` is missing or damaged: {reason_of(error)}. "
            "Give a directory that a run saved under checkpoints/."
        ) from error
    if content.get("format") != FORMAT:
        raise CheckpointError(
            f"`{path}` has the format {checks.shown(content.get('format'))}: this trainer reads "
            f"{FORMAT}. Restore it with the dora-rl that wrote it."
        )
    _check_signature(path, raw, content)
    with _refused(directory):
        where = f"in `{path}`"
        if missing := sorted((_OWN | {"step"}) - content.keys()):
            raise WeightsError(f"the key `{missing[0]}` is missing {where}.")
        checks.number(content["step"], f"step {where}")
        if content["state"] is not None:
            checks.sha256(content["state"], f"state {where}")
        files = checks.entries(content["files"], f"files {where}")
        for name, digest in files.items():
            _check_name(name, where)
            checks.sha256(digest, f"the sha256 of {checks.shown(name)} {where}")
        for name, digest in files.items():
            _check_file(directory / name, digest)
            progress()
    facts = {key: value for key, value in content.items() if key not in _OWN}
    return Checkpoint(directory, facts, content["state"], files)


def _check_signature(path: Path, raw: bytes, content: Mapping[str, Any]) -> None:
    rest = {key: value for key, value in content.items() if key != "checksum"}
    try:
        sound = _signed(rest) == raw
    except (ValueError, RecursionError):  # an infinite number; nested deeper than ours ever is
        sound = False
    if not sound:
        raise CheckpointError(f"`{path}` was altered: its checksum does not match. {_EARLIER}")


def _check_name(name: str, where: str) -> None:
    """A file beside the others: no name from state.json ever leads out of the directory."""
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise WeightsError(f"files {where} must be plain names: {checks.shown(name)}.")


def _check_file(path: Path, sha256: str) -> None:
    if not disk.exists(path):
        raise CheckpointError(f"`{path}` is missing. {_EARLIER}")
    data = disk.map_file(path, follow_links=True)
    if hashlib.sha256(data or b"").hexdigest() != sha256:
        raise CheckpointError(f"`{path}` was altered. {_EARLIER}")


@contextmanager
def _refused(directory: Path) -> Iterator[None]:
    """The weight store's words, and what to do about a checkpoint."""
    try:
        yield
    except WeightsError as error:
        raise CheckpointError(
            f"the checkpoint `{directory}` is damaged: {str(error).removesuffix('.')}. {_EARLIER}"
        ) from error
