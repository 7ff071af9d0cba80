"""A checkpoint on disk: a Hugging Face model directory, with the trainer's state inside.

    config.json, tokenizer files, …   copied from the model that training started from
    model.safetensors                 the policy as it is published (several files above 5 GB)
    adapter_config.json, adapter_model.safetensors   instead, where the policy is a LoRA adapter
    trainer/state.json                step, settings, the digests of all the rest, a checksum
    trainer/version-…/                optimizer, value head and float32 weights, by the weight store

All is written to a hidden sibling, synced, and appears by one rename; what writes and syncs is
`weights.disk` alone. What is read may come from anyone, and is checked before it is used. It
knows files, not what stands in them.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from dora_rl.trainer.errors import CheckpointError
from dora_rl.trainer.progress import nothing
from dora_rl.transports.weights.shared_directory import MAX_FILE_BYTES, open_version
from dora_rl.weights import checks, disk
from dora_rl.weights.adapter import CONFIG_FILE, TENSORS_FILE, Adapter
from dora_rl.weights.errors import WeightsError
from dora_rl.weights.files import map_tensors
from dora_rl.weights.header import encode_head
from dora_rl.weights.huggingface import map_model
from dora_rl.weights.tensors import bytes_of, dtype_name, ready
from dora_rl.weights.version_writer import check_tensors, shards, write_version
from dora_rl.weights.versions import hidden, path_of
from dora_rl.weights.versions import sweep as sweep_hidden

FORMAT = 2
_STATE = "state.json"
_TRAINER = "trainer"
_CONFIG = "config.json"
_SAVING = ".saving-"
_COPIED = (".json", ".txt", ".model", ".jinja")  # configuration and tokenizer, never weights
_INDEX = "model.safetensors.index.json"
_OWN = frozenset({"format", "files", "state", "checksum"})  # keys of state.json; the rest is facts
# What transformers would take an adapter's directory for the whole model by.
_OF_WHOLE_MODELS = frozenset({_CONFIG, "generation_config.json"})
_MAX_COPIED = 1 << 30  # bytes of one copied file; tokenizers have a few dozen MB
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
    with _named(directory):
        disk.make_root(directory.parent)
        if disk.exists(directory):
            raise CheckpointError(f"`{directory}` exists. Name a new directory for the checkpoint.")
        partial = hidden(directory.parent, _SAVING)
        try:
            _write_all(partial, source, weights, state, facts, adapter, max_file_bytes)
            _show(partial, directory)
        except BaseException:
            with suppress(WeightsError):  # what cannot be removed now stays hidden
                disk.remove_tree(partial)
            raise


def sweep(parent: Path) -> None:
    """Remove what killed processes left unfinished. Only for the one that saves here."""
    if disk.exists(parent):
        sweep_hidden(parent, _SAVING)


def _show(partial: Path, directory: Path) -> None:
    try:
        disk.rename(partial, directory)
        disk.sync_directory(directory.parent)
    except BaseException:
        # Not known to be on the disk: it is taken back, and may be written again.
        with suppress(WeightsError):
            if not disk.exists(partial):
                disk.rename(directory, partial)
        raise


def _write_all(
    partial: Path,
    source: Path,
    weights: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    facts: Mapping[str, Any],
    adapter: Adapter | None,
    max_file_bytes: int,
) -> None:
    """All files, each synced, and the directories that name them."""
    disk.make_directory(partial)
    files = {}
    for name, data in _copied_files(Path(source), weights):
        if adapter is None or name not in _OF_WHOLE_MODELS:
            files[name] = _write_bytes(partial / name, data)
    if adapter is not None:
        config = adapter.config(str(Path(source).absolute()))
        files[CONFIG_FILE] = _write_bytes(partial / CONFIG_FILE, config)
    files |= _write_weights(partial, weights, max_file_bytes, whole=adapter is not None)
    trainer = partial / _TRAINER
    disk.make_directory(trainer)
    digest = _write_state(trainer, facts["step"], state, max_file_bytes) if state else None
    content = {**facts, "format": FORMAT, "files": files, "state": digest}
    _write_bytes(trainer / _STATE, _signed(content))
    disk.sync_directory(trainer)
    disk.sync_directory(partial)


def _copied_files(source: Path, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, bytes]]:
    """Configuration and tokenizer, by name, with their content."""
    with _copying(source):
        names = disk.names(source)
    for name in names:
        path = source / name
        if not name.endswith(_COPIED) or name == _INDEX or not path.is_file():
            continue
        with _copying(path):
            data = disk.read_small(path, _MAX_COPIED, follow_links=True)
            if name == _CONFIG:
                data = _with_dtype(data, weights)
        yield name, data


@contextmanager
def _copying(path: Path) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise WeightsError(
            f"cannot copy `{path}`: {_reason(error)}. Put it back as it was, then save again."
        ) from error


def _with_dtype(config: bytes, weights: Mapping[str, Tensor]) -> bytes:
    """transformers loads in the dtype that the configuration names: that of the weights."""
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()}
    content = json.loads(config)
    if len(dtypes) != 1 or (dtype := dtypes.pop()) == content.get("dtype"):
        return config
    content.pop("torch_dtype", None)
    return (json.dumps({**content, "dtype": dtype}, indent=2) + "\n").encode()


def _write_weights(
    directory: Path, weights: Mapping[str, Tensor], max_file_bytes: int, *, whole: bool
) -> dict[str, str]:
    """The policy in as many files as it needs; their digests."""
    check_tensors(weights)
    files: dict[str, str] = {}
    weight_map: dict[str, str] = {}
    for file, shard in shards(weights, max_file_bytes, whole=whole).items():
        weight_map |= dict.fromkeys(shard, file)
        files[file] = _write_tensors(directory / file, shard)
    if len(files) > 1:
        size = sum(tensor.nbytes for tensor in weights.values())
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        files[_INDEX] = _write_bytes(directory / _INDEX, text.encode())
    return files


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    head = encode_head((name, dtype_name(t), tuple(t.shape)) for name, t in tensors.items())
    sha256 = hashlib.sha256(head)
    with disk.new_file(path) as append:
        append(head)
        for name, tensor in tensors.items():
            data = bytes_of(ready(name, tensor))
            append(data)
            sha256.update(data)
    return sha256.hexdigest()


def _write_bytes(path: Path, data: bytes) -> str:
    with disk.new_file(path) as append:
        append(data)
    return hashlib.sha256(data).hexdigest()


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


@contextmanager
def _named(directory: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, WeightsError) as error:
        reason = f"cannot write the checkpoint `{directory}`: {_reason(error)}."
        if _by_the_system(error) is not None:
            reason += " Check the disk and the permissions, then save again."
        raise CheckpointError(reason) from error


def _reason(error: Exception) -> str:
    """What went wrong, without the weight store's advice, which is about publishing."""
    cause = _by_the_system(error)
    return str(error).removesuffix(".") if cause is None else cause.strerror or str(cause)


def _by_the_system(error: Exception) -> OSError | None:
    cause = error.__cause__ if isinstance(error, WeightsError) else error
    return cause if isinstance(cause, OSError) else None


# Reading


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose state.json was checked, and every file that it names."""

    directory: Path
    facts: dict[str, Any]  # what `write` was given
    state: str | None  # the digest of the trainer's tensors, where there are any

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
        adapter = self.directory / TENSORS_FILE
        with _refused(self.directory):
            if disk.exists(adapter):
                return map_tensors(adapter).tensors
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
            f"`{path}` is missing or damaged: {_reason(error)}. "
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
    return Checkpoint(directory, facts, content["state"])


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
