"""The embedded engine as the contract suite and the tests here make it: small random models."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dora_rl.core.protocol.types import TrajectoryId
from dora_rl.engines.base import Engine
from dora_rl.engines.embedded import EmbeddedEngine, EngineSettings, versions
from dora_rl.engines.speculation import Speculation
from tests.engines.contract import Harness
from tests.engines.embedded.drafts import look_ahead, spoilt
from tests.engines.random_versions import Models

# What brings weights into the form of torch's products, and into that of the native kernels.
_FULL, _ADAPTERS = ("build", "NativeDecoder"), ("build_adapter", "NativeAdapter")


class EmbeddedHarness(Harness):
    kv_unit = 4

    def __init__(
        self,
        models: Models,
        *,
        deterministic: bool = True,
        native_kernels: bool | None = None,
        speculates: bool = False,
    ) -> None:
        """With `speculates`, engines of several slots have drafts, right and wrong ones.

        Those of one slot do not: the suite compares with them.
        """
        super().__init__()
        self.models = models
        self.vocab_size = models.config.vocab_size
        self.context = models.config.context
        (self.eos,) = models.config.eos_token_ids
        self.exact = deterministic
        self.tolerance = 0.0 if deterministic else 1e-4
        self._deterministic = deterministic
        self._native_kernels = native_kernels
        self._speculates = speculates
        self.one_token_a_step = not speculates

    def _make(self, *, deterministic: bool, **settings: Any) -> Engine:
        speculates = self._speculates and settings["slots"] > 1
        engine = EmbeddedEngine(
            self.models.config,
            EngineSettings(
                block_tokens=self.kv_unit,
                deterministic=deterministic and self._deterministic,
                native_kernels=self._native_kernels,
                speculation=Speculation.ON if speculates else Speculation.OFF,
                **{"kv_budget_tokens": 1024, **settings},
            ),
            self.models.tokenizer,
            self.models.base,
        )
        if speculates:
            look_ahead(engine, spoilt(self.vocab_size))
        return engine

    def weights(self, n: int) -> Path:
        return self.models.path(n)

    def decode(self, tokens: Sequence[int]) -> str:
        return self.models.tokenizer.decode(tokens)

    def fail(self, engine: Engine, trajectory: TrajectoryId) -> None:
        """Poison the KV of one trajectory: its next logits are no numbers."""
        assert isinstance(engine, EmbeddedEngine)
        sequence = engine._sequence(trajectory)
        engine._pool.values_LNKTD[:, sequence.kv.blocks[0]] = torch.nan

    def fail_load(self, engine: Engine, error: type[Exception] = RuntimeError) -> None:
        """The next version finds no memory when its weights are brought into their form."""
        names = _FULL if self.models.base is None else _ADAPTERS
        plain = {name: getattr(versions, name) for name in names}

        def fail(*_: object, **__: object) -> None:
            for name, was in plain.items():
                setattr(versions, name, was)
            raise error("asked not to load by a test")

        for name in names:
            setattr(versions, name, fail)
