"""`[train]`: what is refused, and that reading it needs no torch."""

import subprocess
import sys

import pytest

from dora_rl.config import dump_toml, validate
from dora_rl.core.protocol.errors import UserError
from dora_rl.trainer.settings import TrainSettings, refusal


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
        ("device", "gpu", "device must be `auto`, `cpu`, `cuda` or `cuda:N`: `gpu`. Use `auto`"),
        ("device", "cuda:-1", "device must be `auto`, `cpu`, `cuda` or `cuda:N`: `cuda:-1`"),
        ("device", "cuda:01", "device must be `auto`, `cpu`, `cuda` or `cuda:N`: `cuda:01`"),
    ],
)
def test_what_is_wrong_is_named(key: str, value: object, message: str) -> None:
    with pytest.raises(UserError) as caught:
        validate(TrainSettings, {key: value}, "x.toml")
    assert message in str(caught.value)


def test_one_gpu_is_not_for_several_processes() -> None:
    with pytest.raises(UserError, match=r"one GPU for 2 processes: `cuda:1`. Use `cuda`, which"):
        validate(TrainSettings, {"device": "cuda:1", "processes": 2}, "x.toml")


@pytest.mark.parametrize(
    ("device", "processes", "gpus", "why"),
    [
        ("cpu", 9, 1, None),
        ("auto", 9, 0, None),
        ("auto", 2, 2, None),
        ("cuda", 1, 1, None),
        ("cuda:1", 1, 2, None),
        ("auto", 3, 2, "train.processes is more than there are GPUs: `3`; torch has 2 GPUs here"),
        ("cuda", 1, 0, "train.device is not there: `cuda`; torch has no GPUs here. Use `auto`"),
        ("cuda:2", 1, 2, "`cuda:2`; torch has 2 GPUs here. Use `auto` or `cpu`, or `cuda:0` to"),
        ("cuda", 2, 1, "`2`; torch has 1 GPU here, and each process needs its own. Lower it, or"),
    ],
)
def test_a_device_that_is_not_there_is_refused(
    device: str, processes: int, gpus: int, why: str | None
) -> None:
    found = refusal(device, processes, gpus)
    assert found is None if why is None else why in str(found)


def test_settings_reports_and_errors_need_no_torch() -> None:
    code = (
        "import sys, dora_rl.trainer.settings, dora_rl.trainer.report, dora_rl.trainer.errors;"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
