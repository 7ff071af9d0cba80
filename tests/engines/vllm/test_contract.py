"""The real vLLM keeps the contract of engines, for what it can."""

from collections.abc import Iterator

import pytest

from tests.engines.contract import EngineContract, FailureContract, Harness, StopStringContract
from tests.engines.random_versions import AdapterModels
from tests.engines.vllm.harness import Backends, VllmHarness

pytestmark = pytest.mark.vllm


class TestVllm(EngineContract, StopStringContract, FailureContract):
    @pytest.fixture
    def harness(self, vllm_harness: Harness) -> Iterator[Harness]:
        with vllm_harness as made:
            yield made


class TestVllmAdapters(EngineContract, StopStringContract, FailureContract):
    """Versions that are LoRA adapters of one base."""

    @pytest.fixture
    def harness(self, adapters: AdapterModels, backends: Backends) -> Iterator[Harness]:
        with VllmHarness(adapters, backends) as made:
            yield made
