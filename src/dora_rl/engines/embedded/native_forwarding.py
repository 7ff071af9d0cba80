"""Sequences as the rows of native passes: `forwarding` for the kernels of `models.native`.

No row touches another there, so nothing is done otherwise where rows must be exact.
"""

from collections.abc import Sequence as Series

from torch import Tensor

from dora_rl.engines.embedded.forwarding import Chunk, Feed
from dora_rl.engines.embedded.kv import KvPool
from dora_rl.engines.embedded.sequences import Prompt, Sequence
from dora_rl.engines.embedded.versions import Versions
from dora_rl.models.config import ModelConfig
from dora_rl.models.native.passes import NativePasses, Rows


class NativeForwarder:
    """See `forwarding.Forwarder`."""

    def __init__(self, config: ModelConfig, versions: Versions, pool: KvPool) -> None:
        self._pool = pool
        self._versions = versions
        self._passes = NativePasses(config, pool.keys_LNKDT, pool.values_LNKTD)

    def read(self, chunks: Series[Chunk]) -> None:
        chunks = sorted(chunks, key=lambda chunk: chunk.version)
        weights = self._versions.row_weights([(chunk.version, chunk.count) for chunk in chunks])
        rows = Rows([], [], [], [], [], [], [])
        for chunk in chunks:
            self._add(rows, chunk.line, chunk.tokens)
        self._passes.run(weights, rows, logits=False)
        for chunk in chunks:
            chunk.line.kv.tokens += chunk.count

    def next_logits(self, feeds: Series[Feed], *, exact: bool = False) -> Tensor:
        weights = self._versions.row_weights([(feed.version, feed.count) for feed in feeds])
        rows = Rows([], [], [], [], [], [], [])
        for feed in feeds:
            self._add(rows, feed.line, feed.tokens)
        logits = self._passes.run(weights, rows, logits=True)
        assert logits is not None
        return logits

    def withdraw(self, sequence: Sequence, end: int) -> None:
        """Nothing: rows read what is cached and no further."""

    def _add(self, rows: Rows, line: Prompt | Sequence, tokens: Series[int]) -> None:
        """A row for each of these tokens, which follow what the line has cached."""
        size, first, cached = self._pool.block_tokens, len(rows.blocks), line.kv.tokens
        shared = 0
        if isinstance(line, Sequence):
            shared = len(line.prompt.tokens)
            rows.blocks.extend(line.prompt.kv.blocks[: self._pool.blocks_for(shared)])
        blocks = line.kv.blocks
        rows.blocks.extend(blocks)
        for index, token in enumerate(tokens, cached):
            rows.tokens.append(token)
            rows.positions.append(shared + index)
            rows.places.append(blocks[index // size] * size + index % size)
            rows.shared.append(shared)
            rows.own.append(index + 1)
            rows.first.append(first)
