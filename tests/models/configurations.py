"""A configuration without a model, small enough to compute with by hand."""

from dora_rl.models.config import ModelConfig, Rope

SMALL = ModelConfig(
    family="llama",
    vocab_size=10,
    hidden_size=4,
    intermediate_size=8,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=2,
    norm_eps=1e-5,
    context=64,
    tied=True,
    qkv_bias=False,
    out_bias=False,
    mlp_bias=False,
    qk_norm=False,
    rope=Rope("default", 10_000.0),
    eos_token_ids=(2,),
    dtype="bfloat16",
)
