"""Attention of single rows over blocks of cached keys and values, without copying a block.

Blocks are not gathered to their queries: queries go to the blocks. A region is a contiguous
run of blocks; every block is multiplied with the queries of the rows that read it, all blocks
in one batched product, and the partial results are then added up per row. The work is
proportional to the blocks in use, not to the longest sequence, and a prompt that several rows
share is read once for all of them.

Shapes: R rows, N blocks, M readers of a block, K key/value heads, G queries to each, D head
width, T tokens of a block.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_MASKED = -1e30  # finite: a block that nobody reads must not become NaN


class Reading(NamedTuple):
    """A row reads the first `tokens` tokens of a block."""

    row: int
    block: int
    tokens: int


class BlockAttention:
    """The blocks that the rows of one step read; made once a step, used by every layer.

    `reads` has the readings of one region each; a block is equally full for all its readers.
    """

    def __init__(
        self, reads: Sequence[Sequence[Reading]], rows: int, block_tokens: int, kv_heads: int
    ) -> None:
        self._kv_heads = kv_heads
        self._regions = [_Region(r, rows, block_tokens, kv_heads) for r in reads]
        self._entries_RJ = _entries_of_rows(self._regions, rows)

    def __call__(
        self, q_RHD: Tensor, keys_NKDT: Tensor, values_NKTD: Tensor, scale: float
    ) -> Tensor:
        """The attended values of every row, its heads side by side."""
        rows, heads, width = q_RHD.shape
        q_RKGD = q_RHD.reshape(rows, self._kv_heads, -1, width).to(keys_NKDT.dtype)
        scores = [region.scores(q_RKGD, keys_NKDT, scale) for region in self._regions]
        top_RH = self._tops(scores)
        out_RX: Tensor | None = None
        total_RH: Tensor | None = None
        for region, s in zip(self._regions, scores, strict=True):
            weights = s.sub_(region.per_block(top_RH)).exp_()
            out_RX = region.add_up(out_RX, region.times_values(weights, values_NKTD))
            total_RH = region.add_up(total_RH, region.per_entry(weights.sum(-1)))
        assert out_RX is not None and total_RH is not None
        return out_RX.view(rows, heads, width).div_(total_RH.unsqueeze(-1)).flatten(1)

    def _tops(self, scores: Sequence[Tensor]) -> Tensor:
        """The highest score of each row and head, over all blocks that the row reads."""
        pairs = zip(self._regions, scores, strict=True)
        tops = [region.per_entry(s.amax(-1)) for region, s in pairs]
        nothing = tops[0].new_full((1, tops[0].shape[1]), _MASKED)
        return torch.cat((*tops, nothing))[self._entries_RJ].amax(1)


class _Region:
    """A contiguous run of blocks with the rows that read them.

    The products of a block are [K, M*G, …] for M readers; an entry is one (block, reader).
    """

    def __init__(
        self, reads: Sequence[Reading], rows: int, block_tokens: int, kv_heads: int
    ) -> None:
        self._start = min(read.block for read in reads)
        self._stop = max(read.block for read in reads) + 1
        self._blocks = self._stop - self._start
        self._kv_heads = kv_heads
        readers = [0] * self._blocks
        full = [0] * self._blocks
        places = []
        for row, block, tokens in reads:
            index = block - self._start
            places.append((row, index, readers[index]))
            readers[index] += 1
            full[index] = tokens
        self._readers = max(readers)
        self.entries = self._blocks * self._readers
        self.row_and_entry = [(row, i * self._readers + place) for row, i, place in places]
        reader = [0] * self.entries
        for row, entry in self.row_and_entry:
            reader[entry] = row
        self._reader_E = torch.tensor(reader)
        self._sum_RE = torch.zeros(rows, self.entries)
        self._sum_RE[tuple(torch.tensor(self.row_and_entry).T)] = 1.0
        empty_NT = torch.arange(block_tokens) >= torch.tensor(full).unsqueeze(1)
        mask_NT = torch.zeros(empty_NT.shape).masked_fill_(empty_NT, _MASKED)
        # Once for each of a block's heads, as the batched product wants it.
        self._mask = mask_NT.repeat_interleave(kv_heads, 0).unsqueeze(1)

    def scores(self, q_RKGD: Tensor, keys_NKDT: Tensor, scale: float) -> Tensor:
        keys = keys_NKDT[self._start : self._stop].flatten(0, 1)
        q = self._to_blocks(q_RKGD)
        if keys.dtype == torch.float32:
            return torch.baddbmm(self._mask, q, keys, alpha=scale)
        return torch.bmm(q, keys).float().mul_(scale).add_(self._mask)

    def times_values(self, weights: Tensor, values_NKTD: Tensor) -> Tensor:
        values = values_NKTD[self._start : self._stop].flatten(0, 1)
        return self.per_entry(torch.bmm(weights.to(values.dtype), values).float())

    def add_up(self, total: Tensor | None, entries_EX: Tensor) -> Tensor:
        """Sum of the entries of each row."""
        if total is None:
            return torch.mm(self._sum_RE, entries_EX)
        return total.addmm_(self._sum_RE, entries_EX)

    def per_block(self, x_RH: Tensor) -> Tensor:
        """A number of each row and head, where the block's product has that row and head."""
        return self._to_blocks(x_RH.view(x_RH.shape[0], self._kv_heads, -1, 1))

    def per_entry(self, x: Tensor) -> Tensor:
        """From the products of blocks to a row of numbers for each entry."""
        if self._readers > 1:
            x = x.view(self._blocks, self._kv_heads, self._readers, -1).transpose(1, 2)
        return x.reshape(self.entries, -1)

    def _to_blocks(self, x_RKGY: Tensor) -> Tensor:
        x = x_RKGY[self._reader_E]
        if self._readers > 1:
            x = x.view(self._blocks, self._readers, *x.shape[1:]).transpose(1, 2)
        return x.reshape(self._blocks * self._kv_heads, -1, x_RKGY.shape[-1])


