"""The `[algorithm]` section: presets, overrides, what is refused, and the way to TOML and back."""

import tomllib
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_rl.algorithms.presets import PRESETS
from dora_rl.algorithms.settings import AlgorithmSettings, Preset, check
from dora_rl.config import ConfigModel, dump_toml, validate
from dora_rl.core.protocol.errors import UserError
from tests.algorithms.batches import VARIANTS


class Whole(ConfigModel):
    algorithm: AlgorithmSettings = AlgorithmSettings()


def load(**keys: Any) -> AlgorithmSettings:
    return validate(Whole, {"algorithm": keys}, "run.toml").algorithm


def test_every_preset_is_known() -> None:
    assert set(PRESETS) == set(get_args(Preset))


def test_the_default_is_grpo() -> None:
    settings = load()
    assert (settings.preset, settings.advantage, settings.loss) == ("grpo", "grpo", "ppo")
    assert (settings.aggregation, settings.kl, settings.dual_clip) == ("sequence", "none", 0)


def test_a_preset_sets_defaults_and_the_user_overrides_them() -> None:
    dapo = load(preset="dapo")
    assert (dapo.clip_low, dapo.clip_high, dapo.dynamic_sampling) == (0.2, 0.28, True)
    other = load(preset="dapo", clip_high=0.5, dynamic_sampling=False)
    assert (other.clip_low, other.clip_high, other.dynamic_sampling) == (0.2, 0.5, False)
    assert other.aggregation == "token"
    longcat = load(preset="longcat")
    assert (longcat.aggregation, longcat.dual_clip, longcat.importance) == (
        "constant",
        3.0,
        "truncated",
    )
    assert load(preset="longcat", dual_clip=0).dual_clip == 0


def test_what_a_preset_sets_for_another_loss_does_not_get_in_the_way() -> None:
    settings = load(preset="longcat", loss="sapo")
    assert "clip_high" not in tomllib.loads(dump_toml(settings))


@pytest.mark.parametrize("keys", VARIANTS)
def test_a_dump_reads_back_as_the_same(keys: dict[str, Any]) -> None:
    settings = load(**keys)
    text = dump_toml(Whole(algorithm=settings))
    assert validate(Whole, tomllib.loads(text), "run.toml").algorithm == settings
    assert AlgorithmSettings(**settings.model_dump()) == settings


@given(st.sampled_from(VARIANTS), st.sampled_from(VARIANTS))
def test_any_mixture_is_refused_in_words_or_reads_back(
    keys: dict[str, Any], more: dict[str, Any]
) -> None:
    preset = AlgorithmSettings(**more).model_dump(exclude={"preset"})
    try:
        settings = load(**{**preset, **keys})
    except UserError as error:
        assert str(error).startswith("algorithm.")
        return
    dumped = tomllib.loads(dump_toml(settings))
    assert load(**dumped) == settings
    assert {**preset, **keys}.items() <= dumped.items()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"preset": "dappo"}, "algorithm.preset must be one of .* Did you mean `dapo`"),
        ({"preset": ["grpo"]}, "algorithm.preset must be one of"),
        ({"clip_hihg": 0.1}, "Did you mean `algorithm.clip_high`"),
        ({"clip_low": 1.5}, "algorithm.clip_low must be <= 1"),
        ({"dual_clip": 0.5}, "algorithm.dual_clip must be > 1: `0.5`. Use 0 for none"),
        ({"importance": "masked", "importance_cap": 0.5}, "importance_cap must be >= 1"),
        ({"kl_in": "loss"}, "algorithm.kl_in does nothing with kl `none`: `loss`. Remove it"),
        ({"kl": "k1"}, "algorithm.kl_in cannot be `loss` with kl `k1`"),
        ({"gae_lambda": 0.9}, "algorithm.gae_lambda does nothing with advantage `grpo`"),
        ({"preset": "sapo", "clip_low": 0.1}, "set loss to `cispo` or `gspo` or `ppo`"),
        ({"overlong_penalty": 1.0}, "set overlong_buffer to more than 0"),
        ({"preset": "gspo", "aggregation": "token"}, "aggregation must be `sequence` with loss"),
        (
            {"preset": "gspo", "importance": "masked", "importance_level": "token"},
            "importance_level must be `sequence` with loss `gspo`: `token`",
        ),
        ({"preset": "gspo", "advantage": "gae"}, "advantage cannot be `gae` with loss `gspo`"),
        (
            {"preset": "gspo", "advantage": "reinforce_pp", "kl": "k1", "kl_in": "reward"},
            "advantage cannot be `reinforce_pp` with loss `gspo`",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(**keys)


@pytest.mark.parametrize(
    ("keys", "group_size", "message"),
    [
        ({"preset": "grpo"}, 1, "group_size must be >= 2 with advantage `grpo`.*: `1`"),
        ({"preset": "dr_grpo"}, 1, "group_size must be >= 2"),
        ({"preset": "rloo"}, 1, "group_size must be >= 2"),
        ({"preset": "reinforce_pp_baseline"}, 1, "group_size must be >= 2"),
        ({"preset": "reinforce_pp", "dynamic_sampling": True}, 1, "with dynamic_sampling"),
        ({"preset": "pass_at_k"}, 3, r"pass_k must be below group_size \(3\).*: `4`"),
        ({"preset": "pass_at_k"}, 4, "pass_k must be below group_size"),
    ],
)
def test_groups_must_be_large_enough(keys: dict[str, Any], group_size: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check(load(**keys), group_size=group_size, max_staleness=0, multi_epoch=False)


def test_single_responses_suit_those_without_group_baselines() -> None:
    for preset in ("ppo", "reinforce_pp"):
        assert check(load(preset=preset), group_size=1, max_staleness=3, multi_epoch=True) == []


def test_warnings() -> None:
    def warnings(*, max_staleness: int = 0, multi_epoch: bool = False, **keys: Any) -> str:
        found = check(
            load(**keys), group_size=8, max_staleness=max_staleness, multi_epoch=multi_epoch
        )
        return " ".join(found)

    assert "max_staleness `2`" in warnings(preset="reinforce", max_staleness=2)
    assert "several updates" in warnings(preset="reinforce", multi_epoch=True)
    assert warnings(preset="reinforce") == ""
    assert warnings(preset="grpo", max_staleness=4, multi_epoch=True) == ""
    assert "could learn from them" in warnings(preset="ppo", dynamic_sampling=True)
    assert "biased in the reward" in warnings(kl="k3", kl_in="reward")
    assert warnings(kl="k1", kl_in="reward") == ""
