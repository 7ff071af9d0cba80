"""The decoder of Llama, Qwen2 and Qwen3: one forward pass over rows of several versions.

A row is one token of one sequence. Rows of the same version stand together, and only the
matrix products look at the version; attention, handed in by the caller, takes all rows at
once. The decoder knows nothing of sequences, caches or sampling.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from dora_rl.models.config import ModelConfig
from dora_rl.models.linear import Layout, Linear, make_linear

# (layer, q_RHD, k_RKD, v_RKD) -> attended_R(H*D); it also writes k and v into the cache.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Layer:
    """One block's weights, norms in fp32."""

    attention_norm: Tensor
    qkv: Linear
    qk_norm: Tensor | None  # [q heads + k heads, head_dim]
    out: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Decoder:
    """One version's weights, in the form that the matrix products want."""

    config: ModelConfig
    embedding: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Linear
    gated: Callable[[Tensor, Tensor], Tensor]  # gate, up -> silu(gate) * up
    versions: int = 1  # of which the rows stand in equal blocks: see `stacking`


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Rows `start` to `stop` of a batch, which go through this decoder."""

    decoder: Decoder
    start: int
    stop: int


def build(
    config: ModelConfig, tensors: Mapping[str, Tensor], layout: Layout, *, narrow_rows: int = 0
) -> Decoder:
    """A decoder of checked tensors, by their Hugging Face names."""

    def linear(biased: bool, *names: str) -> Linear:
        weights = [tensors[f"{name}.weight"] for name in names]
        biases = [tensors[f"{name}.bias"] for name in names] if biased else None
        return make_linear(layout, weights, biases, narrow_rows=narrow_rows)

    def head_norms(attention: str) -> Tensor:
        q, k = (tensors[f"{attention}.{name}_norm.weight"].float() for name in "qk")
        return torch.cat((q.expand(config.num_heads, -1), k.expand(config.num_kv_heads, -1)))

    def layer(i: int) -> Layer:
        p = f"model.layers.{i}"
        a, m = f"{p}.self_attn", f"{p}.mlp"
        return Layer(
            attention_norm=tensors[f"{p}.input_layernorm.weight"].float(),
            qkv=linear(config.qkv_bias, f"{a}.q_proj", f"{a}.k_proj", f"{a}.v_proj"),
            qk_norm=head_norms(a) if config.qk_norm else None,
            out=linear(config.out_bias, f"{a}.o_proj"),
            mlp_norm=tensors[f"{p}.post_attention_layernorm.weight"].float(),
            gate_up=linear(config.mlp_bias, f"{m}.gate_proj", f"{m}.up_proj"),
            down=linear(config.mlp_bias, f"{m}.down_proj"),
        )

    return Decoder(
        config=config,
        embedding=tensors["model.embed_tokens.weight"],
        layers=tuple(layer(i) for i in range(config.num_layers)),
        norm=tensors["model.norm.weight"].float(),
        head=linear(False, "model.embed_tokens" if config.tied else "lm_head"),
        gated=_gated_exactly if layout is Layout.TILED else _gated,
    )


def forward(
    spans: Sequence[RowSpan], tokens_R: Tensor, cos_RD: Tensor, sin_RD: Tensor, attend: Attend
) -> Tensor:
    """The last hidden states. `cos_RD` and `sin_RD` come from `rotary_of`."""
    config = spans[0].decoder.config
    turned = config.num_heads + config.num_kv_heads
    cos, sin = cos_RD.unsqueeze(1), sin_RD.unsqueeze(1)
    x = _per_span(spans, tokens_R, _embed)
    for index in range(config.num_layers):
        heads = _per_span(spans, x, partial(_project, index))
        qk = _rotate(heads[:, :turned], cos, sin)
        q, k, v = qk[:, : config.num_heads], qk[:, config.num_heads :], heads[:, turned:]
        attended = attend(index, q, k, v)
        for span in spans:
            rows = slice(span.start, span.stop)
            _add_layer(span.decoder, index, x[rows], attended[rows])
    return x


def logits(spans: Sequence[RowSpan], x_RH: Tensor) -> Tensor:
    """Logits in fp32 of the rows' hidden states."""
    return _per_span(spans, x_RH, lambda decoder, x: decoder.head(_norm(decoder, x, decoder.norm)))


def rotary_of(cos_RE: Tensor, sin_RE: Tensor) -> tuple[Tensor, Tensor]:
    """Half-width cosines and sines as `forward` wants them: full width, the sign included."""
    return torch.cat((cos_RE, cos_RE), -1), torch.cat((-sin_RE, sin_RE), -1)


def _per_span(
    spans: Sequence[RowSpan], x: Tensor, function: Callable[[Decoder, Tensor], Tensor]
) -> Tensor:
    """Each span's rows through the function with the span's own weights."""
    if len(spans) == 1:
        return function(spans[0].decoder, x)
    return torch.cat([function(span.decoder, x[span.start : span.stop]) for span in spans])


def _norm(decoder: Decoder, x_RH: Tensor, weight: Tensor) -> Tensor:
    if decoder.versions == 1:
        return F.rms_norm(x_RH, weight.shape, weight, decoder.config.norm_eps)
    normed = F.rms_norm(x_RH, x_RH.shape[-1:], None, decoder.config.norm_eps)
    return normed.view(decoder.versions, -1, x_RH.shape[-1]).mul_(weight).flatten(0, 1)


def _embed(decoder: Decoder, tokens_R: Tensor) -> Tensor:
    if decoder.versions > 1:
        first_V = torch.arange(decoder.versions) * decoder.config.vocab_size
        tokens_R = (tokens_R.view(decoder.versions, -1) + first_V.unsqueeze(1)).flatten()
    return F.embedding(tokens_R, decoder.embedding).float()


def _project(index: int, decoder: Decoder, x_RH: Tensor) -> Tensor:
    """Heads of q, k and v, side by side; q and k normed where the family does that."""
    config, layer = decoder.config, decoder.layers[index]
    heads = layer.qkv(_norm(decoder, x_RH, layer.attention_norm)).view(
        x_RH.shape[0], -1, config.head_dim
    )
    if layer.qk_norm is not None:
        qk = heads[:, : config.num_heads + config.num_kv_heads]
        normed = F.rms_norm(qk, (config.head_dim,), None, config.norm_eps)
        by_version = normed.view(decoder.versions, -1, *normed.shape[1:])
        qk.copy_((by_version * layer.qk_norm).flatten(0, 1))
    return heads


def _rotate(x_RHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rows, heads, width = x_RHD.shape
    swapped = x_RHD.view(rows, heads, 2, width // 2).flip(2).view(rows, heads, width)
    return (x_RHD * cos).addcmul_(swapped, sin)


def _add_layer(decoder: Decoder, index: int, x_RH: Tensor, attended: Tensor) -> None:
    """What follows attention, added to `x_RH` in place."""
    layer = decoder.layers[index]
    x_RH += layer.out(attended)
    gate, up = layer.gate_up(_norm(decoder, x_RH, layer.mlp_norm)).chunk(2, -1)
    x_RH += layer.down(decoder.gated(gate, up))


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate).mul_(up)


def _gated_exactly(gate: Tensor, up: Tensor) -> Tensor:
    """The same bits wherever a number stands among others, which `F.silu` does not give.

    It takes the last few of a stretch by other instructions, and each thread has its own stretch.
    """
    return gate.neg().exp_().add_(1).reciprocal_().mul_(gate).mul_(up)
