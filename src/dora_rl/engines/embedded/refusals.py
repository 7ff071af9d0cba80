"""What the embedded engine does not take, each with the value and the fix. Nothing is changed."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from dora_rl.core.types import TrajectoryId
from dora_rl.engines.base import Request
from dora_rl.engines.embedded.kv import KvPool
from dora_rl.engines.errors import RequestRefused
from dora_rl.models.config import ModelConfig
from dora_rl.weights.errors import WeightsError


def check_request(
    request: Request, config: ModelConfig, pool: KvPool, *, has_tokenizer: bool
) -> None:
    """Refuse what this model and this memory can never serve."""
    name = f"trajectory {request.trajectory}"
    known = len(request.prompt) + len(request.prefix)
    if known >= config.context:
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
    before = len(request.prompt) - 1
    own = min(request.sampling.max_tokens, config.context - before)
    needed = pool.blocks_for(before) + pool.blocks_for(own)
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
    wanted = config.tensors()
    for name, shape in wanted.items():
        if name not in tensors:
            raise WeightsError(
                f"tensor `{name}` is missing from `{directory}`. Is it another model's?"
            )
        found = tuple(tensors[name].shape)
        if found != shape:
            raise WeightsError(
                f"tensor `{name}` in `{directory}` has the shape `{found}`: "
                f"this model has {shape}. Is it another model's?"
            )
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}
    if len(dtypes) > 1 or not dtypes <= {"float32", "bfloat16"}:
        raise WeightsError(
            f"the tensors in `{directory}` are of dtype `{', '.join(sorted(dtypes))}`: "
            "all must be float32, or all bfloat16."
        )
    if foreign := sorted(tensors.keys() - wanted.keys()):
        raise WeightsError(
            f"tensor `{foreign[0]}` in `{directory}` is none of this model's. "
            "Is it another model's?"
        )
