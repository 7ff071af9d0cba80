"""The KV of a request, out of vLLM's blocks and into those of another engine.

A connector by vLLM's own interface: vLLM asks it how much of a request's KV comes from outside,
makes room, and tells it which blocks to fill. Those that come with vLLM 0.32 save the KV of prompts
or of requests that finish, or do not run on a CPU.

Blocks go over whole, as they are: how a block is laid out inside depends on the kernels, which on a
CPU depend on the processor. So both sides must have the same kernels: see `BlockLayout`.
"""

from typing import Any, NamedTuple

import torch
import vllm  # type: ignore[import-not-found]
from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # type: ignore[import-not-found]
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec  # type: ignore[import-not-found]

from dora_rl.engines.kv_room import blocks_for
from dora_rl.engines.moving import dtype_name

KEY = "dora_rl_kv"  # in a request's `kv_transfer_params`: the id of the request


class BlockKv(NamedTuple):
    """The KV of the first `tokens` of a sequence; the rest of the last block means nothing."""

    tokens: int
    blocks: Tensor  # [layer, block, ...], in host memory


class BlockLayout(NamedTuple):
    """What two engines must have in common to read each other's blocks."""

    kernels: str  # which know how a block is laid out inside
    layers: int
    block: tuple[int, ...]  # the shape of one in one layer
    block_tokens: int
    dtype: torch.dtype

    def shape(self, tokens: int) -> tuple[int, ...]:
        """Of the KV of so many tokens."""
        return (self.layers, blocks_for(tokens, self.block_tokens), *self.block)

    @property
    def kind(self) -> str:
        """In a word, for messages between engines."""
        dtype = dtype_name(self.dtype)
        return f"vLLM {vllm.__version__} {self.kernels} {self.layers}x{self.block} {dtype}"

    def nothing(self) -> BlockKv:
        """The KV of no token."""
        return BlockKv(0, torch.empty(self.shape(0), dtype=self.dtype))


class HandedKv(KVConnectorBase_V1):  # type: ignore[misc]
    """vLLM makes two of it: one beside its scheduler, and one beside its model, which does nothing.

    All engines of a process share the second, and it is gone when one of them ends. Scheduler and
    model are in one process here, so that the first fills the blocks, before the model runs.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._block_tokens: int = vllm_config.cache_config.block_size
        self._handed: dict[str, BlockKv] = {}

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    # Beside the scheduler

    def hand(self, request: str, kv: BlockKv) -> None:
        """It is taken when the request starts."""
        self._handed[request] = kv

    def forget(self, request: str) -> None:
        """It ended before it started."""
        self._handed.pop(request, None)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        kv = self._handed.get(_name(request))
        return (max(0, kv.tokens - num_computed_tokens) if kv else 0), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        kv = self._handed.pop(_name(request), None)
        if kv is None or not num_external_tokens:
            return
        # What vLLM had itself are whole blocks, which others may be reading.
        first = (kv.tokens - num_external_tokens) // self._block_tokens
        (block_ids,) = blocks.get_block_ids()
        into = torch.tensor(block_ids[first : kv.blocks.shape[1]])
        for module, layer_kv in zip(self._modules(), kv.blocks, strict=True):
            layer = module.kv_cache
            layer[into.to(layer.device)] = layer_kv[first:].to(layer.device)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    @property
    def layout(self) -> BlockLayout | None:
        """None where blocks alone do not say it all: layers of several kinds, or windows."""
        config = self._kv_cache_config
        specs = [type(group.kv_cache_spec) for group in config.kv_cache_groups]
        if specs != [FullAttentionSpec]:
            return None
        modules = self._modules()
        found = {
            BlockLayout(
                kernels=f"{type(module.impl).__name__} {getattr(module, 'isa', '')}".strip(),
                layers=len(modules),
                block=tuple(module.kv_cache.shape[1:]),
                block_tokens=self._block_tokens,
                dtype=module.kv_cache.dtype,
            )
            for module in modules
        }
        by_block = all(module.kv_cache.shape[0] == config.num_blocks for module in modules)
        return found.pop() if by_block and len(found) == 1 else None

    def copy(self, block_ids: list[int], tokens: int) -> BlockKv:
        """The first `tokens` of a sequence that has these blocks."""
        used = torch.tensor(block_ids[: blocks_for(tokens, self._block_tokens)])
        layers = [module.kv_cache for module in self._modules()]
        return BlockKv(
            tokens, torch.stack([layer[used.to(layer.device)].cpu() for layer in layers])
        )

    def _modules(self) -> list[Any]:
        """The attention of every layer, which has the layer's blocks."""
        (group,) = self._kv_cache_config.kv_cache_groups
        modules = self._vllm_config.compilation_config.static_forward_context
        return [modules[name] for name in group.layer_names]

    # Beside the model

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """All is loaded when the request has its blocks."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """As above."""

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is saved that nobody asked for: see `copy`."""

    def wait_for_save(self) -> None:
        """As above."""


def _name(request: Any) -> str:
    """The id that the caller gave it; vLLM makes another."""
    name: str = (request.kv_transfer_params or {}).get(KEY, "")
    return name
