"""A model that all tests of runs share."""

from pathlib import Path

import pytest
import torch

from tests.runtime.harness import make_tiny


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_tiny(tmp_path_factory.mktemp("model"))
