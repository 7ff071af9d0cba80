"""A version's weights, or an adapter's, as the kernels want them: one packed copy of each."""

from collections.abc import Mapping, Sequence
from ctypes import POINTER, cast

import torch
from torch import Tensor

from dora_rl.models.config import ModelConfig
from dora_rl.models.native.products import pack, stored_as
from dora_rl.models.native.structures import Delta, Layer, Matrix, Product, Weights, array_of
from dora_rl.weights.adapter import Adapter, tensor_names

# The modules of each product; those of one stand side by side.
_MODULES = {
    Product.QKV: ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    Product.OUT: ("self_attn.o_proj",),
    Product.GATE: ("mlp.gate_proj",),
    Product.UP: ("mlp.up_proj",),
    Product.DOWN: ("mlp.down_proj",),
}


class _Packing:
    """Makes matrices, and keeps the memory that they point to."""

    def __init__(self, *, dots: bool) -> None:
        self._tensors: list[Tensor] = []
        self._dots = dots

    def keep(self, tensor: Tensor) -> int:
        """Where it lies, for as long as this object lives."""
        self._tensors.append(tensor)
        return tensor.data_ptr()

    def matrix(self, weights_OI: Sequence[Tensor], biases_O: Sequence[Tensor] = ()) -> Matrix:
        """Weights of one or more modules, side by side along their outputs."""
        joined_OI = weights_OI[0] if len(weights_OI) == 1 else torch.cat(list(weights_OI))
        outputs, inputs = joined_OI.shape
        bias = self.keep(torch.cat(list(biases_O)).float()) if biases_O else None
        stored = stored_as(joined_OI.dtype, dots=self._dots)
        return Matrix(self.keep(pack(joined_OI)), bias, inputs, outputs, stored)


class NativeDecoder:
    """One version's weights; `struct` is valid for as long as this object lives.

    With `dots`, those in bf16 are multiplied by the processor's instructions for bf16.
    """

    def __init__(
        self, config: ModelConfig, tensors: Mapping[str, Tensor], *, dots: bool = False
    ) -> None:
        self.dots = dots
        self._packing = packing = _Packing(dots=dots)
        biased = {
            Product.QKV: config.qkv_bias,
            Product.OUT: config.out_bias,
            **dict.fromkeys((Product.GATE, Product.UP, Product.DOWN), config.mlp_bias),
        }

        def norm(name: str) -> int:
            return packing.keep(tensors[f"{name}.weight"].float().contiguous())

        def head_norms(layer: str) -> int | None:
            if not config.qk_norm:
                return None
            q, k = (tensors[f"{layer}.self_attn.{name}_norm.weight"].float() for name in "qk")
            heads = (q.expand(config.num_heads, -1), k.expand(config.num_kv_heads, -1))
            return packing.keep(torch.cat(heads))

        def product(layer: str, which: Product) -> Matrix:
            names = [f"{layer}.{module}" for module in _MODULES[which]]
            biases = [tensors[f"{name}.bias"] for name in names] if biased[which] else []
            return packing.matrix([tensors[f"{name}.weight"] for name in names], biases)

        def layer(index: int) -> Layer:
            name = f"model.layers.{index}"
            return Layer(
                norm(f"{name}.input_layernorm"),
                head_norms(name),
                norm(f"{name}.post_attention_layernorm"),
                (Matrix * len(Product))(*(product(name, which) for which in Product)),
            )

        embedding = tensors["model.embed_tokens.weight"].contiguous()
        head = embedding if config.tied else tensors["lm_head.weight"]
        self._layers = array_of(Layer, [layer(index) for index in range(config.num_layers)])
        self.struct = Weights(
            packing.keep(embedding),
            int(embedding.dtype == torch.bfloat16),
            cast(self._layers, POINTER(Layer)),
            norm("model.norm"),
            packing.matrix([head]),
        )


class NativeAdapter:
    """What one LoRA adapter adds to the products of each layer, in fp32."""

    def __init__(
        self, config: ModelConfig, adapter: Adapter, tensors: Mapping[str, Tensor]
    ) -> None:
        self._packing = packing = _Packing(dots=False)
        self.rank = 0  # outputs of its widest lower half
        linears = config.linears()

        def delta(layer: int, which: Product) -> Delta:
            names = [f"model.layers.{layer}.{module}" for module in _MODULES[which]]
            lowers, uppers = [], []
            for name in names:
                lower, upper = tensor_names(name)
                if lower in tensors:
                    lowers.append(tensors[lower].float())
                    uppers.append(tensors[upper].float() * adapter.scale)
                else:  # nothing of rank 0
                    outputs, inputs = linears[name]
                    lowers.append(torch.zeros(0, inputs))
                    uppers.append(torch.zeros(outputs, 0))
            rank = sum(map(len, lowers))
            if not rank:
                return Delta()
            self.rank = max(self.rank, rank)
            joined: Tensor = torch.block_diag(*uppers)  # type: ignore[no-untyped-call]
            return Delta(packing.matrix(lowers), packing.matrix([joined]))

        every = [(layer, which) for layer in range(config.num_layers) for which in Product]
        self.deltas = array_of(Delta, [delta(layer, which) for layer, which in every])
