"""What a train step reports. Plain data, without torch."""

import msgspec


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """One train step.

    `tokens` are those of prompts and responses, `sampled_tokens` those that the policy wrote.
    A metric that has no meaning in this step is left out, never NaN.

    `logprob_gap_mean` and `logprob_gap_max` say how far the engine's log-probabilities are from
    the trainer's for the same weights. With `behaviour = "recompute"` every sampled token is
    compared with the version that sampled it. Otherwise only tokens of staleness 0 in the first
    mini-batch are, for only there the trainer's weights still are those that sampled.
    """

    step: int
    seconds: float
    tokens: int
    sampled_tokens: int
    updates: int
    metrics: dict[str, float]
