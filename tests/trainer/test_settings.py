"""`[train]`: what is refused, and that reading it needs no torch."""

import subprocess
import sys

import pytest

from dora_rl.config import dump_toml, validate
from dora_rl.core.errors import UserError
from dora_rl.trainer.settings import TrainSettings


def test_the_defaults_come_back_from_what_is_saved() -> None:
    settings = TrainSettings(schedule="cosine", betas=(0.9, 0.95), threads=2)
    assert "cosine" in dump_toml(settings)
    assert validate(TrainSettings, settings.model_dump(mode="json"), "x.toml") == settings


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("learning_rate", -1.0, "learning_rate must be >= 0.0: `-1.0`. Use 0 to train nothing."),
        ("betas", [0.9, 1.0], "betas must be in [0, 1): `0.9, 1.0`"),
        ("minibatches", 0, "minibatches must be >= 1: `0`"),
        ("behaviour", "guess", "behaviour must be"),
        ("token_budgets", 5, "token_budget"),
    ],
)
def test_what_is_wrong_is_named(key: str, value: object, message: str) -> None:
    with pytest.raises(UserError) as caught:
        validate(TrainSettings, {key: value}, "x.toml")
    assert message in str(caught.value)


def test_settings_reports_and_errors_need_no_torch() -> None:
    code = (
        "import sys, dora_rl.trainer.settings, dora_rl.trainer.report, dora_rl.trainer.errors;"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
