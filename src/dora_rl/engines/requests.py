"""What every engine with a model refuses of a request, and how a turn ends: one rule for all.

Free of torch. The fake has rules of its own, so that the contract suite compares two.
"""

from collections.abc import Callable, Iterable

from dora_rl.core.protocol.types import TrajectoryId
from dora_rl.engines.base import FinishReason, Request
from dora_rl.engines.errors import RequestRefused
from dora_rl.models.config import ModelConfig


def check_request(
    request: Request, config: ModelConfig, context: int, *, has_tokenizer: bool
) -> None:
    """Refuse what this model can never serve, with a context of so many tokens."""
    name = f"trajectory {request.trajectory}"
    known = len(request.prompt) + len(request.prefix)
    if known - request.held >= context:
        raise RequestRefused(
            f"the prompt of {name} has {known} tokens, prefix included: the context of this "
            f"model is {context}, and a token must fit in after it. Shorten it."
        )
    named = (*request.prompt, *request.prefix, *request.sampling.stop_token_ids)
    check_vocabulary(request.trajectory, named, config)
    if request.sampling.stop and not has_tokenizer:
        raise RequestRefused(
            f"{name} asks for stop strings, and this model has no tokenizer.json. "
            "Use stop_token_ids."
        )


def check_room(request: Request, needed: int, blocks: int, block_tokens: int) -> None:
    """Refuse what may need more blocks of KV than there are."""
    if needed > blocks:
        raise RequestRefused(
            f"trajectory {request.trajectory} may need {needed * block_tokens} tokens of KV, and "
            f"the budget is `{blocks * block_tokens}`. Raise rollout.kv_budget_tokens, or lower "
            "max_tokens."
        )


def check_vocabulary(trajectory: TrajectoryId, tokens: Iterable[int], config: ModelConfig) -> None:
    for token in tokens:
        if not 0 <= token < config.vocab_size:
            raise RequestRefused(
                f"trajectory {trajectory} has the token `{token}`: the vocabulary has "
                f"{config.vocab_size}. Is it another model's tokenizer?"
            )


def end_tokens(request: Request, config: ModelConfig) -> tuple[int, ...]:
    """The tokens that end a turn of this request."""
    ends = () if request.sampling.ignore_eos else config.eos_token_ids
    return (*request.sampling.stop_token_ids, *ends)


def finish_reason(
    request: Request,
    config: ModelConfig,
    context: int,
    *,
    token: int,
    response: int,
    stops: Callable[[], bool],
) -> FinishReason | None:
    """Why a turn ends with this token, the last of a response of so many; None if it does not.

    `stops` says whether a stop string is complete.
    """
    if token in end_tokens(request, config):
        return FinishReason.STOP_TOKEN
    if stops():
        return FinishReason.STOP_STRING
    if response >= request.sampling.max_tokens:
        return FinishReason.MAX_TOKENS
    if len(request.prompt) + response >= context:
        return FinishReason.CONTEXT
    return None
