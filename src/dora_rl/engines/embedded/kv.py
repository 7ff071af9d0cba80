"""The KV memory: blocks of keys and values of all layers, given out from both ends.

What one trajectory reads lies at the low end, the prompts that several share at the high end,
so that each is a contiguous run that attention reads without a copy. The pool knows blocks, not
who holds them.
"""

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor

from dora_rl.core.protocol.errors import SettingsError
from dora_rl.engines.kv_room import blocks_for
from dora_rl.models.config import ModelConfig


class KvPool:
    """`num_blocks` blocks of `block_tokens` tokens; its size is the budget."""

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_tokens: int, dtype: torch.dtype
    ) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        heads, width = config.num_kv_heads, config.head_dim
        shape = (config.num_layers, num_blocks, heads)
        # Keys lie transposed, as the product with the queries reads them. Zeros, since what is
        # masked is still multiplied; the system gives the pages only when they are written.
        try:
            self.keys_LNKDT = torch.zeros(*shape, width, block_tokens, dtype=dtype)
            self.values_LNKTD = torch.zeros(*shape, block_tokens, width, dtype=dtype)
        except RuntimeError:
            raise SettingsError(
                f"no memory for `{num_blocks * block_tokens}` tokens of KV. "
                "Lower rollout.kv_budget_tokens."
            ) from None
        self._free = set(range(num_blocks))
        self._lowest = list(range(num_blocks))
        self._highest = [-block for block in range(num_blocks)]
        heapq.heapify(self._highest)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used_tokens(self) -> int:
        return (self.num_blocks - self.free) * self.block_tokens

    def blocks_for(self, tokens: int) -> int:
        return blocks_for(tokens, self.block_tokens)

    def take_low(self) -> int:
        """The lowest free block, for one reader."""
        while (block := heapq.heappop(self._lowest)) not in self._free:
            pass
        self._free.remove(block)
        return block

    def take_high(self) -> int:
        """The highest free block, for many readers."""
        while (block := -heapq.heappop(self._highest)) not in self._free:
            pass
        self._free.remove(block)
        return block

    def give_back(self, blocks: Sequence[int]) -> None:
        """Free these blocks, wiped: what is masked is still multiplied, and 0 times NaN is NaN."""
        for block in blocks:
            if block in self._free:
                raise AssertionError(f"block {block} was given back twice")
            self.keys_LNKDT[:, block] = 0
            self.values_LNKTD[:, block] = 0
            self._free.add(block)
            heapq.heappush(self._lowest, block)
            heapq.heappush(self._highest, -block)
        if max(len(self._lowest), len(self._highest)) > 4 * self.num_blocks:
            self._lowest = sorted(self._free)
            self._highest = sorted(-block for block in self._free)

    def wipe(self, blocks: Sequence[int], start: int, stop: int) -> None:
        """Zeros for the tokens from `start` to `stop` in these blocks."""
        while start < stop:
            place, offset = divmod(start, self.block_tokens)
            end = min(self.block_tokens, offset + stop - start)
            self.keys_LNKDT[:, blocks[place], :, :, offset:end] = 0
            self.values_LNKTD[:, blocks[place], :, offset:end] = 0
            start += end - offset

    def read(self, blocks: Sequence[int], tokens: int) -> Tensor:
        """A copy of the first `tokens` tokens in these blocks: [layer, k or v, token, head, D]."""
        layers, _, heads, width, size = self.keys_LNKDT.shape
        out = self.keys_LNKDT.new_empty(layers, 2, tokens, heads, width)
        for place, block in enumerate(blocks[: self.blocks_for(tokens)]):
            start = place * size
            count = min(size, tokens - start)
            span = slice(start, start + count)
            out[:, 0, span] = self.keys_LNKDT[:, block, :, :, :count].permute(0, 3, 1, 2)
            out[:, 1, span] = self.values_LNKTD[:, block, :, :count].transpose(1, 2)
        return out

    def write(self, blocks: Sequence[int], kv_L2TKD: Tensor) -> None:
        """The opposite of `read`."""
        size, tokens = self.block_tokens, kv_L2TKD.shape[2]
        for place, block in enumerate(blocks[: self.blocks_for(tokens)]):
            start = place * size
            count = min(size, tokens - start)
            span = slice(start, start + count)
            self.keys_LNKDT[:, block, :, :, :count] = kv_L2TKD[:, 0, span].permute(0, 2, 3, 1)
            self.values_LNKTD[:, block, :, :count] = kv_L2TKD[:, 1, span].transpose(1, 2)

    def move(self, source: int, target: int) -> None:
        """Copy one block's content over another's."""
        self.keys_LNKDT[:, target] = self.keys_LNKDT[:, source]
        self.values_LNKTD[:, target] = self.values_LNKTD[:, source]
