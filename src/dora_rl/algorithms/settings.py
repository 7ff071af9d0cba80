"""The `[algorithm]` section: a preset, and whatever the user wants different. Free of torch.

A key counts only where the choices beside it give it a meaning (`clip_low` needs a loss that
clips). Set without that meaning it is refused, never ignored; a dump leaves it out. So the dump
of the settings is the resolved algorithm, and reads back as the same.
"""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import (
    Field,
    ModelWrapValidatorHandler,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from dora_rl.algorithms.presets import PRESETS
from dora_rl.config import ConfigModel
from dora_rl.core.protocol.errors import SettingsError

Preset = Literal[
    "grpo",
    "dapo",
    "dr_grpo",
    "rloo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "ppo",
    "gspo",
    "cispo",
    "sapo",
    "longcat",
    "reinforce",
    "pass_at_k",
]
Advantage = Literal[
    "grpo",
    "dr_grpo",
    "rloo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "gae",
    "pass_at_k",
    "reward",
]
Loss = Literal["ppo", "gspo", "cispo", "sapo", "reinforce"]
Aggregation = Literal["token", "sequence", "constant"]

# These compare the members of a group: one alone has no advantage.
GROUP_BASELINES = frozenset({"grpo", "dr_grpo", "rloo", "reinforce_pp_baseline", "pass_at_k"})

# Where a key counts: the key that decides, and which of its values give this one a meaning
# (none listed: every value but 0).
_COUNTS_WITH: Mapping[str, tuple[str, frozenset[str]]] = {
    "clip_low": ("loss", frozenset({"ppo", "gspo", "cispo"})),
    "clip_high": ("loss", frozenset({"ppo", "gspo", "cispo"})),
    "dual_clip": ("loss", frozenset({"ppo"})),
    "sapo_positive": ("loss", frozenset({"sapo"})),
    "sapo_negative": ("loss", frozenset({"sapo"})),
    "importance_level": ("importance", frozenset({"truncated", "masked"})),
    "importance_cap": ("importance", frozenset({"truncated", "masked"})),
    "kl_in": ("kl", frozenset({"k1", "k2", "k3"})),
    "kl_coefficient": ("kl", frozenset({"k1", "k2", "k3"})),
    "overlong_penalty": ("overlong_buffer", frozenset()),
    "gamma": ("advantage", frozenset({"gae", "reinforce_pp"})),
    "gae_lambda": ("advantage", frozenset({"gae"})),
    "value_coefficient": ("advantage", frozenset({"gae"})),
    "value_clip": ("advantage", frozenset({"gae"})),
    "pass_k": ("advantage", frozenset({"pass_at_k"})),
}


class AlgorithmSettings(ConfigModel):
    """How advantages, ratios and losses are formed. Every field holds its resolved value."""

    preset: Preset = "grpo"
    advantage: Advantage = "grpo"
    loss: Loss = "ppo"
    aggregation: Aggregation = "sequence"
    """The mean of all tokens, of the sequences' means, or sums over `max_tokens` a sequence."""

    clip_low: float = Field(default=0.2, ge=0, le=1)
    """The ratio counts down to 1 - clip_low."""
    clip_high: float = Field(default=0.2, ge=0)
    """The ratio counts up to 1 + clip_high."""
    dual_clip: float = Field(default=0.0, ge=0)
    """Cap on the ratio of a negative advantage; 0: none."""
    sapo_positive: float = Field(default=1.0, gt=0)
    sapo_negative: float = Field(default=1.05, gt=0)
    """SAPO's temperatures: the larger, the faster a ratio far from 1 loses its gradient."""

    importance: Literal["none", "truncated", "masked"] = "none"
    """Correction for the gap between the trainer's probabilities and the engine's."""
    importance_level: Literal["token", "sequence"] = "token"
    """The weight of each token, or of its whole sequence: the product of its tokens' weights."""
    importance_cap: float = Field(default=2.0, ge=1)

    kl: Literal["none", "k1", "k2", "k3"] = "none"
    kl_in: Literal["reward", "loss"] = "loss"
    kl_coefficient: float = Field(default=0.001, gt=0)

    dynamic_sampling: bool = False
    """Filter the groups whose rewards are all equal."""
    overlong_buffer: float = Field(default=0.0, ge=0, le=1)
    """Share of `max_tokens`, at its end, over which a penalty grows; 0: none."""
    overlong_penalty: float = Field(default=1.0, ge=0)
    mask_truncated: bool = False
    """Truncated responses count in the baselines but are not trained on."""

    gamma: float = Field(default=1.0, gt=0, le=1)
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    value_coefficient: float = Field(default=0.5, ge=0)
    value_clip: float = Field(default=0.2, ge=0)
    """How far a value may move from the old one before it stops learning; 0: no bound."""
    pass_k: int = Field(default=4, ge=1)

    @model_validator(mode="wrap")
    @classmethod
    def _resolve(
        cls, data: Any, handler: ModelWrapValidatorHandler["AlgorithmSettings"]
    ) -> "AlgorithmSettings":
        if not isinstance(data, Mapping):
            return handler(data)
        preset = data.get("preset", "grpo")
        defaults = PRESETS.get(preset, {}) if isinstance(preset, str) else {}
        settings = handler({**defaults, **data})
        for key in sorted(_idle(settings.__dict__) & data.keys()):
            decider, values = _COUNTS_WITH[key]
            needed = " or ".join(f"`{value}`" for value in sorted(values)) or "more than 0"
            raise ValueError(
                f"{key} does nothing with {decider} `{getattr(settings, decider)}`: "
                f"`{data[key]}`. Remove it, or set {decider} to {needed}."
            )
        return settings

    @model_validator(mode="after")
    def _fits_together(self) -> "AlgorithmSettings":
        if 0 < self.dual_clip <= 1:
            raise ValueError(f"dual_clip must be > 1: `{self.dual_clip}`. Use 0 for none.")
        if self.kl == "k1" and self.kl_in == "loss":
            raise ValueError(
                "kl_in cannot be `loss` with kl `k1`, whose gradient is zero on average. "
                "Use kl_in `reward`, or kl `k2`."
            )
        if self.loss == "gspo":
            self._check_gspo()
        return self

    def _check_gspo(self) -> None:
        if self.aggregation != "sequence":
            raise ValueError(
                f"aggregation must be `sequence` with loss `gspo`: `{self.aggregation}`. "
                "Its ratio is that of a whole sequence."
            )
        if self.importance != "none" and self.importance_level != "sequence":
            raise ValueError(
                "importance_level must be `sequence` with loss `gspo`: "
                f"`{self.importance_level}`. Its ratio is that of a whole sequence."
            )
        if self.advantage == "gae" or (
            self.advantage == "reinforce_pp" and self.kl != "none" and self.kl_in == "reward"
        ):
            raise ValueError(
                f"advantage cannot be `{self.advantage}` with loss `gspo`, which needs one "
                "advantage a sequence. Use loss `ppo`, or advantage `grpo`."
            )

    @model_serializer(mode="wrap")
    def _dump(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        idle = _idle(self.__dict__)
        return {key: value for key, value in handler(self).items() if key not in idle}


def _idle(values: Mapping[str, Any]) -> set[str]:
    """The keys that mean nothing beside these values."""
    return {
        key
        for key, (decider, wanted) in _COUNTS_WITH.items()
        if not (values[decider] in wanted if wanted else values[decider])
    }


def check(
    settings: AlgorithmSettings, *, group_size: int, max_staleness: int, multi_epoch: bool
) -> list[str]:
    """Refuse what the rest of the configuration makes impossible; return warnings."""
    advantage = settings.advantage
    if advantage in GROUP_BASELINES and group_size < 2:
        raise SettingsError(
            f"group_size must be >= 2 with advantage `{advantage}`, which compares the members "
            f"of a group: `{group_size}`. Use advantage `reinforce_pp` for single responses."
        )
    if settings.dynamic_sampling and group_size < 2:
        raise SettingsError(
            f"group_size must be >= 2 with dynamic_sampling, which else filters every group: "
            f"`{group_size}`. Set dynamic_sampling to false."
        )
    if advantage == "pass_at_k" and settings.pass_k >= group_size:
        raise SettingsError(
            f"pass_k must be below group_size ({group_size}), else no member differs from "
            f"another: `{settings.pass_k}`. Use at most {group_size - 1}, or larger groups."
        )
    return _warnings(settings, max_staleness=max_staleness, multi_epoch=multi_epoch)


def _warnings(settings: AlgorithmSettings, *, max_staleness: int, multi_epoch: bool) -> list[str]:
    warnings = []
    if settings.loss == "reinforce" and (max_staleness > 0 or multi_epoch):
        cause = f"max_staleness `{max_staleness}`" if max_staleness else "several updates a batch"
        warnings.append(
            f"loss `reinforce` has no ratio, so it is biased with {cause}. Use loss `ppo`."
        )
    if settings.dynamic_sampling and settings.advantage not in GROUP_BASELINES:
        warnings.append(
            "dynamic_sampling filters groups of equal rewards, but advantage "
            f"`{settings.advantage}` could learn from them."
        )
    if settings.kl in ("k2", "k3") and settings.kl_in == "reward":
        warnings.append(f"kl `{settings.kl}` is biased in the reward. Use kl `k1` there.")
    return warnings
