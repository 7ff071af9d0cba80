"""Model configurations: transformers is the reference, and every refusal names what is wrong."""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import AutoConfig

from dora_rl.core.protocol.errors import UserError
from dora_rl.models.config import ROPE_KINDS, ModelConfig, Rope, read_config
from dora_rl.models.errors import ModelError
from tests.models.random_models import FAMILIES, make_config, make_model, model_shapes

PLAIN = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
}
REQUIRED = [
    *("vocab_size", "hidden_size", "intermediate_size"),
    *("num_hidden_layers", "num_attention_heads", "max_position_embeddings"),
]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


def read(values: object, generation: object = None) -> ModelConfig:
    """`values` as a config.json, or as its raw bytes, through `read_config`."""
    with tempfile.TemporaryDirectory() as directory:
        for name, content in (("config.json", values), ("generation_config.json", generation)):
            if content is not None:
                raw = content if isinstance(content, bytes) else json.dumps(content).encode()
                (Path(directory) / name).write_bytes(raw)
        return read_config(Path(directory))


def by_transformers(values: dict[str, Any]) -> dict[str, Any]:
    """What transformers makes of a config.json, under our names."""
    config = AutoConfig.for_model(**values)
    heads = config.num_attention_heads
    return {
        "num_heads": heads,
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "norm_eps": config.rms_norm_eps,
        "context": config.max_position_embeddings,
        "tied": config.tie_word_embeddings,
        "theta": config.rope_parameters["rope_theta"],
        "kind": config.rope_parameters["rope_type"],
        "dtype": str(config.dtype or "float32").removeprefix("torch."),
        "eos": config.eos_token_id,
    }


@settings(max_examples=40)
@given(model_shapes(), st.sampled_from(["float32", "bfloat16"]))
def test_what_transformers_writes_is_read(shape: dict[str, Any], dtype: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        config = read_config(make_model(Path(directory), **shape, seed=1, dtype=dtype))
        with safe_open(f"{directory}/model.safetensors", "pt") as file:
            written = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert config.tensors() == written
    assert config.family == shape["family"]
    assert config.vocab_size == shape["vocab_size"]
    assert config.num_layers == shape["num_hidden_layers"]
    assert config.num_heads == shape["num_attention_heads"]
    assert config.norm_eps == shape["rms_norm_eps"]
    assert config.tied == shape["tie_word_embeddings"] == ("lm_head.weight" not in written)
    assert config.rope.kind == shape["rope_parameters"]["rope_type"]
    assert config.rope.theta == shape["rope_parameters"]["rope_theta"]
    assert config.eos_token_ids == (2,)
    assert config.dtype == dtype
    assert config.context == 256


@given(
    st.sampled_from(sorted(FAMILIES)),
    st.fixed_dictionaries(
        {},
        optional={
            "num_key_value_heads": st.sampled_from([None, 8, 32]),
            "head_dim": st.sampled_from([4, 16]),
            "rms_norm_eps": st.just(1e-3),
            "tie_word_embeddings": st.booleans(),
            "attention_bias": st.booleans(),
            "eos_token_id": st.sampled_from([None, 5]),
            "dtype": st.just("bfloat16"),
            "torch_dtype": st.sampled_from(["float32", "bfloat16"]),
            "rope_theta": st.sampled_from([500, 1e6]),
            "rope_scaling": st.sampled_from(
                [
                    None,
                    {"type": "linear", "factor": 2.0},
                    {"rope_type": "dynamic", "type": "linear", "factor": 2.0},
                    {"rope_type": "linear", "factor": 2.0, "rope_theta": 77.0},
                ]
            ),
            "rope_parameters": st.sampled_from(
                [None, {"rope_theta": 99.0}, {"rope_type": "linear", "factor": 3.0}]
            ),
        },
    ),
)
def test_missing_and_older_keys_mean_what_they_mean_to_transformers(
    family: str, keys: dict[str, Any]
) -> None:
    sizes = dict.fromkeys(REQUIRED, 64)
    values = {"model_type": family, **sizes, "hidden_size": 256, "num_attention_heads": 32, **keys}
    config = read(values)
    eos = None if not config.eos_token_ids else config.eos_token_ids[0]
    ours = {
        **{name: getattr(config, name) for name in ("num_heads", "num_kv_heads", "head_dim")},
        **{name: getattr(config, name) for name in ("norm_eps", "context", "tied", "dtype")},
        **{"theta": config.rope.theta, "kind": config.rope.kind, "eos": eos},
    }
    assert ours == by_transformers(values)


def test_a_configuration_by_hand() -> None:
    config = read(
        {
            **PLAIN,
            **{"num_key_value_heads": 2, "head_dim": 6, "attention_bias": True},
            **{"rope_theta": 500_000.0, "torch_dtype": "bfloat16"},
            "rope_scaling": {
                **{"rope_type": "llama3", "factor": 32.0, "original_max_position_embeddings": 64},
                **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
            },
        }
    )
    assert config == ModelConfig(
        family="llama",
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=6,
        norm_eps=1e-6,
        context=256,
        tied=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=False,
        qk_norm=False,
        rope=Rope("llama3", 500_000.0, 32.0, 64, 1.0, 4.0),
        eos_token_ids=(2,),
        dtype="bfloat16",
    )
    assert config.tensors()["model.layers.1.self_attn.k_proj.weight"] == (12, 32)
    assert config.tensors()["model.layers.0.self_attn.o_proj.weight"] == (32, 24)


@pytest.mark.parametrize(
    ("own", "generation", "expected"),
    [
        (7, None, (7,)),
        ([7, 9], None, (7, 9)),
        (None, None, ()),
        (7, {"eos_token_id": [8, 7]}, (7, 8)),
        ([7], {"eos_token_id": 9}, (7, 9)),
        (7, {}, (7,)),
        (None, {"eos_token_id": 3}, (3,)),
    ],
)
def test_both_files_name_ends_of_text(own: object, generation: object, expected: object) -> None:
    assert read({**PLAIN, "eos_token_id": own}, generation).eos_token_ids == expected


@pytest.mark.parametrize(
    ("rope", "expected"),
    [({}, 256), ({"original_max_position_embeddings": 64}, 64)],
)
def test_dynamic_rope_ends_where_it_would_begin_to_scale(
    rope: dict[str, Any], expected: int
) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, **rope}
    assert read({**PLAIN, "rope_parameters": rope}).context == expected
    other = {**rope, "rope_type": "linear"}
    assert read({**PLAIN, "rope_parameters": other}).context == 256


