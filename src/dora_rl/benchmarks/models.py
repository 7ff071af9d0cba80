"""The models that are measured: found, or made up, as Hugging Face directories.

Every contestant loads the same directory. torch is imported only where tensors are made.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dora_rl.core.protocol.errors import UserError
from dora_rl.models import packaged
from dora_rl.models.config import CONFIG, ModelConfig, read_config
from dora_rl.quickstart import model_directory

if TYPE_CHECKING:
    import torch

    from dora_rl.transports.weights.shared_directory import WeightStore

TINY = "tiny"
QUICKSTART = "quickstart"
_TINY_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_WEIGHTS = "model.safetensors"
_DTYPE_KEYS = ("dtype", "torch_dtype")
LORA_RANK = 16  # of adapters, unless another is asked for
PERTURBATION = 0.02  # of a weight: more than bf16 rounds away, and the model stays sound


@dataclass(frozen=True, slots=True)
class Model:
    """What is measured, and where every contestant finds it."""

    title: str
    directory: Path
    config: ModelConfig

    def to_json(self) -> dict[str, Any]:
        return {"title": self.title, "dtype": self.config.dtype, "parameters": self.parameters}

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.config.tensors().values())


def check_model(name: str) -> None:
    """Refuse a model that is neither known nor a directory; what is known may be absent yet."""
    known = (*packaged.MODELS, TINY, QUICKSTART)
    if name not in known and not (Path(name) / CONFIG).is_file():
        raise UserError(
            f"no such model: `{name}`. Use one of: {', '.join(known)}; or give a Hugging Face "
            f"directory, which holds {CONFIG}."
        )


def context_of(name: str) -> int | None:
    """The context of a model, before it is opened; None for one that has to be fetched."""
    check_model(name)
    if name == TINY:
        return int(_TINY_CONFIG["max_position_embeddings"])
    if name in packaged.MODELS:
        places = [packaged.place(name, dtype) for dtype in packaged.DTYPES]
    else:
        places = [model_directory() if name == QUICKSTART else Path(name)]
    found = (read_config(place).context for place in places if place.is_dir())
    return next(found, None)


def open_model(name: str, dtype: str | None, work: Path) -> Model:
    """A model by name or directory, in these numbers or else its own.

    What has to be made for it is made in `work`, and is the caller's to remove.
    """
    check_model(name)
    if name == TINY:
        directory = _make_tiny(work / TINY, dtype or "bfloat16")
        return _model("tiny, a random Llama", directory)
    if name in packaged.MODELS:
        directory = packaged.find(name, dtype or "bfloat16")
        return _model(packaged.MODELS[name].title, directory)
    source = model_directory() if name == QUICKSTART else Path(name).resolve()
    directory = source
    if dtype not in (None, read_config(directory).dtype):
        directory = _convert(directory, work / "converted", str(dtype))
    return _model("the quickstart's model" if name == QUICKSTART else source.name, directory)


def publish_versions(store: "WeightStore", directory: Path, count: int) -> None:
    """Versions 0 to `count` - 1: the model itself, and copies with other weights."""
    import torch

    from dora_rl.weights.huggingface import map_model

    tensors = map_model(directory)
    store.publish(0, tensors)
    for version in range(1, count):
        source = torch.Generator().manual_seed(version)

        def perturbed(tensor: torch.Tensor, source: torch.Generator = source) -> torch.Tensor:
            noise = torch.randn(tensor.shape, generator=source)
            return (tensor * (1 + PERTURBATION * noise)).to(tensor.dtype)

        store.publish(version, {name: perturbed(tensor) for name, tensor in tensors.items()})


def _model(title: str, directory: Path) -> Model:
    return Model(title, directory, read_config(directory))


def _make_tiny(directory: Path, dtype: str) -> Path:
    """Weights of the size that keeps activations near 1, so that the logits are no noise."""
    import torch

    directory.mkdir(parents=True)
    _write_config(directory, {**_TINY_CONFIG, "dtype": dtype})
    source = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(shape, generator=source) / math.sqrt(shape[1])
        if len(shape) == 2
        else torch.ones(shape)
        for name, shape in read_config(directory).tensors().items()
    }
    _write_weights(directory, tensors, dtype)
    return directory


def _convert(source: Path, directory: Path, dtype: str) -> Path:
    from dora_rl.weights.huggingface import map_model

    directory.mkdir(parents=True)
    config = json.loads((source / CONFIG).read_bytes())
    for key in _DTYPE_KEYS:
        config.pop(key, None)
    _write_config(directory, {**config, "dtype": dtype})
    _write_weights(directory, map_model(source), dtype)
    return directory


def _write_config(directory: Path, config: Mapping[str, Any]) -> None:
    (directory / CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")


def _write_weights(directory: Path, tensors: Mapping[str, "torch.Tensor"], dtype: str) -> None:
    import torch
    from safetensors.torch import save_file

    numbers = getattr(torch, dtype)
    save_file(
        {name: tensor.to(numbers).contiguous() for name, tensor in tensors.items()},
        directory / _WEIGHTS,
        metadata={"format": "pt"},
    )
