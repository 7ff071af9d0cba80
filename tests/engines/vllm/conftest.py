"""The real vLLM, in its own environment: `make test-vllm`. Elsewhere these tests are left out."""

import importlib.util
import os
from collections.abc import Iterator

import pytest

from dora_rl.engines.vllm.environment import variables

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    os.environ |= variables("cpu")
    from tests.engines.random_versions import AdapterModels, Models
    from tests.engines.vllm.harness import Backends, VllmHarness
    from tests.engines.vllm.shape import SHAPE

    @pytest.fixture(scope="session")
    def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
        return Models(tmp_path_factory.mktemp("models"), "llama", **SHAPE)

    @pytest.fixture(scope="session")
    def adapters(tmp_path_factory: pytest.TempPathFactory) -> AdapterModels:
        return AdapterModels(tmp_path_factory.mktemp("adapters"), "llama", **SHAPE)

    @pytest.fixture(scope="session")
    def backends() -> Backends:
        return Backends()

    @pytest.fixture
    def vllm_harness(models: Models, backends: Backends) -> Iterator[VllmHarness]:
        yield VllmHarness(models, backends)
