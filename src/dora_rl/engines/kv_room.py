"""How much KV an engine holds, and what one trajectory may need of it. Free of torch."""

from dora_rl.machine import cgroups
from dora_rl.models.config import ModelConfig

BLOCK_TOKENS = 32  # KV is given out in blocks of so many tokens
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_SHARE_OF_MEMORY = 0.25  # the rest is for weights, the trainer and everything else


def token_bytes(config: ModelConfig, dtype: str) -> int:
    """Keys and values of one token in all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * DTYPE_BYTES[dtype]


def memory_share() -> int:
    """Bytes of KV that an engine takes by itself, at most."""
    return int(cgroups.usable_memory() * _SHARE_OF_MEMORY)


def blocks_for(tokens: int, block_tokens: int = BLOCK_TOKENS) -> int:
    """Blocks that hold so many tokens."""
    return -(-tokens // block_tokens)


def blocks_needed(
    prompt: int, max_tokens: int, context: int, block_tokens: int = BLOCK_TOKENS
) -> int:
    """Blocks of a trajectory that gets as long as it may; its prompt's last token is its own."""
    before = prompt - 1
    own = min(max_tokens, context - before)
    return blocks_for(before, block_tokens) + blocks_for(own, block_tokens)


def num_blocks(
    config: ModelConfig,
    *,
    slots: int,
    budget_tokens: int | None,
    dtype: str,
    context: int | None = None,
    block_tokens: int = BLOCK_TOKENS,
) -> int:
    """Blocks of an engine: its budget or, without one, what its slots can use, within memory."""
    if budget_tokens is not None:
        return budget_tokens // block_tokens
    fits = memory_share() // (token_bytes(config, dtype) * block_tokens)
    # A trajectory has a block begun for its prompt and one for what it generates.
    useful = slots * (blocks_for(context or config.context, block_tokens) + 1)
    return max(1, min(fits, useful))
