"""Whether weights are those of a model: names, shapes, dtypes. Free of torch."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from dora_rl.models.config import ModelConfig
from dora_rl.weights.adapter import tensor_names
from dora_rl.weights.errors import WeightsError

if TYPE_CHECKING:
    from torch import Tensor

    from dora_rl.weights.loading import LoadedWeights

_OURS = {"float32", "bfloat16"}


def check_shapes(
    config: ModelConfig, directory: Path, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Refuse weights that lack a tensor of the model, or have it in another shape."""
    for name, shape in config.tensors().items():
        if name not in shapes:
            raise WeightsError(
                f"tensor `{name}` is missing from `{directory}`. Is it another model's?"
            )
        if shapes[name] != shape:
            raise WeightsError(
                f"tensor `{name}` in `{directory}` has the shape `{shapes[name]}`: "
                f"this model has {shape}. Is it another model's?"
            )


def check_dtypes(directory: Path, dtypes: Collection[str], fix: str = "") -> None:
    """Refuse weights of several dtypes, or of one that the engine does not compute with."""
    if len(set(dtypes)) > 1 or not set(dtypes) <= _OURS:
        raise WeightsError(
            f"the tensors in `{directory}` are of dtype `{', '.join(sorted(set(dtypes)))}`: "
            f"all must be float32, or all bfloat16.{fix}"
        )


def check_tensors(config: ModelConfig, directory: Path, tensors: "Mapping[str, Tensor]") -> None:
    """Refuse weights that are not exactly those of this model."""
    check_shapes(config, directory, {name: tuple(t.shape) for name, t in tensors.items()})
    check_dtypes(directory, {str(t.dtype).removeprefix("torch.") for t in tensors.values()})
    if foreign := sorted(tensors.keys() - config.tensors().keys()):
        raise WeightsError(
            f"tensor `{foreign[0]}` in `{directory}` is none of this model's. "
            "Is it another model's?"
        )


def check_base(
    config: ModelConfig, directory: Path, tensors: "Mapping[str, Tensor]"
) -> "dict[str, Tensor]":
    """The tensors of a model directory that are the model's; refused if they are not all there.

    Files may have more than is published, such as a head that is tied to the embedding.
    """
    own = {name: tensors[name] for name in config.tensors() if name in tensors}
    check_tensors(config, directory, own)
    return own


def check_adapter(
    config: ModelConfig, base: str | None, directory: Path, weights: "LoadedWeights"
) -> None:
    """Refuse an adapter of another base than this model's weights, whose digest is given.

    Without a base, refuse every adapter; with one, whatever is none.
    """
    adapter = weights.manifest.adapter
    if adapter is None and base is None:
        return
    if adapter is None:
        raise WeightsError(
            f"`{directory}` is a full set of weights, and this engine serves LoRA adapters. Is it "
            "of a run without model.lora?"
        )
    if base is None:
        raise WeightsError(
            f"`{directory}` is a LoRA adapter, and this engine serves full sets of weights. Is it "
            "of a run with model.lora?"
        )
    if adapter.base != base:
        raise WeightsError(
            f"`{directory}` is an adapter of another base: its weights have the digest "
            f"`{adapter.base}`, those of this engine's model have `{base}`. Name the model that it "
            "was trained on by model.path."
        )
    expected: dict[str, tuple[int, ...]] = {}
    for module, (outputs, inputs) in config.linears(adapter.targets).items():
        down, up = tensor_names(module)
        expected |= {down: (adapter.rank, inputs), up: (outputs, adapter.rank)}
    found = {name: tuple(tensor.shape) for name, tensor in weights.tensors.items()}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise WeightsError(
                f"tensor `{name}` of the adapter in `{directory}` has the shape "
                f"`{found.get(name, 'none')}`: with rank {adapter.rank} this model has "
                f"{expected.get(name, 'none')}. Is it another model's?"
            )
