"""The real vLLM keeps the contract of engines, for what it can."""

from collections.abc import Iterator

import pytest

from tests.engines.contract import EngineContract, FailureContract, Harness, StopStringContract

pytestmark = pytest.mark.vllm


class TestVllm(EngineContract, StopStringContract, FailureContract):
    @pytest.fixture
    def harness(self, vllm_harness: Harness) -> Iterator[Harness]:
        with vllm_harness as made:
            yield made
