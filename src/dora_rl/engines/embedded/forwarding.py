"""From sequences to rows: one forward pass over the next tokens of many sequences.

Here sequences become tensors: which token each row feeds, where its key and value go, and
which blocks it reads. Nothing is scheduled and nothing sampled here.
"""

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Series
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from dora_rl.core.protocol.types import Version
from dora_rl.engines.embedded.attention import BlockAttention, ExactAttention, Reading, causal
from dora_rl.engines.embedded.kv import KvPool
from dora_rl.engines.embedded.sequences import Prompt, Sequence
from dora_rl.engines.embedded.versions import Versions
from dora_rl.engines.speculation import NOTHING, Draft
from dora_rl.models.config import ModelConfig
from dora_rl.models.decoder import RowSpan, forward, logits, rotary_of
from dora_rl.models.rope import RopeTable

# Rows of a stacked step over those that are real: with half of them empty it was slower.
_MOST_ROWS = 1.25

# Attention over what is in the pool, the rows' own keys and values included.
Read: TypeAlias = Callable[[int, Tensor], Tensor]  # (layer, q_RHD) -> out_RX


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next `count` tokens of a prompt, or of a sequence's prefix, that are not cached yet."""

    line: Prompt | Sequence
    count: int

    @property
    def version(self) -> Version:
        return self.line.version

    @property
    def tokens(self) -> Series[int]:
        return self.line.known[self.line.kv.tokens :][: self.count]


@dataclass(frozen=True, slots=True)
class Feed:
    """A sequence's last token, which is not cached yet, and those that are proposed to follow."""

    line: Sequence
    draft: Draft = NOTHING

    @property
    def version(self) -> Version:
        return self.line.version

    @property
    def count(self) -> int:
        return 1 + len(self.draft.tokens)

    @property
    def tokens(self) -> Series[int]:
        return (self.line.own[-1], *self.draft.tokens)

    @property
    def end(self) -> int:
        """The place behind the last of them, in the sequence's own KV."""
        return self.line.kv.tokens + self.count


@dataclass(frozen=True, slots=True)
class _Stacking:
    """Rows of several versions in equal blocks: the stacked decoder, and where each row stands."""

    span: RowSpan
    at_R: Tensor

    def spread(self, x_R: Tensor) -> Tensor:
        """The rows where they stand, and zeros between."""
        return x_R.new_zeros(self.span.stop, *x_R.shape[1:]).index_copy_(0, self.at_R, x_R)


Piece: TypeAlias = Chunk | Feed  # consecutive rows of one sequence


class Forwarder(Protocol):
    """Runs rows through the weights of the live versions, over one pool."""

    def read(self, chunks: Series[Chunk]) -> None:
        """Compute the KV of these chunks."""

    def next_logits(self, feeds: Series[Feed], *, exact: bool = False) -> Tensor:
        """Feed the last token of each, and its draft; the logits after each, in the order given.

        The sequences must stand by version, and have all but their last token cached; what is fed
        counts as cached when the caller says so. With `exact` no row can touch another, not even
        by NaN, but those that it is drafted for.
        """

    def withdraw(self, sequence: Sequence, end: int) -> None:
        """What was fed up to the place `end` and is not cached must not touch a row from now on."""


