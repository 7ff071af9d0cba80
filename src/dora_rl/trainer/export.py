"""A checkpoint's policy in a directory of its own: without the trainer's state, merged if asked.

    checkpoint (full weights)   -> its Hugging Face model directory, to the byte
    checkpoint (LoRA adapter)   -> its PEFT adapter directory, to the byte
    the same with `merge`       -> a Hugging Face model directory: base + alpha / rank * B A

Every file of the checkpoint is checked first, and so are the weights of the base: the digest of
the initial policy, which a checkpoint has, covers base, rank, alpha and targets. Nothing is written
before; then the directory appears whole or not at all. Memory: the mapped files, and one tensor.
"""

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from dora_rl.trainer import checkpoint
from dora_rl.trainer.checkpoint import Checkpoint
from dora_rl.trainer.errors import CheckpointError
from dora_rl.trainer.lora import initial
from dora_rl.trainer.model import Source
from dora_rl.trainer.model_directory import (
    OF_WHOLE_MODELS,
    copied_files,
    named,
    new_directory,
    write_bytes,
    write_weights,
)
from dora_rl.trainer.settings import LoraSettings
from dora_rl.trainer.snapshot import Facts, facts_of
from dora_rl.transports.weights.shared_directory import MAX_FILE_BYTES
from dora_rl.weights import checks, disk
from dora_rl.weights.adapter import CONFIG_FILE, TENSORS_FILE, module_of, tensor_names
from dora_rl.weights.huggingface import map_model
from dora_rl.weights.tensors import ready

_EXPORTING = ".exporting-"
_OF_ADAPTERS = frozenset({CONFIG_FILE, TENSORS_FILE})
_LORA = "lora."  # begins the settings of an adapter in a checkpoint
_MAX_CONFIG = 1 << 20  # bytes of adapter_config.json


@dataclass(frozen=True)
class Exported:
    """What was written: the names of the files, and what they are of."""

    files: tuple[str, ...]
    is_adapter: bool  # needs its base and PEFT to load
    base: Path | None = None  # that an adapter was merged into


def export(
    directory: Path, out: Path, *, merge: bool = False, max_file_bytes: int = MAX_FILE_BYTES
) -> Exported:
    """Write the policy of the checkpoint `directory` as `out`, which is new or empty.

    `merge` adds an adapter to its base; a policy of full weights is the same with it and without.
    """
    found = checkpoint.read(Path(directory))
    out = out.resolve()  # a link to an empty directory cannot be renamed over
    merging = _Merging.of(found) if merge and found.is_adapter else None
    with named(f"export to `{out}`", "export again"):
        disk.make_root(out.parent)
        with new_directory(out, _EXPORTING) as partial:
            if merging is None:
                files = _copy(found, found.files.keys(), partial)
            else:
                files = _copy(found, found.files.keys() - _OF_ADAPTERS, partial)
                files += merging.write(partial, max_file_bytes)
    base = None if merging is None else merging.source.directory
    is_adapter = found.is_adapter and merging is None
    return Exported(tuple(sorted(files)), is_adapter, base)


def _copy(found: Checkpoint, names: Collection[str], to: Path) -> list[str]:
    for name in names:
        data = memoryview(disk.map_file(found.directory / name, follow_links=True) or b"")
        with disk.new_file(to / name) as append:
            append(data)
        if hashlib.sha256(data).hexdigest() != found.files[name]:
            raise _damaged(found, f"{name} changed while it was copied")
    return list(names)


@dataclass(frozen=True)
class _Merging:
    """An adapter and the base that it was trained on, both mapped and checked."""

    source: Source
    scale: float
    pairs: dict[str, tuple[Tensor, Tensor]]  # A and B, by the tensor of the base

    @classmethod
    def of(cls, found: Checkpoint) -> "_Merging":
        weights = found.weights()
        source = _source(found, weights)
        assert source.adapter is not None
        modules = sorted({module_of(name) or name for name in weights})
        pairs = dict(_pair(found, module, weights, source.base) for module in modules)
        return cls(source, source.adapter.scale, pairs)

    def write(self, directory: Path, max_file_bytes: int) -> list[str]:
        """The base's configuration, and its weights with the adapter in them."""
        base = self.source.base
        copied = {
            name: write_bytes(directory / name, data)
            for name, data in copied_files(self.source.directory, base)
            if name in OF_WHOLE_MODELS
        }
        written = write_weights(directory, base, max_file_bytes, prepare=self._merged)
        return [*copied, *written]

    def _merged(self, name: str, tensor: Tensor) -> Tensor:
        if name in self.pairs:
            down, up = self.pairs[name]
            merged = torch.addmm(tensor.float(), up.float(), down.float(), alpha=self.scale)
            tensor = merged.to(tensor.dtype)
        return ready(name, tensor)


def _source(found: Checkpoint, weights: Mapping[str, Tensor]) -> Source:
    """What the adapter was trained from, as it is now; another base than then is refused."""
    facts = facts_of(found)
    directory = _base_directory(found)
    lora, seed = _lora_settings(found, facts)
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    if any(len(shape) != 2 for shape in shapes.values()):
        raise _damaged(found, "its adapter has a tensor that is no matrix")
    source = Source(directory, initial(shapes, seed), {}, map_model(directory), lora)
    if source.digest != facts.model:
        raise CheckpointError(
            f"`{found.directory}` was trained on another base than there is in `{directory}`: with "
            f"this one the initial policy has the digest `{source.digest}`, the checkpoint has "
            f"`{facts.model}`. Put back the weights of the run's start, or export without --merge."
        )
    return source


def _base_directory(found: Checkpoint) -> Path:
    path = found.directory / CONFIG_FILE
    config = checks.json_object(disk.read_small(path, _MAX_CONFIG, follow_links=True), f"`{path}`")
    base = config.get("base_model_name_or_path")
    if not isinstance(base, str) or not (Path(base) / "config.json").is_file():
        raise CheckpointError(
            f"the base of the adapter is no model directory: {checks.shown(base)}, by `{path}`. "
            "Put the model back there, or export without --merge."
        )
    return Path(base)


def _lora_settings(found: Checkpoint, facts: Facts) -> tuple[LoraSettings, int]:
    """What the initial adapter follows from, beside the base."""
    given = {
        key.removeprefix(_LORA): value
        for key, value in facts.settings.items()
        if key.startswith(_LORA)
    }
    try:
        lora = LoraSettings.model_validate_json(msgspec.json.encode(given))
        return lora, msgspec.convert(facts.settings.get("seed"), int)
    except ValueError as error:
        raise _damaged(found, f"its settings are none of a LoRA run: {error}") from error


def _pair(
    found: Checkpoint, module: str, weights: Mapping[str, Tensor], base: Mapping[str, Tensor]
) -> tuple[str, tuple[Tensor, Tensor]]:
    """The name in the base of what a module's A and B are added to, and both."""
    name = f"{module}.weight"
    if name not in base:
        name = name.partition(".")[2]  # some are saved without the prefix of the base model
    down, up = (weights.get(name) for name in tensor_names(module))
    if name not in base or down is None or up is None:
        raise _damaged(found, f"`{module}` has not both A and B, or is none of the base's")
    if base[name].shape != (up.shape[0], down.shape[1]) or up.shape[1] != down.shape[0]:
        raise _damaged(found, f"A and B of `{module}` do not have its shape")
    return name, (down, up)


def _damaged(found: Checkpoint, why: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint `{found.directory}` is damaged: {why}. Export an earlier one."
    )
