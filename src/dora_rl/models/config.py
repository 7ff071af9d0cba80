"""What a Hugging Face model directory says of its model, checked and as plain numbers.

Reads config.json and generation_config.json as transformers does, and needs no library, so
that a model is refused before anything is loaded. Sizes must be there; another missing key
means what transformers takes it to mean. Whatever the decoder would not compute is refused.
"""

import json
import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dora_rl.models.errors import ModelError

CONFIG = "config.json"
GENERATION = "generation_config.json"

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
DTYPES = ("float32", "bfloat16")

# Where a family's missing key means something else than in the other families.
_IF_MISSING: dict[str, dict[str, int]] = {
    "llama": {"eos_token_id": 2},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_SUPPORTED = f"Supported are dense models of {', '.join(ARCHITECTURES.values())}."
_MUST_HOLD = (
    f"A model directory holds {CONFIG}, the weights as *.safetensors and, for text, "
    "tokenizer.json: save_pretrained of transformers writes one."
)
_MAX_SHOWN = 60  # characters of a value in a message
_MAX_BYTES = 16 << 20  # of a file; the largest known ones have some hundred kilobytes
# Far above any model, and low enough that nobody counts or multiplies for ever.
_MAX_SIZES = {"num_hidden_layers": 4096}
_MAX_CONTEXT = 2**31
_MAX_SIZE = 2**24
_MAX_TOKEN = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Rope:
    """The numbers of a rotary embedding; what a kind does not use stays at its default."""

    kind: str  # one of ROPE_KINDS
    theta: float
    factor: float = 1.0  # linear, llama3, yarn
    original_context: int = 1  # llama3, yarn: the context before it was stretched
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    attention_factor: float = 1.0  # what cosines and sines are multiplied by


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of one model, and what else its decoder must know."""

    family: str  # one of ARCHITECTURES
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    context: int  # the longest sequence
    tied: bool  # the head is the embedding
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: Rope
    eos_token_ids: tuple[int, ...]
    dtype: str  # one of DTYPES

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that the decoder needs, by its Hugging Face name, with its shape."""
        hidden, middle = self.hidden_size, self.intermediate_size
        wide, narrow = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {}
        shapes["model.embed_tokens.weight"] = (self.vocab_size, hidden)

        def linear(name: str, outputs: int, inputs: int, bias: bool) -> None:
            shapes[f"{name}.weight"] = (outputs, inputs)
            if bias:
                shapes[f"{name}.bias"] = (outputs,)

        for index in range(self.num_layers):
            layer = f"model.layers.{index}"
            attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
            shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
            linear(f"{attention}.q_proj", wide, hidden, self.qkv_bias)
            linear(f"{attention}.k_proj", narrow, hidden, self.qkv_bias)
            linear(f"{attention}.v_proj", narrow, hidden, self.qkv_bias)
            linear(f"{attention}.o_proj", hidden, wide, self.out_bias)
            if self.qk_norm:
                shapes[f"{attention}.q_norm.weight"] = (self.head_dim,)
                shapes[f"{attention}.k_norm.weight"] = (self.head_dim,)
            shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
            linear(f"{mlp}.gate_proj", middle, hidden, self.mlp_bias)
            linear(f"{mlp}.up_proj", middle, hidden, self.mlp_bias)
            linear(f"{mlp}.down_proj", hidden, middle, self.mlp_bias)
        shapes["model.norm.weight"] = (hidden,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes

    def linears(self, last_names: Collection[str] | None = None) -> dict[str, tuple[int, int]]:
        """Outputs and inputs of the linear layers between embedding and head, by module.

        Of those with one of the last names, such as `q_proj`, if they are given.
        """
        found = {
            name.removesuffix(".weight"): (shape[0], shape[1])
            for name, shape in self.tensors().items()
            if name.startswith("model.layers.") and len(shape) == 2
        }
        if last_names is None:
            return found
        return {name: of for name, of in found.items() if name.rpartition(".")[2] in last_names}


def read_config(directory: str | Path) -> ModelConfig:
    """The model that the directory holds, or a refusal that names file, key and value.

    With `dynamic` rope the frequencies depend on the length of the sequence once it passes the
    original context. Cached keys must not change, so the context ends there.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise ModelError(f"no model directory: `{directory}`. {_MUST_HOLD}")
    if not (directory / CONFIG).is_file():
        raise ModelError(f"no {CONFIG} in `{directory}`. {_MUST_HOLD}")
    keys = _read(directory / CONFIG)
    family = _family(keys)
    keys = _Keys(keys.path, _IF_MISSING[family] | keys.values)
    _refuse_other_computations(keys)
    heads, kv_heads, head_dim = _heads(keys)
    context = keys.size("max_position_embeddings")
    rope = _rope(keys, context)
    if rope.kind == "dynamic":
        context = min(context, rope.original_context)
    attention_bias = keys.flag("attention_bias", False)
    return ModelConfig(
        family=family,
        vocab_size=keys.size("vocab_size"),
        hidden_size=keys.size("hidden_size"),
        intermediate_size=keys.size("intermediate_size"),
        num_layers=keys.size("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=keys.number("rms_norm_eps", 1e-6, least=0.0),
        context=context,
        tied=keys.flag("tie_word_embeddings", False),
        # Qwen2 has the first three biases always, and no others; the keys are not its own.
        qkv_bias=family == "qwen2" or attention_bias,
        out_bias=family != "qwen2" and attention_bias,
        mlp_bias=family == "llama" and keys.flag("mlp_bias", False),
        qk_norm=family == "qwen3",
        rope=rope,
        eos_token_ids=_eos(keys, directory / GENERATION),
        dtype=_dtype(keys),
    )


@dataclass(frozen=True, slots=True)
class _Keys:
    """An object of a JSON file, read so that every complaint names the file and the key.

    null is a missing key, except for a flag.
    """

    path: Path
    values: dict[str, Any]
    inside: str = ""

    def get(self, key: str) -> Any:
        return self.values.get(key)

    def refusal(self, key: str, problem: str, fix: str = "") -> ModelError:
        where = f"{self.inside}{key} in `{self.path}`"
        if key not in self.values:
            return ModelError(f"{where} is missing; it {problem}. {fix}".rstrip())
        return ModelError(f"{where} {problem}: {_show(self.get(key))}. {fix}".rstrip())

    def size(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.refusal(key, "must be a whole number >= 1")
        most = _MAX_CONTEXT if "position" in key else _MAX_SIZES.get(key, _MAX_SIZE)
        if value > most:
            raise self.refusal(key, f"must be <= {most}")
        return value

    def number(self, key: str, default: float | None = None, *, least: float) -> float:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not _is_finite(value) or value < least:
            raise self.refusal(key, f"must be a finite number >= {least:g}")
        return float(value)

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.number(key, default, least=0.0)
        if value == 0:
            raise self.refusal(key, "must be > 0")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self.refusal(key, "must be true or false")
        return value

    def object(self, key: str) -> "_Keys":
        value = self.get(key)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.refusal(key, "must be an object")
        return _Keys(self.path, value, f"{self.inside}{key}.")


def _read(path: Path) -> _Keys:
    try:
        with open(path, "rb") as file:
            raw = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ModelError(f"cannot read `{path}`: {error.strerror}.") from None
    if len(raw) > _MAX_BYTES:
        raise ModelError(f"`{path}` has more than {_MAX_BYTES} bytes. Copy the file again.")
    try:
        values = json.loads(raw, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"not JSON: `{path}`: {error}. Copy the file again.") from None
    if not isinstance(values, dict):
        raise ModelError(f"`{path}` must be a JSON object: {_show(values)}. Copy the file again.")
    return _Keys(path, values)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Of two values under one key, each reader might take another."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the key {_show(name)} occurs twice")
        found[name] = value
    return found


def _show(value: object) -> str:
    text = value if isinstance(value, str) and value.isprintable() else json.dumps(value)
    return f"`{text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 1] + '…'}`"


def _is_finite(value: object) -> bool:
    try:
        return isinstance(value, int | float) and type(value) is not bool and math.isfinite(value)
    except OverflowError:  # a whole number beyond every float
        return False


def _family(keys: _Keys) -> str:
    """By architecture or, where none is named, by model_type; the two must agree."""
    named, kind = keys.get("architectures"), keys.get("model_type")
    if named is None and kind is None:
        raise keys.refusal("architectures", "says what the model is", _SUPPORTED)
    for family, architecture in ARCHITECTURES.items():
        if named in (None, [architecture]) and kind in (None, family):
            return family
    if kind is not None and (not isinstance(kind, str) or kind not in ARCHITECTURES):
        raise keys.refusal("model_type", "is not supported", _SUPPORTED)
    if not isinstance(named, list) or len(named) != 1 or named[0] not in ARCHITECTURES.values():
        raise keys.refusal("architectures", "is not supported", _SUPPORTED)
    raise keys.refusal("architectures", f"contradicts a model_type of `{kind}`", _SUPPORTED)


def _refuse_other_computations(keys: _Keys) -> None:
    """Whatever these families can be configured to, and the decoder does not compute."""
    if keys.get("quantization_config"):
        raise keys.refusal(
            "quantization_config",
            "is not supported",
            "Quantized weights cannot be trained: give the model as bfloat16 or float32.",
        )
    for key in _EXPERTS:
        if keys.get(key):
            raise keys.refusal(key, "makes this a mixture of experts", _SUPPORTED)
    if keys.get("per_layer_config"):
        raise keys.refusal("per_layer_config", "is not supported", "All layers must be alike.")
    full = "Supported is full attention in every layer."
    if keys.flag("use_sliding_window", False):
        raise keys.refusal("use_sliding_window", "is not supported", full)
    layers = keys.get("layer_types")
    if layers is not None and (
        not isinstance(layers, list) or any(layer != "full_attention" for layer in layers)
    ):
        raise keys.refusal("layer_types", "is not supported", full)
    if keys.get("hidden_act") not in (None, "silu"):
        raise keys.refusal("hidden_act", "is not supported", "Supported is silu.")


def _heads(keys: _Keys) -> tuple[int, int, int]:
    heads, hidden = keys.size("num_attention_heads"), keys.size("hidden_size")
    kv_heads = keys.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise keys.refusal(
            "num_attention_heads", f"must be a multiple of num_key_value_heads, {kv_heads}"
        )
    if keys.get("head_dim") is None and hidden % heads:
        raise keys.refusal(
            "hidden_size", f"must be a multiple of num_attention_heads, {heads}", "Or set head_dim."
        )
    head_dim = keys.size("head_dim", hidden // heads)
    if head_dim % 2:
        raise ModelError(
            f"head_dim in `{keys.path}` must be even, as rotary embedding turns pairs: "
            f"`{head_dim}`."
        )
    return heads, kv_heads, head_dim


def _rope(keys: _Keys, context: int) -> Rope:
    """From `rope_scaling` and `rope_theta`, or from `rope_parameters` of transformers 5."""
    rope = keys.object("rope_scaling" if keys.get("rope_scaling") else "rope_parameters")
    for key, value in rope.values.items():
        if isinstance(value, dict):
            raise rope.refusal(key, "is not supported", "All layers must be alike.")
    for holder in (keys, rope):
        if holder.get("partial_rotary_factor") not in (None, 1):
            raise holder.refusal("partial_rotary_factor", "is not supported", "Supported is 1.")
    holder = rope if rope.get("rope_theta") is not None else keys
    theta = holder.number("rope_theta", 10_000.0, least=1.0)
    if theta == 1:
        raise holder.refusal("rope_theta", "must be > 1")
    name = "rope_type" if rope.get("rope_type") is not None else "type"
    kind = "default" if rope.get(name) is None else rope.get(name)
    if kind not in ROPE_KINDS:
        raise rope.refusal(name, "is not supported", f"Supported are {', '.join(ROPE_KINDS)}.")
    holder = keys if keys.get("original_max_position_embeddings") is not None else rope
    return Rope(
        kind=kind,
        theta=theta,
        original_context=holder.size("original_max_position_embeddings", context),
        **_scaling(kind, rope),
    )


def _scaling(kind: str, rope: _Keys) -> dict[str, Any]:
    """What the kind adds to plain rotary embedding."""
    if kind in ("default", "dynamic"):
        return {}
    factor = rope.number("factor", least=1.0)
    if kind == "linear":
        return {"factor": factor}
    if kind == "llama3":
        low, high = rope.positive("low_freq_factor"), rope.positive("high_freq_factor")
        if high <= low:
            raise rope.refusal("high_freq_factor", f"must be > low_freq_factor, {low:g}")
        return {"factor": factor, "low_freq_factor": low, "high_freq_factor": high}
    fast, slow = rope.positive("beta_fast", 32.0), rope.positive("beta_slow", 1.0)
    if fast < slow:
        raise rope.refusal("beta_fast", f"must be >= beta_slow, {slow:g}", "The default is 32.")
    return {
        "factor": factor,
        "beta_fast": fast,
        "beta_slow": slow,
        "truncate": rope.flag("truncate", True),
        "attention_factor": _yarn_attention(rope, factor),
    }


def _yarn_attention(rope: _Keys, factor: float) -> float:
    """As named, or as https://arxiv.org/abs/2309.00071 recommends (`mscale`: DeepSeek's way)."""
    if rope.get("attention_factor") is not None:
        return rope.positive("attention_factor")

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0

    upper, lower = rope.number("mscale", 0, least=0.0), rope.number("mscale_all_dim", 0, least=0.0)
    return scale(upper) / scale(lower) if upper and lower else scale(1.0)


def _eos(keys: _Keys, generation: Path) -> tuple[int, ...]:
    """Every token that either file calls an end of text."""
    ids: dict[int, None] = {}
    for holder in (keys, *([_read(generation)] if generation.is_file() else ())):
        value = holder.get("eos_token_id")
        for token in value if isinstance(value, list) else () if value is None else (value,):
            whole = isinstance(token, int) and not isinstance(token, bool)
            if not whole or not 0 <= token <= _MAX_TOKEN:
                raise holder.refusal("eos_token_id", "must be a token id, or a list of them")
            ids[token] = None
    return tuple(ids)


def _dtype(keys: _Keys) -> str:
    """As named; float32 where none is, since it holds the weights of every other exactly."""
    name = "dtype" if keys.get("dtype") is not None else "torch_dtype"
    dtype = keys.get(name)
    if dtype is None:
        return "float32"
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise keys.refusal(
            name,
            "is not supported",
            f"Supported are {', '.join(DTYPES)}: load the model as one of them with "
            "transformers and save it again.",
        )
    return dtype