class TorchForwarder:
    """By torch's operations."""

    def __init__(
        self, config: ModelConfig, versions: Versions, pool: KvPool, *, exact: bool
    ) -> None:
        self._config = config
        self._pool = pool
        self._rope = RopeTable(config)
        self._scale = config.head_dim**-0.5
        self._exact = exact
        self._versions = versions

    def read(self, chunks: Series[Chunk]) -> None:
        chunks = sorted(chunks, key=lambda chunk: chunk.version)
        read = self._read_exactly(chunks) if self._exact else self._read_chunks(chunks)
        self._run(self._spans(chunks), chunks, read)
        for chunk in chunks:
            chunk.line.kv.tokens += chunk.count

    def next_logits(self, feeds: Series[Feed], *, exact: bool = False) -> Tensor:
        spans, stacking = self._spans(feeds), None
        if self._exact or exact:
            read = self._read_exactly(feeds)
        elif any(feed.count > 1 for feed in feeds):  # blocks are not equally full for all rows
            read = self._read_chunks(feeds)
        else:
            sequences = [feed.line for feed in feeds]
            stacking = self._stack_for(sequences)
            read = self._read_blocks(sequences)
        hidden = self._run(spans, feeds, read, stacking)
        if stacking is not None:
            return logits([stacking.span], hidden).index_select(0, stacking.at_R)
        return logits(spans, hidden)

    def withdraw(self, sequence: Sequence, end: int) -> None:
        # What is masked is still multiplied, and 0 times NaN is NaN.
        self._pool.wipe(sequence.kv.blocks, sequence.kv.tokens, end)

    def _stack_for(self, sequences: Series[Sequence]) -> "_Stacking | None":
        """Where each row stands in equal blocks of rows, unless too many would be empty."""
        stacked = self._versions.stacked
        if stacked is None or sequences[0].version == sequences[-1].version:
            return None
        versions, decoder = stacked
        counts = Counter(sequence.version for sequence in sequences)
        height = max(counts.values())
        rows = len(versions) * height
        if rows > _MOST_ROWS * len(sequences):
            return None
        at_R = [versions.index(v) * height + i for v, n in counts.items() for i in range(n)]
        return _Stacking(RowSpan(decoder, 0, rows), torch.tensor(at_R))

    def _spans(self, pieces: Series[Piece]) -> list[RowSpan]:
        return self._versions.spans([(piece.version, piece.count) for piece in pieces])

    def _run(
        self,
        spans: Series[RowSpan],
        pieces: Series[Piece],
        read: Read,
        stacking: "_Stacking | None" = None,
    ) -> Tensor:
        rows = [(piece.line, index) for piece in pieces for index in range(piece.count)]
        tokens = [token for piece in pieces for token in piece.tokens]
        positions = [line.position + index for line, index in rows]
        places = [self._place(line, line.kv.tokens + index) for line, index in rows]
        block_R, offset_R = torch.tensor(places).unbind(1)
        cos_RD, sin_RD = rotary_of(*self._rope.cos_sin(torch.tensor(positions)))
        keys, values = self._pool.keys_LNKDT, self._pool.values_LNKTD

        def attend(layer: int, q_RHD: Tensor, k_RKD: Tensor, v_RKD: Tensor) -> Tensor:
            keys[layer][block_R, :, :, offset_R] = k_RKD.to(keys.dtype)
            values[layer][block_R, :, offset_R] = v_RKD.to(values.dtype)
            return read(layer, q_RHD)

        tokens_R = torch.tensor(tokens)
        if stacking is None:
            return forward(spans, tokens_R, cos_RD, sin_RD, attend)

        def attend_stacked(layer: int, *heads: Tensor) -> Tensor:
            q, k, v = (x.index_select(0, stacking.at_R) for x in heads)
            return stacking.spread(attend(layer, q, k, v))

        tokens_R, cos_RD, sin_RD = map(stacking.spread, (tokens_R, cos_RD, sin_RD))
        return forward([stacking.span], tokens_R, cos_RD, sin_RD, attend_stacked)

    def _read_blocks(self, sequences: Series[Sequence]) -> Read:
        """Single rows over the blocks where they lie: at the low end and at the high one."""
        low, high = list[Reading](), list[Reading]()
        for row, sequence in enumerate(sequences):
            low += self._reads_of_own(row, sequence, 1)
        for row, sequence in enumerate(sequences):
            reads = self._reads_of_prompt(row, sequence.prompt)
            (low if sequence.prompt.kv.low else high).extend(reads)
        attend = BlockAttention(
            [low, high] if high else [low],
            len(sequences),
            self._pool.block_tokens,
            self._config.num_kv_heads,
        )
        return self._over_pool(attend)

    def _read_exactly(self, pieces: Series[Piece]) -> Read:
        rows = [(piece, index) for piece in pieces for index in range(piece.count)]
        reads_R = [self._reads_of_row(row, *at) for row, at in enumerate(rows)]
        return self._over_pool(ExactAttention(reads_R, self._pool.block_tokens))

    def _over_pool(self, attend: BlockAttention | ExactAttention) -> Read:
        keys, values, scale = self._pool.keys_LNKDT, self._pool.values_LNKTD, self._scale
        return lambda layer, q_RHD: attend(q_RHD, keys[layer], values[layer], scale)

    def _read_chunks(self, pieces: Series[Piece]) -> Read:
        """Each piece over a copy of all that it reads: bound by arithmetic anyway."""

        def read(layer: int, q_RHD: Tensor) -> Tensor:
            out = []
            start = 0
            for piece in pieces:
                q_CHD = q_RHD[start : start + piece.count]
                keys_KDT, values_KTD = self._copy_up_to(layer, piece)
                first = piece.line.position
                out.append(causal(q_CHD, keys_KDT, values_KTD, first, self._scale))
                start += piece.count
            return torch.cat(out)

        return read

    def _copy_up_to(self, layer: int, piece: Piece) -> tuple[Tensor, Tensor]:
        """Keys and values from the first token of the sequence to the last of the piece."""
        line = piece.line
        end = line.kv.tokens + piece.count
        stretches = [(line.kv.blocks, end)]
        if isinstance(line, Sequence):
            stretches.insert(0, (line.prompt.kv.blocks, len(line.prompt.tokens)))
        keys, values = [], []
        for blocks, tokens in stretches:
            used = torch.tensor(blocks[: self._pool.blocks_for(tokens)], dtype=torch.long)
            key = self._pool.keys_LNKDT[layer][used].permute(1, 2, 0, 3).flatten(2)
            value = self._pool.values_LNKTD[layer][used].transpose(0, 1).flatten(1, 2)
            keys.append(key[..., :tokens].float())
            values.append(value[:, :tokens].float())
        return torch.cat(keys, -1), torch.cat(values, 1)

    def _reads_of_row(self, row: int, piece: Piece, index: int) -> list[Reading]:
        line = piece.line
        prompt = self._reads_of_prompt(row, line.prompt) if isinstance(line, Sequence) else []
        return prompt + self._reads_of_own(row, line, index + 1)

    def _reads_of_prompt(self, row: int, prompt: Prompt) -> list[Reading]:
        return self._reads(row, prompt.kv.blocks, len(prompt.tokens))

    def _reads_of_own(self, row: int, line: Prompt | Sequence, new: int) -> list[Reading]:
        """`new` counts the tokens of this pass up to the row's own."""
        return self._reads(row, line.kv.blocks, line.kv.tokens + new)

    def _reads(self, row: int, blocks: Series[int], tokens: int) -> list[Reading]:
        size = self._pool.block_tokens
        return [
            Reading(row, block, min(size, tokens - place * size))
            for place, block in enumerate(blocks[: self._pool.blocks_for(tokens)])
        ]

    def _place(self, line: Prompt | Sequence, index: int) -> tuple[int, int]:
        """Block and offset of a token of the line's own KV."""
        place, offset = divmod(index, self._pool.block_tokens)
        return line.kv.blocks[place], offset
