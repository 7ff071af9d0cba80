"""The smallest model that vLLM computes on a CPU."""

from typing import Any

BLOCK = 32  # tokens of KV
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "head_dim": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 12 * BLOCK,
}