def _entries_of_rows(regions: Sequence[_Region], rows: int) -> Tensor:
    """For each row the entries that it sums up, filled up with the one past the last."""
    entries: list[list[int]] = [[] for _ in range(rows)]
    offset = 0
    for region in regions:
        for row, entry in region.row_and_entry:
            entries[row].append(offset + entry)
        offset += region.entries
    longest = max(map(len, entries))
    return torch.tensor([row + [offset] * (longest - len(row)) for row in entries])


class ExactAttention:
    """The same in an order of additions that depends on nothing but the row itself.

    `reads_R` has the readings of each row, in the order of the tokens. Every
    (row, block) is a product of its own, and each row's partial results are added up one after
    another: slower, and bit for bit the same whatever the other rows are.
    """

    def __init__(self, reads_R: Sequence[Sequence[Reading]], block_tokens: int) -> None:
        self._tokens = torch.arange(block_tokens)
        self._rounds = []
        for place in range(max(map(len, reads_R))):
            reads = [reads[place] for reads in reads_R if place < len(reads)]
            self._rounds.append(torch.tensor(reads).unbind(1))

    def __call__(
        self, q_RHD: Tensor, keys_NKDT: Tensor, values_NKTD: Tensor, scale: float
    ) -> Tensor:
        rows, heads, width = q_RHD.shape
        kv_heads = keys_NKDT.shape[1]
        q = (q_RHD * scale).reshape(rows, kv_heads, heads // kv_heads, width)
        top = q.new_full((*q.shape[:3], 1), _MASKED)
        total = torch.zeros_like(top)
        out = torch.zeros_like(q)
        for row, block, fill in self._rounds:
            scores = _one_by_one(q[row], keys_NKDT[block].float())
            empty = self._tokens >= fill[:, None, None, None]
            scores.masked_fill_(empty, _MASKED)
            higher = torch.maximum(top[row], scores.amax(-1, keepdim=True))
            fade = (top[row] - higher).exp_()
            weights = (scores - higher).exp_()
            top[row] = higher
            total[row] = total[row] * fade + weights.sum(-1, keepdim=True)
            out[row] = out[row] * fade + _one_by_one(weights, values_NKTD[block].float())
        return (out / total).view(rows, heads * width)


def _one_by_one(a_RKGX: Tensor, b_RKXY: Tensor) -> Tensor:
    """Products of each row by itself, as sums along X that no batch can reorder."""
    return torch.matmul(a_RKGX, b_RKXY)


def causal(q_CHD: Tensor, keys_KDT: Tensor, values_KTD: Tensor, first: int, scale: float) -> Tensor:
    """Consecutive rows of one sequence, the first at position `first`, over all before them."""
    rows, heads, width = q_CHD.shape
    kv_heads, _, tokens = keys_KDT.shape
    q = q_CHD.view(rows, kv_heads, -1, width).permute(1, 2, 0, 3).reshape(kv_heads, -1, width)
    scores = torch.bmm(q.mul_(scale), keys_KDT).view(kv_heads, -1, rows, tokens)
    later = torch.arange(tokens) > torch.arange(first, first + rows).unsqueeze(1)
    weights = scores.masked_fill_(later, _MASKED).softmax(-1)
    out = torch.bmm(weights.view(kv_heads, -1, tokens), values_KTD)
    return out.view(kv_heads, -1, rows, width).permute(2, 0, 1, 3).reshape(rows, heads * width)
