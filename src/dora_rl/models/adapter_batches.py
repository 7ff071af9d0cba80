"""Rows of several LoRA adapters in one batch: they go through the base together.

Only what an adapter adds to a product looks at the version of a row: two thin products more, for
each run of rows of the same version. Where versions have about as many rows, and few, those of
all versions are two batched products: so thin a product takes less time than its call.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dora_rl.models.adapters import AdapterWeights, Delta, Plain
from dora_rl.models.decoder import Decoder, Layer
from dora_rl.models.linear import Linear

_FEW_ROWS = 64  # of a version, up to which the versions are multiplied together
_MOST_ROWS = 1.5  # with those that fill up the shorter versions, over the real ones


@dataclass(frozen=True, slots=True)
class AdapterSpan:
    """Rows `start` to `stop` of a batch, which have this adapter."""

    weights: AdapterWeights
    start: int
    stop: int


class Adapted:
    """A product of the base for all rows, and what each row's own adapter adds."""

    def __init__(self, base: Linear, deltas: Sequence[tuple[slice, Delta]]) -> None:
        self._base = base
        self._deltas = deltas

    def __call__(self, x_RI: Tensor) -> Tensor:
        out_RO = self._base(x_RI)
        for rows, delta in self._deltas:
            delta.add_to(out_RO[rows], x_RI[rows])
        return out_RO


class _Together:
    """What those of several versions add, each to its own block of rows."""

    def __init__(self, deltas: Sequence[Plain]) -> None:
        self._down_VIA = torch.stack([delta.down_IA for delta in deltas])
        self._ups = [
            (columns, rank, torch.stack([delta.ups[place][2] for delta in deltas]))
            for place, (columns, rank, _) in enumerate(deltas[0].ups)
        ]
        for version, delta in enumerate(deltas):  # one copy in memory
            delta.down_IA = self._down_VIA[version]
            delta.ups = [(columns, rank, up_VAO[version]) for columns, rank, up_VAO in self._ups]

    def add_to(self, out_RO: Tensor, x_RI: Tensor, blocks: "_Blocks") -> None:
        h_VMA = torch.bmm(blocks.spread(x_RI), self._down_VIA)
        for columns, rank, up_VAO in self._ups:
            out_RO[:, columns] += blocks.gather(torch.bmm(h_VMA[..., rank], up_VAO))


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Rows in equal blocks, one a version: where each row stands, if some places are empty."""

    versions: int
    height: int
    at_R: Tensor | None

    def spread(self, x_RI: Tensor) -> Tensor:
        if self.at_R is not None:
            filled = x_RI.new_zeros(self.versions * self.height, x_RI.shape[1])
            x_RI = filled.index_copy_(0, self.at_R, x_RI)
        return x_RI.view(self.versions, self.height, -1)

    def gather(self, x_VMO: Tensor) -> Tensor:
        x_RO = x_VMO.flatten(0, 1)
        return x_RO if self.at_R is None else x_RO.index_select(0, self.at_R)


class AdapterStack:
    """Several versions whose adapters have the same shapes, as one batched product of each."""

    def __init__(self, versions: Sequence[AdapterWeights]) -> None:
        self._versions = list(versions)
        self.layers = [
            {name: _Together([_plain(one[name]) for one in layers]) for name in layers[0]}
            for layers in zip(*(one.layers for one in versions), strict=True)
        ]

    def blocks(self, spans: Sequence[AdapterSpan]) -> _Blocks | None:
        """Where the rows stand; None where one version after the other takes less."""
        rows, height = spans[-1].stop, max(span.stop - span.start for span in spans)
        places = len(self._versions) * height
        if len(spans) == 1 or height > _FEW_ROWS or places > _MOST_ROWS * rows:
            return None
        first = [self._versions.index(span.weights) * height - span.start for span in spans]
        at = [first[i] + row for i, s in enumerate(spans) for row in range(s.start, s.stop)]
        in_order = at == list(range(places))
        return _Blocks(len(self._versions), height, None if in_order else torch.tensor(at))


def stack_adapters(versions: Sequence[AdapterWeights]) -> AdapterStack | None:
    """None where they cannot be multiplied together: exact ones, or of several shapes."""
    shapes = [_shapes(one) for one in versions]
    alike = shapes[0] is not None and all(shape == shapes[0] for shape in shapes)
    return AdapterStack(versions) if alike else None


def _shapes(weights: AdapterWeights) -> object:
    """Of all its matrices; None of those that are exact."""
    shapes = []
    for name, delta in (item for layer in weights.layers for item in layer.items()):
        if not isinstance(delta, Plain):
            return None
        ups = [(columns, rank, up_AO.shape) for columns, rank, up_AO in delta.ups]
        shapes.append((name, delta.down_IA.shape, ups))
    return shapes


def _plain(delta: Delta) -> Plain:
    assert isinstance(delta, Plain)
    return delta


class AdaptedTogether:
    """A product of the base for all rows, and what the adapters of all versions add."""

    def __init__(self, base: Linear, together: _Together, blocks: _Blocks) -> None:
        self._base = base
        self._together = together
        self._blocks = blocks

    def __call__(self, x_RI: Tensor) -> Tensor:
        out_RO = self._base(x_RI)
        self._together.add_to(out_RO, x_RI, self._blocks)
        return out_RO


def adapted(
    base: Decoder, spans: Sequence[AdapterSpan], stack: AdapterStack | None = None
) -> Decoder:
    """The base for a batch whose rows have these adapters; `stack` has those of all versions."""
    blocks = None if stack is None else stack.blocks(spans)

    def product(index: int, name: str, linear: Linear) -> Linear:
        if stack is not None and blocks is not None:
            together = stack.layers[index].get(name)
            return linear if together is None else AdaptedTogether(linear, together, blocks)
        found = [
            (slice(span.start, span.stop), delta)
            for span in spans
            if (delta := span.weights.layers[index].get(name)) is not None
        ]
        return Adapted(linear, found) if found else linear

    def layer(index: int, of_base: Layer) -> Layer:
        return replace(
            of_base,
            qkv=product(index, "qkv", of_base.qkv),
            out=product(index, "out", of_base.out),
            gate_up=product(index, "gate_up", of_base.gate_up),
            down=product(index, "down", of_base.down),
        )

    return replace(base, layers=tuple(layer(i, one) for i, one in enumerate(base.layers)))
