"""What the trainer records of a version when it publishes: what its weights say of the probe."""

from pathlib import Path

import pytest
import torch

from dora_rl.models.config import read_config
from dora_rl.trainer.model import load
from dora_rl.trainer.settings import Dtype, TrainSettings
from dora_rl.weights.fingerprint import probe
from tests.engines.random_versions import fingerprint_of
from tests.models.random_models import make_model, random_model

SHAPE = {"vocab_size": 60, "max_position_embeddings": 64}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "llama", seed=3, **SHAPE)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_it_is_that_of_transformers_at_temperature_1(model: Path, temperature: float) -> None:
    policy, _ = load(model, TrainSettings(dtype=Dtype.FLOAT32), temperature)
    found = policy.fingerprint()
    assert found is not None
    assert found.tokens == probe(read_config(model).vocab_size)
    expected = fingerprint_of(random_model("llama", seed=3, **SHAPE))
    assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
    assert found.dtype == "float32"
    assert found.distance(expected.logprobs) < 1e-5


def test_it_says_in_what_it_was_computed(model: Path) -> None:
    policy, _ = load(model, TrainSettings(dtype=Dtype.BFLOAT16), 1.0)
    found = policy.fingerprint()
    assert found is not None and found.dtype == "bfloat16"


def test_weights_that_give_no_number_have_none(model: Path) -> None:
    policy, _ = load(model, TrainSettings(dtype=Dtype.FLOAT32), 1.0)
    with torch.no_grad():
        next(policy.parameters()).fill_(torch.nan)
    assert policy.fingerprint() is None
