"""Small random models as Hugging Face directories, written by transformers itself.

They are what the package's own reading and computing is compared with. Weights are large
enough that the logits differ by units, and no bias or norm is trivial.
"""

from pathlib import Path
from typing import Any

import tokenizers
import torch
from hypothesis import strategies as st
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils.logging import disable_progress_bar

disable_progress_bar()

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TEXT = "The quick brown fox, naïve and 100 % déjà vu, jumps: 狐狸跳过懒狗 🦊🐕‍🦺 </answer>\n\n" * 3


def make_config(family: str, **overrides: Any) -> Any:
    """The configuration of `make_model`, as an object of transformers."""
    return FAMILIES[family][0](**{**SMALL, **overrides})


def make_model(
    directory: Path, family: str, *, seed: int, dtype: str = "float32", **overrides: Any
) -> Path:
    """Write a random model; `overrides` are keys of its configuration. Returns the directory."""
    random_model(family, seed=seed, dtype=dtype, **overrides).save_pretrained(directory)
    return directory


def random_model(
    family: str, *, seed: int, dtype: str = "float32", **overrides: Any
) -> PreTrainedModel:
    """The same model in memory, for comparisons; the global generator is left alone."""
    with torch.random.fork_rng(devices=[]):
        model = FAMILIES[family][1](make_config(family, **overrides)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.copy_(0.3 * noise + float(name.endswith("norm.weight")))
            else:
                parameter.copy_(0.4 * noise)
    return model.to(getattr(torch, dtype))


def make_tokenizer(vocab_size: int = 300) -> tokenizers.Tokenizer:
    """Byte-level BPE, trained on a few words and emoji; token 0 is the special `<|end|>`.

    `save(str(directory / "tokenizer.json"))` puts it beside a model. 257 tokens are the least.
    """
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


@st.composite
def rope_parameters(draw: st.DrawFn, kind: str | None = None) -> dict[str, Any]:
    """Numbers for one kind of rope, or for any, in the form of transformers 5."""
    kind = kind or draw(st.sampled_from(["default", "linear", "dynamic", "llama3", "yarn"]))
    theta = st.sampled_from([100.0, 10_000.0, 500_000.0, 1_000_000]) | st.floats(2, 1e7)
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": draw(theta)}
    if kind != "default":
        rope["factor"] = draw(st.sampled_from([1.0, 2.0, 8]) | st.floats(1, 64))
    if kind in ("llama3", "yarn"):
        original = st.sampled_from([6, 16, 64, 8192]) | st.integers(1, 200_000)
        rope["original_max_position_embeddings"] = draw(original)
    if kind == "llama3":
        rope["low_freq_factor"] = draw(st.just(1.0) | st.floats(0.25, 2))
        rope["high_freq_factor"] = draw(st.just(4.0) | st.floats(2.5, 32))
    if kind == "yarn":
        scale = st.floats(0.5, 2)
        rope |= draw(
            st.just({})
            | st.fixed_dictionaries({"attention_factor": scale})
            | st.fixed_dictionaries({"mscale": scale, "mscale_all_dim": scale})
            | st.fixed_dictionaries({"mscale": scale})
        )
        rope |= draw(
            st.just({}) | st.sampled_from([{"beta_fast": 64}, {"beta_fast": 16, "beta_slow": 16.0}])
        )
        rope |= draw(st.just({}) | st.builds(dict, truncate=st.booleans()))
    return rope


@st.composite
def model_shapes(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments for `make_model`, but for directory, seed and dtype: families and shapes."""
    family = draw(st.sampled_from(sorted(FAMILIES)))
    kv_heads, ratio = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    heads = kv_heads * ratio
    return {
        "family": family,
        "vocab_size": draw(st.integers(3, 120)),
        # transformers wants a multiple of the heads, even where head_dim is set
        "hidden_size": heads * draw(st.integers(1, 6)),
        "intermediate_size": draw(st.integers(1, 64)),
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 2 * draw(st.integers(2, 8)),
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-5, 1e-2])),
        "tie_word_embeddings": draw(st.booleans()),
        "rope_parameters": draw(rope_parameters()),
        "attention_bias": draw(st.booleans()),  # not for qwen2, which must ignore it
        "mlp_bias": draw(st.booleans()),  # for llama alone
    }
