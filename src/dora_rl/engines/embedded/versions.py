"""The versions that are in memory, and which rows of a batch go through whose weights.

full       every version has a decoder of its own; rows of small ones are stepped together
adapters   one base for all rows, and what the adapter of each version adds to its own

Where the native kernels are in force, either has their weights instead: a pass of those takes the
rows of all versions in one call.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch

from dora_rl.core.protocol.types import Version
from dora_rl.engines.embedded.exactness import check_exact
from dora_rl.engines.embedded.settings import EngineSettings
from dora_rl.engines.fit import check_adapter, check_base, check_tensors
from dora_rl.models.adapter_batches import AdapterSpan, AdapterStack, adapted, stack_adapters
from dora_rl.models.adapters import AdapterWeights, build_adapter
from dora_rl.models.config import ModelConfig
from dora_rl.models.decoder import Decoder, RowSpan, build
from dora_rl.models.linear import Layout, onednn_order
from dora_rl.models.linear import bf16_products as mapped_bf16_products
from dora_rl.models.native.passes import RowWeights
from dora_rl.models.native.weights import NativeAdapter, NativeDecoder
from dora_rl.models.stacking import stack, stacked_steps
from dora_rl.weights.huggingface import map_model
from dora_rl.weights.loading import LoadedWeights
from dora_rl.weights.tensors import weights_digest

Found = TypeVar("Found")

# A version up to this size is stepped together with the others: see docs/engine.md.
_STACKED_BYTES = 32 << 20
_KNOWN_ROWS = 64


class Versions(Protocol):
    """Weights by version; `load` adds one, `drop` forgets it."""

    @property
    def lora(self) -> bool: ...

    def check(self, directory: Path, weights: LoadedWeights) -> None:
        """Refuse what is no version of this engine's model."""

    def load(self, version: Version, weights: LoadedWeights) -> None:
        """From then on it is live. What fails for want of memory leaves the others as they are."""

    def drop(self, version: Version) -> None:
        """Unknown: does nothing."""

    def spans(self, rows: Sequence[tuple[Version, int]]) -> list[RowSpan]:
        """The weights of a batch whose rows, so many of each version, stand by version."""

    @property
    def stacked(self) -> tuple[list[Version], Decoder] | None:
        """All of them as one decoder, where a step is bound by the number of operations."""

    @property
    def native(self) -> bool:
        """Whether the weights are those of the native kernels: then `row_weights`, else `spans`."""

    def row_weights(self, rows: Sequence[tuple[Version, int]]) -> RowWeights:
        """What `spans` are to torch, for the native kernels."""


class FullVersions:
    """Every version a full set of weights."""

    lora = False

    def __init__(self, config: ModelConfig, settings: EngineSettings) -> None:
        self._config = config
        self._settings = settings
        self._decoders: dict[Version, Decoder] = {}
        self._natives: dict[Version, NativeDecoder] = {}
        self._row_weights = _Latest[RowWeights]()
        self._layout: Layout | None = None  # of all, by the size of the first
        self._tried = False  # whether products are exact here
        self._small = False  # so that a step is bound by the number of operations
        self.stacked: tuple[list[Version], Decoder] | None = None

    @property
    def native(self) -> bool:
        return self._layout is Layout.NATIVE

    def check(self, directory: Path, weights: LoadedWeights) -> None:
        check_adapter(self._config, None, directory, weights)
        check_tensors(self._config, directory, weights.tensors)

    def load(self, version: Version, weights: LoadedWeights) -> None:
        nbytes = sum(tensor.nbytes for tensor in weights.tensors.values())
        if self._layout is None:
            self._layout = self._settings.layout_for(nbytes, self._settings.version_slots)
        layout = self._layout
        if self.native:
            dots = self._settings.bf16_dots()
            self._natives[version] = NativeDecoder(self._config, weights.tensors, dots=dots)
            return
        try:
            bf16 = self._settings.bf16_products
            decoder = build_decoder(self._config, weights.tensors, layout, bf16_products=bf16)
            if self._settings.deterministic and not self._tried:  # the others have its shapes
                check_exact(decoder, self._settings.block_tokens)
                self._tried = True
            self._decoders[version] = decoder
            self._small = layout is Layout.PACKED and nbytes <= _STACKED_BYTES
            self._restack()
        except BaseException:
            self._decoders.pop(version, None)
            self.stacked = None  # it may hold what is gone; the others are stepped apart
            raise

    def drop(self, version: Version) -> None:
        self._row_weights.forget()  # they may hold what is gone
        self._natives.pop(version, None)
        if self._decoders.pop(version, None) is not None:
            self._restack()

    def spans(self, rows: Sequence[tuple[Version, int]]) -> list[RowSpan]:
        return [RowSpan(self._decoders[version], *place) for version, place in runs(rows)]

    def row_weights(self, rows: Sequence[tuple[Version, int]]) -> RowWeights:
        return self._row_weights.get(
            rows,
            lambda: RowWeights([(self._natives[v], *place) for v, place in runs(rows)]),
        )

    def _restack(self) -> None:
        self.stacked = None  # what it held may be gone, and its memory is needed
        if self._small and len(self._decoders) > 1 and stacked_steps().in_force:
            self.stacked = list(self._decoders), stack(list(self._decoders.values()))


