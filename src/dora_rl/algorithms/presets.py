"""The published algorithms as settings: what each preset changes of the defaults.

None sets a KL term, though some papers have one: it costs a reference model. Set `kl` for it.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

# Keys that the paper of a preset leaves open have the field's usual value.
PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        # DeepSeekMath, arXiv 2402.03300
        "grpo": {},
        # arXiv 2503.14476; its buffer is 4096 of 20480 tokens
        "dapo": {
            "aggregation": "token",
            "clip_high": 0.28,
            "dynamic_sampling": True,
            "overlong_buffer": 0.2,
        },
        # arXiv 2503.20783
        "dr_grpo": {"advantage": "dr_grpo", "aggregation": "constant"},
        # arXiv 2402.14740; the policy gradient sums over tokens, as `constant` does
        "rloo": {"advantage": "rloo", "aggregation": "constant"},
        # arXiv 2501.03262, both
        "reinforce_pp": {"advantage": "reinforce_pp", "aggregation": "token"},
        "reinforce_pp_baseline": {"advantage": "reinforce_pp_baseline", "aggregation": "token"},
        # arXiv 1707.06347
        "ppo": {"advantage": "gae", "aggregation": "token"},
        # arXiv 2507.18071; the ratio of a whole sequence varies far less than that of a token
        "gspo": {
            "loss": "gspo",
            "clip_low": 3e-4,
            "clip_high": 4e-4,
            "importance_level": "sequence",
        },
        # MiniMax-M1, arXiv 2506.13585: no lower bound
        "cispo": {"loss": "cispo", "aggregation": "token", "clip_low": 1.0, "clip_high": 4.0},
        # arXiv 2511.20347
        "sapo": {"loss": "sapo"},
        # LongCat-Flash-Thinking, arXiv 2509.18883: triplet clipping is `dual_clip` here
        "longcat": {
            "aggregation": "constant",
            "clip_high": 0.28,
            "dual_clip": 3.0,
            "importance": "truncated",
            "dynamic_sampling": True,
        },
        # Williams 1992: the reward itself, no baseline, no ratio
        "reinforce": {"advantage": "reward", "loss": "reinforce", "aggregation": "constant"},
        # arXiv 2508.10751
        "pass_at_k": {"advantage": "pass_at_k", "aggregation": "token"},
    }
)
