"""A sequence with its KV as a message to another engine, and back.

The KV travels as [layer, k or v, token, head, width], whatever the blocks on either side.
"""

import torch
from torch import Tensor

from dora_rl.engines import moving
from dora_rl.engines.embedded.sequences import Sequence, Stage
from dora_rl.engines.wire import Export
from dora_rl.models.config import ModelConfig


def export(config: ModelConfig, sequence: Sequence, digest: str, kv_L2TKD: Tensor) -> Export:
    """All that the sequence needs to continue elsewhere."""
    return moving.export(
        sequence.request,
        digest,
        _kind(config),
        kv_L2TKD,
        kv_L2TKD.shape[2],
        generated=sequence.generated,
        turn_start=sequence.turn_start,
        held=sequence.stage is Stage.HELD,
    )


def kv_of(config: ModelConfig, export: Export, dtype: torch.dtype) -> Tensor:
    """The KV of an exported trajectory, in this dtype."""
    shape = (config.num_layers, 2, export.kv_tokens, config.num_kv_heads, config.head_dim)
    return moving.kv_of(export, _kind(config), shape).to(dtype)


def _kind(config: ModelConfig) -> str:
    """What KV must have in common to be read by the same attention."""
    return f"{config.family} {config.num_layers}x{config.num_kv_heads}x{config.head_dim}"
