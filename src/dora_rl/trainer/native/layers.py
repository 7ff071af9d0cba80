"""The decoder layers of transformers' models, computed with our kernels on packed rows.

The modules stay who they are: products go through them, so that adapters, sharding and activation
checkpointing work as ever. A layer that is called without a packing does what it always did.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dora_rl.machine.fast_paths import Unavailable, fast_path
from dora_rl.trainer.errors import TrainerError
from dora_rl.trainer.native.operations import Packing, add_norm, attend, gated, norm
from dora_rl.trainer.native.structures import library

# Whose layers compute what `_layer` does.
_KINDS = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
# The others' angles depend on the longest sequence of a pass.
_ROPES = {"default", "linear", "llama3", "yarn"}
_TOLERANCE = 1e-4  # of numbers of size 1, in the trial


@fast_path("native-training")
def native_training() -> tuple[str, int]:
    """Whether the kernels can be compiled here, and are right.

    Not whether they are faster: bits depend on the answer, and a step that is taken again must
    come out the same.
    """
    library()
    noise = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 7, 24, generator=noise)
    weight, packing = torch.randn(24, generator=noise), Packing.of([(0, [7])])
    still = (torch.ones(7, 4), torch.zeros(7, 4))
    q, k = (part.view(7, 3, 8).transpose(0, 1) for part in (x, y))
    mixed = nn.functional.scaled_dot_product_attention(q, k, q, is_causal=True)
    pairs = {
        "norm": (norm(x, weight, 1e-5, x.dtype), nn.functional.rms_norm(x, (24,), weight, 1e-5)),
        "gate": (gated(x, y), nn.functional.silu(x) * y),
        "attention": (
            attend(x, y, x, still, packing, size=8, scale=8**-0.5),
            mixed.transpose(0, 1).reshape(7, 24),
        ),
    }
    for name, (ours, theirs) in pairs.items():
        if not torch.allclose(ours, theirs, rtol=_TOLERANCE, atol=_TOLERANCE):
            raise Unavailable(f"the {name} was wrong")
    return "compiled, and right", 0


def supported(model: Any) -> bool:
    """Whether the kernels compute what the layers of this model do."""
    config = model.config
    rope = getattr(config, "rope_parameters", None) or {}
    windows = [getattr(m, "sliding_window", None) for m in model.modules()]
    if type(model).__name__ == "MistralForCausalLM":  # whose layers ask the configuration
        windows.append(config.sliding_window)
    return (
        type(model).__name__ in _KINDS
        and config.hidden_act == "silu"
        and rope.get("rope_type", "default") in _ROPES
        and rope.get("partial_rotary_factor", 1.0) == 1.0
        and not any(windows)
    )


def install(model: Any, wanted: bool | None, device: torch.device) -> bool:
    """Let the layers of a model take packed rows, where they can; whether they do.

    None wants it wherever the trial says yes.
    """
    if wanted is False or device.type != "cpu" or not supported(model):
        return False
    trial = native_training()
    if not trial.in_force:
        if wanted:
            raise TrainerError(
                f"train.native_kernels cannot be `true` on this machine: {trial.finding}. "
                "Set it to false."
            )
        return False
    for layer in model.base_model.layers:
        layer.forward = partial(_forward, layer, layer.forward)
    return True


def hidden_states(base: Any, input_T: Tensor, packing: Packing, dtype: torch.dtype) -> Tensor:
    """What `base`, whose layers are installed, makes of a packed row: for each token its state."""
    x_TD = base.embed_tokens(input_T)
    half = base.layers[0].self_attn.head_dim // 2
    angles = base.rotary_emb(x_TD[None], position_ids=packing.positions_T[None])
    rope = tuple(part[0, :, :half].float().contiguous() for part in angles)
    for layer in base.layers:
        x_TD = layer(x_TD, packing=packing, rope=rope, dtype=dtype)
    return _norm(base.norm, x_TD, dtype)


def _forward(
    layer: Any,
    plain: Any,
    x_TD: Tensor,
    *args: Any,
    packing: Packing | None = None,
    rope: Any = None,
    dtype: Any = None,
    **kwargs: Any,
) -> Any:
    if packing is None:
        return plain(x_TD, *args, **kwargs)
    mixed_TD = _attention(layer.self_attn, _norm(layer.input_layernorm, x_TD, dtype), rope, packing)
    after = layer.post_attention_layernorm
    x_TD, normed_TD = add_norm(x_TD, mixed_TD, after.weight, after.variance_epsilon, dtype)
    mlp = layer.mlp
    gate, up = (part(normed_TD).to(dtype) for part in (mlp.gate_proj, mlp.up_proj))
    return x_TD + mlp.down_proj(gated(gate, up))


def _attention(module: Any, x_TD: Tensor, rope: Any, packing: Packing) -> Tensor:
    dtype = x_TD.dtype
    q, k, v = (part(x_TD).to(dtype) for part in (module.q_proj, module.k_proj, module.v_proj))
    if hasattr(module, "q_norm"):
        q, k = _norm_heads(module.q_norm, q), _norm_heads(module.k_norm, k)
    mixed = attend(q, k, v, rope, packing, size=module.head_dim, scale=module.scaling)
    return module.o_proj(mixed)  # type: ignore[no-any-return]


def _norm(module: Any, x_TD: Tensor, dtype: torch.dtype) -> Tensor:
    return norm(x_TD, module.weight, module.variance_epsilon, dtype)


def _norm_heads(module: Any, x_TE: Tensor) -> Tensor:
    heads = x_TE.float().view(-1, len(module.weight))
    return _norm(module, heads, x_TE.dtype).view_as(x_TE)
