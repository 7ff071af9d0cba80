"""Writing a model directory of Hugging Face, or of a PEFT adapter: whole or not at all.

All is written to a hidden sibling, synced, and appears by one rename; what writes and syncs is
`weights.disk` alone. It knows files, not what stands in them. Checkpoints and exports use it.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from torch import Tensor

from dora_rl.trainer.errors import CheckpointError
from dora_rl.weights import disk
from dora_rl.weights.adapter import CONFIG_FILE
from dora_rl.weights.errors import WeightsError
from dora_rl.weights.header import encode_head
from dora_rl.weights.tensors import bytes_of, dtype_name, ready
from dora_rl.weights.version_writer import check_tensors, shards
from dora_rl.weights.versions import hidden

# What transformers would take an adapter's directory for the whole model by.
OF_WHOLE_MODELS = frozenset({"config.json", "generation_config.json"})
_CONFIG = "config.json"
_INDEX = "model.safetensors.index.json"
# What is written anew, or would say that whole weights are an adapter.
_NEVER_COPIED = frozenset({_INDEX, CONFIG_FILE})
_COPIED = (".json", ".txt", ".model", ".jinja")  # configuration and tokenizer, never weights
_MAX_COPIED = 1 << 30  # bytes of one copied file; tokenizers have a few dozen MB


@contextmanager
def new_directory(directory: Path, prefix: str) -> Iterator[Path]:
    """A hidden directory to fill, which has the name `directory` on leaving.

    After an error it is gone. `directory` may be there if it is empty.
    """
    partial = hidden(directory.parent, prefix)
    try:
        disk.make_directory(partial)
        yield partial
        disk.sync_directory(partial)
        _show(partial, directory)
    except BaseException:
        with suppress(WeightsError):  # what cannot be removed now stays hidden
            disk.remove_tree(partial)
        raise


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


def copied_files(source: Path, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, bytes]]:
    """Configuration and tokenizer of a model, by name, with their content.

    The configuration names the dtype of `weights`.
    """
    with _copying(source):
        names = disk.names(source)
    for name in names:
        path = source / name
        if not name.endswith(_COPIED) or name in _NEVER_COPIED or not path.is_file():
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
            f"cannot copy `{path}`: {reason_of(error)}. Put it back as it was, then try again."
        ) from error


def _with_dtype(config: bytes, weights: Mapping[str, Tensor]) -> bytes:
    """transformers loads in the dtype that the configuration names: that of the weights."""
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()}
    content = json.loads(config)
    if len(dtypes) != 1 or (dtype := dtypes.pop()) == content.get("dtype"):
        return config
    content.pop("torch_dtype", None)
    return (json.dumps({**content, "dtype": dtype}, indent=2) + "\n").encode()


def write_weights(
    directory: Path,
    weights: Mapping[str, Tensor],
    max_file_bytes: int,
    *,
    whole: bool = False,
    prepare: Callable[[str, Tensor], Tensor] = ready,
) -> dict[str, str]:
    """The policy in as many files as it needs, an adapter in one, `whole`; their digests.

    What `prepare` gives for a tensor, of the same dtype and shape, is written in its place, and
    lives no longer than that.
    """
    check_tensors(weights)
    files: dict[str, str] = {}
    weight_map: dict[str, str] = {}
    for file, shard in shards(weights, max_file_bytes, whole=whole).items():
        weight_map |= dict.fromkeys(shard, file)
        files[file] = _write_tensors(directory / file, shard, prepare)
    if len(files) > 1:
        size = sum(tensor.nbytes for tensor in weights.values())
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        files[_INDEX] = write_bytes(directory / _INDEX, text.encode())
    return files


def _write_tensors(
    path: Path, tensors: Mapping[str, Tensor], prepare: Callable[[str, Tensor], Tensor]
) -> str:
    head = encode_head((name, dtype_name(t), tuple(t.shape)) for name, t in tensors.items())
    sha256 = hashlib.sha256(head)
    with disk.new_file(path) as append:
        append(head)
        for name, tensor in tensors.items():
            data = bytes_of(prepare(name, tensor))
            append(data)
            sha256.update(data)
    return sha256.hexdigest()


def write_bytes(path: Path, data: bytes) -> str:
    """A new file, synced; its digest."""
    with disk.new_file(path) as append:
        append(data)
    return hashlib.sha256(data).hexdigest()


@contextmanager
def named(doing: str, again: str) -> Iterator[None]:
    """What the disk or the weight store refuses, as `cannot {doing}`; {again} is what to do then.

    The weight store's own advice, which is about publishing, is left out.
    """
    try:
        yield
    except (OSError, WeightsError) as error:
        reason = f"cannot {doing}: {reason_of(error)}."
        if _by_the_system(error) is not None:
            reason += f" Check the disk and the permissions, then {again}."
        raise CheckpointError(reason) from error


def reason_of(error: Exception) -> str:
    """What went wrong, without the weight store's advice."""
    cause = _by_the_system(error)
    return str(error).removesuffix(".") if cause is None else cause.strerror or str(cause)


def _by_the_system(error: Exception) -> OSError | None:
    cause = error.__cause__ if isinstance(error, WeightsError) else error
    return cause if isinstance(cause, OSError) else None
