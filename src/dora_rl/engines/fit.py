"""Whether weights are those of a model: names, shapes, dtypes. Free of torch."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from dora_rl.models.config import ModelConfig
from dora_rl.weights.errors import WeightsError

if TYPE_CHECKING:
    from torch import Tensor

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
