"""Attention of single rows over blocks of cached keys and values, without copying a block.

Blocks are not gathered to their queries: queries go to the blocks. A region is a contiguous
run of blocks; every block is multiplied with the queries of the rows that read it, all blocks
in one batched product, and the partial results are then added up per row. The work is
proportional to the blocks in use, not to the longest sequence, and a prompt that several rows
share is read once for all of them.

Shapes: R rows, N blocks, M readers of a block, K key/value heads, G queries to each, D head
width, T tokens of a block.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dora_rl.machine.fast_paths import Unavailable, fast_path
from dora_rl.models.linear import LINE, best_time, filled_up

_MASKED = -1e30  # finite: a block that nobody reads must not become NaN
# exp is up to a hundred times slower where its result is denormal or zero. Beside a weight of 1,
# which every row has, this one vanishes in fp32.
_LOWEST = -80.0
_ROOM = 64  # blocks that are worth no thought
_TRIAL_SHAPE = (96, 3, 64, 64)  # blocks x heads, queries, width, tokens: 32 rows of SmolLM2


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
        entries_RJ = _entries_of_rows(self._regions, rows)
        longest = max(map(len, entries_RJ))
        used = sum(map(len, entries_RJ))
        # Side by side, every row takes as much room as the longest: fewer steps, more numbers.
        self._side_by_side = rows * longest <= 2 * used + _ROOM
        self._padded = rows * longest > used
        nothing = sum(region.entries for region in self._regions)
        self._entries_RJ = torch.tensor(
            [row + [nothing] * (longest - len(row)) for row in entries_RJ]
        )
        place_of = {
            entry: row * longest + j
            for row, own in enumerate(entries_RJ)
            for j, entry in enumerate(own)
        }
        offset = 0
        for region in self._regions:
            region.find_places(place_of, offset)
            offset += region.entries

    def __call__(
        self, q_RHD: Tensor, keys_NKDT: Tensor, values_NKTD: Tensor, scale: float
    ) -> Tensor:
        """The attended values of every row, its heads side by side."""
        rows, heads, width = q_RHD.shape
        q_RKGD = q_RHD.reshape(rows, self._kv_heads, -1, width)
        scores = [region.scores(q_RKGD, keys_NKDT, scale) for region in self._regions]
        if self._side_by_side:
            return self._add_up(self._softmax(scores, heads), values_NKTD)
        weights = self._exponentials(scores)
        total_RH = self._sum_of(r.per_entry(w.sum(-1)) for r, w in self._with_region(weights))
        out_RX = self._add_up(weights, values_NKTD)
        return out_RX.view(rows, heads, width).div_(total_RH.unsqueeze(-1)).flatten(1)

    def _softmax(self, scores: Sequence[Tensor], heads: int) -> list[Tensor]:
        """The scores of each row side by side, in one softmax, and back to where they were."""
        rows, blocks = self._entries_RJ.shape
        all_EX = self._all_entries(scores, with_nothing=self._padded)
        by_row = all_EX.index_select(0, self._entries_RJ.view(-1)).view(rows, blocks, heads, -1)
        weights = by_row.transpose(1, 2).flatten(2).softmax(-1)
        by_block = weights.view(rows, heads, blocks, -1).transpose(1, 2)
        return [region.from_rows(by_block.flatten(0, 1)) for region in self._regions]

    def _exponentials(self, scores: Sequence[Tensor]) -> list[Tensor]:
        """The same but for the division, where rows are too uneven to stand side by side."""
        tops_EH = self._all_entries([s.amax(-1) for s in scores], with_nothing=True)
        top_RH = tops_EH[self._entries_RJ].amax(1)
        return [
            s.sub_(region.per_block(top_RH)).clamp_(min=_LOWEST).exp_()
            for region, s in self._with_region(scores)
        ]

    def _add_up(self, weights: Sequence[Tensor], values_NKTD: Tensor) -> Tensor:
        return self._sum_of(
            region.times_values(w, values_NKTD) for region, w in self._with_region(weights)
        )

    def _sum_of(self, entries: Iterable[Tensor]) -> Tensor:
        """Sum of the entries of each row, over all regions."""
        first, *rest = (torch.mm(r.sum_RE, e) for r, e in zip(self._regions, entries, strict=True))
        for more in rest:
            first += more
        return first

    def _all_entries(self, products: Sequence[Tensor], *, with_nothing: bool) -> Tensor:
        """The entries of all regions, and maybe one more that never wins."""
        parts = [region.per_entry(x) for region, x in self._with_region(products)]
        if with_nothing:
            parts.append(parts[0].new_full((1, parts[0].shape[1]), _MASKED))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _with_region(self, products: Sequence[Tensor]) -> Iterable[tuple["_Region", Tensor]]:
        return zip(self._regions, products, strict=True)


@fast_path("bf16-kv")
def bf16_kv() -> tuple[str, int]:
    """Whether blocks in bf16 are multiplied faster as they are than converted before."""
    entries, queries, width, tokens = _TRIAL_SHAPE
    q, keys = torch.ones(entries, queries, width), torch.ones(entries, width, tokens).bfloat16()
    in_bf16 = best_time([lambda: torch.bmm(q.bfloat16(), keys)])
    in_fp32 = best_time([lambda: torch.bmm(q, keys.float())])
    found = f"{in_fp32 / in_bf16:.2f} x as fast as converted to fp32"
    if in_bf16 > in_fp32:
        raise Unavailable(found)
    return found, 0


def _ready(blocks: Tensor) -> Tensor:
    """Blocks in the numbers that products of them are fast in."""
    fast = blocks.dtype == torch.float32 or bf16_kv().in_force
    return blocks if fast else blocks.float()


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
        self._place_E = torch.tensor(reader)
        self.sum_RE = torch.zeros(rows, self.entries)
        self.sum_RE[tuple(torch.tensor(self.row_and_entry).T)] = 1.0
        empty_NT = torch.arange(block_tokens) >= torch.tensor(full).unsqueeze(1)
        mask_NT = torch.zeros(empty_NT.shape).masked_fill_(empty_NT, _MASKED)
        # Once for each of a block's heads, as the batched product wants it.
        self._mask = mask_NT.repeat_interleave(kv_heads, 0).unsqueeze(1)

    def find_places(self, place_of: Mapping[int, int], offset: int) -> None:
        """Where each entry stands when all rows stand side by side; unread ones anywhere."""
        self._place_E = torch.tensor([place_of.get(offset + e, 0) for e in range(self.entries)])

    def scores(self, q_RKGD: Tensor, keys_NKDT: Tensor, scale: float) -> Tensor:
        keys = _ready(keys_NKDT[self._start : self._stop]).flatten(0, 1)
        q = self._to_blocks(q_RKGD.to(keys.dtype))
        if keys.dtype == torch.float32:
            return torch.baddbmm(self._mask, q, keys, alpha=scale)
        return torch.bmm(q, keys).float().mul_(scale).add_(self._mask)

    def times_values(self, weights: Tensor, values_NKTD: Tensor) -> Tensor:
        values = _ready(values_NKTD[self._start : self._stop]).flatten(0, 1)
        return self.per_entry(torch.bmm(weights.to(values.dtype), values).float())

    def per_block(self, x_RH: Tensor) -> Tensor:
        """A number of each row and head, where the block's product has that row and head."""
        return self._to_blocks(x_RH.view(x_RH.shape[0], self._kv_heads, -1, 1))

    def per_entry(self, x: Tensor) -> Tensor:
        """From the products of blocks to a row of numbers for each entry."""
        if self._readers > 1:
            x = x.view(self._blocks, self._kv_heads, self._readers, -1).transpose(1, 2)
        return x.reshape(self.entries, -1)

    def from_rows(self, x_PHT: Tensor) -> Tensor:
        """The opposite of `per_entry`, from the order in which rows stand side by side."""
        x = x_PHT.index_select(0, self._place_E)
        if self._readers > 1:
            x = x.view(self._blocks, self._readers, self._kv_heads, -1).transpose(1, 2)
        return x.reshape(self._blocks * self._kv_heads, -1, x_PHT.shape[-1])

    def _to_blocks(self, x_RKGY: Tensor) -> Tensor:
        x = x_RKGY.index_select(0, self._reader_E)
        if self._readers > 1:
            x = x.view(self._blocks, self._readers, *x.shape[1:]).transpose(1, 2)
        return x.reshape(self._blocks * self._kv_heads, -1, x_RKGY.shape[-1])


