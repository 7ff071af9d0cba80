"""A model that all tests of runs share."""

from pathlib import Path

import pytest
import torch

from tests.models.random_models import make_model, make_tokenizer

VOCABULARY = 300


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of two layers with a tokenizer of as many tokens; token 0 ends a text."""
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("model")
    make_model(directory, "llama", seed=1, vocab_size=VOCABULARY, eos_token_id=0, bos_token_id=0)
    make_tokenizer(VOCABULARY).save(str(directory / "tokenizer.json"))
    return directory