class AdapterVersions:
    """Every version a LoRA adapter of one base, which is in memory from the start."""

    lora = True
    stacked = None

    def __init__(self, directory: Path, config: ModelConfig, settings: EngineSettings) -> None:
        files = map_model(directory)
        base = check_base(config, directory, files)
        self._digest = weights_digest(files)
        self._config = config
        self._layout = settings.layout_for(sum(tensor.nbytes for tensor in base.values()), 1)
        self.native = self._layout is Layout.NATIVE
        if self.native:
            self._native_base = NativeDecoder(config, base, dots=settings.bf16_dots())
        else:
            bf16 = settings.bf16_products
            self._base = build_decoder(config, base, self._layout, bf16_products=bf16)
        self._block_tokens = settings.block_tokens
        self._tried = not settings.deterministic
        self._adapters: dict[Version, AdapterWeights] = {}
        self._natives: dict[Version, NativeAdapter] = {}
        self._stack: AdapterStack | None = None
        self._spans = _Latest[list[RowSpan]]()
        self._row_weights = _Latest[RowWeights]()

    def check(self, directory: Path, weights: LoadedWeights) -> None:
        check_adapter(self._config, self._digest, directory, weights)

    def load(self, version: Version, weights: LoadedWeights) -> None:
        adapter = weights.manifest.adapter
        assert adapter is not None, "checked before"
        if self.native:
            self._natives[version] = NativeAdapter(self._config, adapter, weights.tensors)
            return
        built = build_adapter(self._config, adapter, weights.tensors, self._layout)
        if not self._tried:  # with numbers: the first version's B is zero
            noise = torch.Generator().manual_seed(0)
            drawn = {n: torch.randn(t.shape, generator=noise) for n, t in weights.tensors.items()}
            trial = build_adapter(self._config, adapter, drawn, self._layout)
            check_exact(_with(self._base, trial), self._block_tokens)
            self._tried = True
        self._adapters[version] = built
        try:
            self._restack()
        except BaseException:
            del self._adapters[version]
            raise

    def drop(self, version: Version) -> None:
        self._row_weights.forget()  # they may hold what is gone
        self._natives.pop(version, None)
        if self._adapters.pop(version, None) is not None:
            self._restack()

    def spans(self, rows: Sequence[tuple[Version, int]]) -> list[RowSpan]:
        def adapted_rows() -> list[RowSpan]:
            of = [AdapterSpan(self._adapters[version], *place) for version, place in runs(rows)]
            return [RowSpan(adapted(self._base, of, self._stack), 0, of[-1].stop)]

        return self._spans.get(rows, adapted_rows)

    def row_weights(self, rows: Sequence[tuple[Version, int]]) -> RowWeights:
        def adapted_rows() -> RowWeights:
            of = [(self._natives[version], *place) for version, place in runs(rows)]
            return RowWeights([(self._native_base, 0, of[-1][2])], of)

        return self._row_weights.get(rows, adapted_rows)

    def _restack(self) -> None:
        self._stack = None  # what they held may be gone, and its memory is needed
        self._spans.forget()
        if len(self._adapters) > 1 and stacked_steps().in_force:
            self._stack = stack_adapters(list(self._adapters.values()))


class _Latest(Generic[Found]):
    """What was found for the latest rows: most steps have the rows of one shortly before."""

    def __init__(self) -> None:
        self._last: tuple[list[tuple[Version, int]], Found] | None = None
        self._known: dict[tuple[tuple[Version, tuple[int, int]], ...], Found] = {}

    def get(self, rows: Sequence[tuple[Version, int]], find: Callable[[], Found]) -> Found:
        asked = list(rows)
        if self._last is None or self._last[0] != asked:
            key = tuple(runs(asked))
            if key not in self._known:
                if len(self._known) == _KNOWN_ROWS:
                    self._known.clear()
                self._known[key] = find()
            self._last = asked, self._known[key]
        return self._last[1]

    def forget(self) -> None:
        self._last = None
        self._known.clear()


def _with(base: Decoder, adapter: AdapterWeights) -> Decoder:
    """All rows of a batch, however many, have this adapter."""
    return adapted(base, [AdapterSpan(adapter, 0, 1 << 31)])


def build_decoder(
    config: ModelConfig,
    tensors: Mapping[str, torch.Tensor],
    layout: Layout,
    *,
    bf16_products: bool,
) -> Decoder:
    """Weights in the form that serves best here."""
    in_bf16 = any(tensor.dtype == torch.bfloat16 for tensor in tensors.values())
    narrow = 0  # rows up to which they are multiplied as they are
    if in_bf16 and bf16_products and layout is Layout.PACKED:
        narrow = onednn_order(config.hidden_size, 2 * config.intermediate_size).value
    elif in_bf16 and bf16_products and layout is Layout.MAPPED:
        narrow = mapped_bf16_products().value
    return build(config, tensors, layout, narrow_rows=narrow)


def runs(rows: Sequence[tuple[Version, int]]) -> list[tuple[Version, tuple[int, int]]]:
    """Where the rows of each version begin and end."""
    found, stop = [], 0
    for version, run in groupby(rows, key=itemgetter(0)):
        start, stop = stop, stop + sum(count for _, count in run)
        found.append((version, (start, stop)))
    return found
