"""What the embedded engine does not take, each with the value and the fix. Nothing is changed."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from dora_rl.core.protocol.types import TrajectoryId
from dora_rl.engines.base import Request
from dora_rl.engines.embedded.kv import KvPool
from dora_rl.engines.errors import RequestRefused
from dora_rl.engines.fit import check_dtypes, check_shapes
from dora_rl.engines.kv_room import blocks_needed
from dora_rl.models.config import ModelConfig
from dora_rl.weights.errors import WeightsError


def check_request(
    request: Request, config: ModelConfig, pool: KvPool, *, has_tokenizer: bool
) -> None:
    """Refuse what this model and this memory can never serve."""
    name = f"trajectory {request.trajectory}"
    known = len(request.prompt) + len(request.prefix)
    if known - request.held >= config.context:
        raise RequestRefused(
            f"the prompt of {name} has {known} tokens, prefix included: the context of this "
            f"model is {config.context}, and a token must fit in after it. Shorten it."
        )
    named = (*request.prompt, *request.prefix, *request.sampling.stop_token_ids)
    check_vocabulary(request.trajectory, named, config)
    if request.sampling.stop and not has_tokenizer:
        raise RequestRefused(
            f"{name} asks for stop strings, and this model has no tokenizer.json. "
            "Use stop_token_ids."
        )
    needed = blocks_needed(
        len(request.prompt), request.sampling.max_tokens, config.context, pool.block_tokens
    )
    if needed > pool.num_blocks:
        raise RequestRefused(
            f"{name} may need {needed * pool.block_tokens} tokens of KV, and the budget is "
            f"`{pool.num_blocks * pool.block_tokens}`. Raise rollout.kv_budget_tokens, or lower "
            "max_tokens."
        )


def check_vocabulary(trajectory: TrajectoryId, tokens: Iterable[int], config: ModelConfig) -> None:
    for token in tokens:
        if not 0 <= token < config.vocab_size:
            raise RequestRefused(
                f"trajectory {trajectory} has the token `{token}`: the vocabulary has "
                f"{config.vocab_size}. Is it another model's tokenizer?"
            )


def check_tensors(config: ModelConfig, directory: Path, tensors: Mapping[str, Tensor]) -> None:
    """Refuse weights that are not exactly those of this model."""
    check_shapes(config, directory, {name: tuple(t.shape) for name, t in tensors.items()})
    check_dtypes(directory, {str(t.dtype).removeprefix("torch.") for t in tensors.values()})
    if foreign := sorted(tensors.keys() - config.tensors().keys()):
        raise WeightsError(
            f"tensor `{foreign[0]}` in `{directory}` is none of this model's. "
            "Is it another model's?"
        )