def refused(values: object, generation: object = None) -> str:
    with pytest.raises(ModelError) as caught:
        read(values, generation)
    text = str(caught.value)
    assert "\n" not in text
    return text


YARN = {"rope_type": "yarn", "factor": 2.0}
LLAMA3 = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("keys", "named", "fix"),
    [
        ({"model_type": "mistral"}, "model_type .*: `mistral`", "LlamaForCausalLM"),
        ({"model_type": "qwen3_moe"}, "model_type .*: `qwen3_moe`", "dense"),
        ({"architectures": ["LlamaModel"]}, r"architectures .*: `\[\"LlamaModel\"\]`", "Qwen2For"),
        ({"architectures": []}, r"architectures .*: `\[\]`", "Qwen3For"),
        ({"architectures": ["Qwen2ForCausalLM"]}, "architectures .* model_type of `llama`", "For"),
        ({"architectures": None, "model_type": None}, "architectures", "Supported"),
        ({"num_local_experts": 8}, "num_local_experts .* mixture .*: `8`", "dense"),
        ({"use_sliding_window": True}, "use_sliding_window .*: `true`", "full attention"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types", "full attention"),
        ({"hidden_act": "gelu"}, "hidden_act .*: `gelu`", "silu"),
        ({"quantization_config": {"bits": 4}}, "quantization_config .*bits", "bfloat16"),
        ({"per_layer_config": {"0": {}}}, "per_layer_config", "alike"),
        ({"dtype": "float16"}, "dtype .*: `float16`", "float32, bfloat16"),
        ({"torch_dtype": "float16"}, "torch_dtype .*: `float16`", "save it again"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor .*: `0.5`", "Supported is 1"),
        ({"rope_scaling": {"type": "longrope"}}, "rope_scaling.type .*: `longrope`", "yarn"),
        ({"rope_parameters": {"rope_type": "mrope"}}, "rope_parameters.rope_type.*`mrope`", "yarn"),
        ({"rope_parameters": {"full_attention": {}}}, "rope_parameters.full_attention", "alike"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, r"partial_rotary.*`0.25`", "1"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor .*missing", ">= 1"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor .*: `0.5`", ">= 1"),
        ({"rope_scaling": 3}, "rope_scaling .*: `3`", "object"),
        ({"rope_theta": 1.0}, "rope_theta .*: `1.0`", "> 1"),
        ({"rope_parameters": {**LLAMA3}}, "high_freq_factor .*: `4.0`", "> low_freq_factor, 4"),
        ({"rope_parameters": {**YARN, "beta_fast": 0.5}}, "beta_fast .*: `0.5`", "beta_slow, 1"),
        ({"rope_parameters": {**YARN, "beta_slow": 0}}, "beta_slow .*: `0`", "> 0"),
        ({"rope_parameters": {**YARN, "truncate": None}}, "truncate .*: `null`", "true or false"),
        ({"rope_parameters": {**YARN, "attention_factor": -1}}, "attention_.*: `-1`", ">= 0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings .*: `yes`", "true or false"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps .*: `-1e-06`", ">= 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps .*: `NaN`", "finite"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps .*: `10+…`", "finite"),
        ({"num_key_value_heads": 3}, "num_attention_heads .*: `4`", "num_key_value_heads, 3"),
        ({"hidden_size": 30}, "hidden_size .*: `30`", "Or set head_dim"),
        ({"hidden_size": 12}, "head_dim .*: `3`", "even"),
        ({"head_dim": 7}, "head_dim .*: `7`", "even"),
        ({"eos_token_id": [2, -1]}, r"eos_token_id .*: `\[2, -1\]`", "a token id"),
        ({"eos_token_id": True}, "eos_token_id .*: `true`", "a token id"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    keys: dict[str, Any], named: str, fix: str
) -> None:
    text = refused({**PLAIN, **keys})
    assert re.search(named, text), text
    assert fix in text
    assert "config.json" in text


@pytest.mark.parametrize("key", [*REQUIRED, "num_key_value_heads", "head_dim"])
@pytest.mark.parametrize("value", [0, -1, 2.0, 1.5, "8", True, [8]])
def test_sizes_are_whole_and_positive(key: str, value: object) -> None:
    text = refused({**PLAIN, key: value})
    assert f"{key} in `" in text
    shown = value if isinstance(value, str) else json.dumps(value)
    assert f"must be a whole number >= 1: `{shown}`" in text


@pytest.mark.parametrize("key", REQUIRED)
def test_sizes_are_not_guessed(key: str) -> None:
    text = refused({name: value for name, value in PLAIN.items() if name != key})
    assert re.match(f"{key} in `.*config.json` is missing", text)


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"a": 1,}', b"nan"])
def test_what_is_not_json_is_refused(raw: bytes) -> None:
    assert re.match(r"not JSON: `.*[/\\]config.json`", refused(raw))
    assert re.match("not JSON: `.*generation_config.json`", refused(PLAIN, raw))


def test_what_is_not_an_object_is_refused() -> None:
    assert "must be a JSON object: `[1]`" in refused(b"[1]")
    assert "eos_token_id" in refused(PLAIN, {"eos_token_id": "</s>"})


def test_an_incomplete_directory_is_refused_with_what_it_must_hold(tmp_path: Path) -> None:
    for directory, problem in ((tmp_path, "no config.json"), (tmp_path / "x", "no model")):
        with pytest.raises(UserError, match=rf"{problem}.*safetensors.*tokenizer.json"):
            read_config(directory)


@given(
    st.dictionaries(
        st.sampled_from([*PLAIN, "rope_parameters", "rope_scaling", "rope_theta", "dtype"]),
        json_values,
        max_size=3,
    ),
    st.dictionaries(
        st.sampled_from(["rope_type", "type", "factor", "rope_theta", "beta_fast", "truncate"])
        | st.text(max_size=3),
        st.sampled_from(ROPE_KINDS) | json_values,
    ),
)
def test_any_json_is_read_or_refused(keys: dict[str, Any], rope: dict[str, Any]) -> None:
    try:
        config = read({**PLAIN, "rope_parameters": rope, **keys})
    except ModelError as error:
        str(error).encode()  # a message that cannot be printed would hide itself
    else:
        assert config.head_dim % 2 == 0 and config.num_heads % config.num_kv_heads == 0


def test_a_configuration_is_read_without_torch() -> None:
    code = "import sys, dora_rl.models.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_helper_makes_what_it_says(tmp_path: Path) -> None:
    """Same seed, same bytes; another seed, other weights."""
    one, same, other = (
        (make_model(tmp_path / name, "qwen3", seed=seed) / "model.safetensors").read_bytes()
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert one == same != other
    assert make_config("llama", hidden_size=64).hidden_size == 64
