"""Several versions as one decoder: each weight of all of them in one tensor.

Where a model is so small that a step is bound by the number of operations and not by their
arithmetic, the rows of several versions go through one batched product instead of one product
a version. The price is a second copy of the weights, and rows that fill up the shorter versions.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dora_rl.machine.fast_paths import Unavailable, fast_path
from dora_rl.models.decoder import Decoder, Layer
from dora_rl.models.linear import Linear, Packed, best_time

_TRIAL_SHAPE = (4, 16, 128)  # versions, rows of each, and both sides of a square weight
_TRIAL_PRODUCTS = 28  # of one step: four of each of seven layers


class Stacked:
    """Row block v of the input times the weights of version v."""

    def __init__(self, linears: Sequence[Linear]) -> None:
        packed = [linear for linear in linears if isinstance(linear, Packed)]
        assert len(packed) == len(linears), "only packed weights can be stacked"
        self._weight_VIO = torch.stack([linear.wide_IO for linear in packed])
        biases = [linear.bias_O for linear in packed if linear.bias_O is not None]
        self._bias_V1O = torch.stack(biases).unsqueeze(1) if biases else None

    def __call__(self, x_RI: Tensor) -> Tensor:
        versions = self._weight_VIO.shape[0]
        x_VMI = x_RI.view(versions, -1, x_RI.shape[-1])
        if self._bias_V1O is None:
            return torch.bmm(x_VMI, self._weight_VIO).flatten(0, 1)
        return torch.baddbmm(self._bias_V1O, x_VMI, self._weight_VIO).flatten(0, 1)


@fast_path("stacked-steps")
def stacked_steps() -> tuple[str, int]:
    """Whether one batched product of several small versions beats one product of each."""
    versions, rows, size = _TRIAL_SHAPE
    x_VMI, weight_VIO = torch.ones(versions, rows, size), torch.ones(versions, size, size)

    def one_by_one() -> Tensor:
        return torch.cat([torch.mm(x_VMI[v], weight_VIO[v]) for v in range(versions)])

    apart = best_time([one_by_one] * _TRIAL_PRODUCTS)
    together = best_time([lambda: torch.bmm(x_VMI, weight_VIO)] * _TRIAL_PRODUCTS)
    found = f"{apart / together:.1f} x as fast as one after the other, {versions} versions"
    if together > apart:
        raise Unavailable(found)
    return found, 0


def stack(decoders: Sequence[Decoder]) -> Decoder:
    """One decoder for rows that stand in equal blocks, one for each of these decoders."""

    def layer(*layers: Layer) -> Layer:
        norms = [one.qk_norm for one in layers if one.qk_norm is not None]
        return Layer(
            attention_norm=_by_version([one.attention_norm for one in layers]),
            qkv=Stacked([one.qkv for one in layers]),
            qk_norm=_by_version(norms) if norms else None,
            out=Stacked([one.out for one in layers]),
            mlp_norm=_by_version([one.mlp_norm for one in layers]),
            gate_up=Stacked([one.gate_up for one in layers]),
            down=Stacked([one.down for one in layers]),
        )

    return Decoder(
        config=decoders[0].config,
        embedding=torch.cat([decoder.embedding for decoder in decoders]),
        layers=tuple(map(layer, *(decoder.layers for decoder in decoders))),
        norm=_by_version([decoder.norm for decoder in decoders]),
        head=Stacked([decoder.head for decoder in decoders]),
        gated=decoders[0].gated,
        versions=len(decoders),
    )


def _by_version(weights: Sequence[Tensor]) -> Tensor:
    """[V, 1, …], to be multiplied with a version's block of rows."""
    return torch.stack(list(weights)).unsqueeze(1)