def _entries_of_rows(regions: Sequence[_Region], rows: int) -> list[list[int]]:
    """For each row the entries that it sums up, counted over all regions."""
    entries: list[list[int]] = [[] for _ in range(rows)]
    offset = 0
    for region in regions:
        for row, entry in region.row_and_entry:
            entries[row].append(offset + entry)
        offset += region.entries
    return entries


class ExactAttention:
    """The same in an order of additions that depends on nothing but the row itself.

    `reads_R` has the readings of each row, in the order of the tokens. Every
    (row, block) is a product of its own, filled up to whole cache lines so that all of them begin
    where one does, and each row's partial results are added up one after another: slower, and bit
    for bit the same whatever the other rows are.
    """

    def __init__(self, reads_R: Sequence[Sequence[Reading]], block_tokens: int) -> None:
        self._tokens = filled_up(torch.arange(block_tokens), LINE)
        self._tokens[block_tokens:] = block_tokens  # which no row has read
        self._rounds = []
        for place in range(max(map(len, reads_R))):
            reads = [reads[place] for reads in reads_R if place < len(reads)]
            self._rounds.append(torch.tensor(reads).unbind(1))

    def __call__(
        self, q_RHD: Tensor, keys_NKDT: Tensor, values_NKTD: Tensor, scale: float
    ) -> Tensor:
        rows, heads, width = q_RHD.shape
        kv_heads = keys_NKDT.shape[1]
        q = filled_up(q_RHD * scale, LINE).reshape(rows, kv_heads, heads // kv_heads, -1)
        top = q.new_full((*q.shape[:3], 1), _MASKED)
        total = torch.zeros_like(top)
        out = torch.zeros_like(q)
        for row, block, fill in self._rounds:
            scores = torch.matmul(q[row], filled_up(keys_NKDT[block].float(), LINE, LINE))
            empty = self._tokens >= fill[:, None, None, None]
            scores.masked_fill_(empty, _MASKED)
            higher = torch.maximum(top[row], scores.amax(-1, keepdim=True))
            fade = (top[row] - higher).clamp_(min=_LOWEST).exp_()
            weights = (scores - higher).clamp_(min=_LOWEST).exp_().masked_fill_(empty, 0)
            top[row] = higher
            total[row] = total[row] * fade + weights.sum(-1, keepdim=True)
            values = filled_up(values_NKTD[block].float(), LINE, LINE)
            out[row] = out[row] * fade + torch.matmul(weights, values)
        return (out / total)[..., :width].reshape(rows, heads * width)


def causal(q_CHD: Tensor, keys_KDT: Tensor, values_KTD: Tensor, first: int, scale: float) -> Tensor:
    """Consecutive rows of one sequence, the first at position `first`, over all before them."""
    rows, heads, width = q_CHD.shape
    kv_heads, _, tokens = keys_KDT.shape
    q = q_CHD.view(rows, kv_heads, -1, width).permute(1, 2, 0, 3).reshape(kv_heads, -1, width)
    scores = torch.bmm(q * scale, keys_KDT).view(kv_heads, -1, rows, tokens)
    later = torch.arange(tokens) > torch.arange(first, first + rows).unsqueeze(1)
    scores.masked_fill_(later, _MASKED)
    scores.sub_(scores.amax(-1, keepdim=True)).clamp_(min=_LOWEST).exp_()
    weights = scores.div_(scores.sum(-1, keepdim=True))
    out = torch.bmm(weights.view(kv_heads, -1, tokens), values_KTD)
    return out.view(kv_heads, -1, rows, width).permute(2, 0, 1, 3).reshape(rows, heads * width)
