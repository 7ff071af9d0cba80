"""The embedded engine keeps the contract: bit for bit in the deterministic mode."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.contract import EngineContract, FailureContract, Harness, StopStringContract
from tests.engines.embedded.harness import EmbeddedHarness
from tests.engines.random_versions import AdapterModels, Models
from tests.models.kernels import needs_kernels


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    root: Path = tmp_path_factory.mktemp("models")
    return Models(root, "qwen3")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return AdapterModels(tmp_path_factory.mktemp("adapters"), "qwen3")


class TestDeterministic(EngineContract, StopStringContract, FailureContract):
    @pytest.fixture
    def harness(self, models: Models) -> Iterator[Harness]:
        with EmbeddedHarness(models) as made:
            yield made


class TestNormal(EngineContract, StopStringContract, FailureContract):
    @pytest.fixture
    def harness(self, models: Models) -> Iterator[Harness]:
        with EmbeddedHarness(models, deterministic=False, native_kernels=False) as made:
            yield made


@needs_kernels
class TestNative(EngineContract, StopStringContract, FailureContract):
    @pytest.fixture
    def harness(self, models: Models) -> Iterator[Harness]:
        with EmbeddedHarness(models, native_kernels=True) as made:
            yield made


@needs_kernels
class TestSpeculating(EngineContract, StopStringContract, FailureContract):
    """With drafts in every step, against engines without."""

    @pytest.fixture
    def harness(self, models: Models) -> Iterator[Harness]:
        with EmbeddedHarness(models, native_kernels=True, speculates=True) as made:
            yield made


@pytest.mark.slow
class TestSpeculatingOtherwise(EngineContract, StopStringContract, FailureContract):
    """The same by torch's operations, and for adapters."""

    @pytest.fixture(
        params=[
            pytest.param((False, True, False), id="deterministic"),
            pytest.param((False, False, False), id="normal"),
            pytest.param((True, True, False), id="adapters-deterministic"),
            pytest.param((True, True, True), id="adapters-native", marks=needs_kernels),
        ]
    )
    def harness(
        self, models: Models, adapters: Models, request: pytest.FixtureRequest
    ) -> Iterator[Harness]:
        lora, exact, native = request.param
        with EmbeddedHarness(
            adapters if lora else models,
            deterministic=exact,
            native_kernels=native,
            speculates=True,
        ) as made:
            yield made


@pytest.mark.slow
class TestAdapters(EngineContract, StopStringContract, FailureContract):
    """Versions that are LoRA adapters of one base."""

    @pytest.fixture(
        params=[
            pytest.param((True, False), id="deterministic"),
            pytest.param((False, False), id="normal"),
            pytest.param((True, True), id="native", marks=needs_kernels),
        ]
    )
    def harness(self, adapters: Models, request: pytest.FixtureRequest) -> Iterator[Harness]:
        exact, native = request.param
        with EmbeddedHarness(adapters, deterministic=exact, native_kernels=native) as made:
            yield made
