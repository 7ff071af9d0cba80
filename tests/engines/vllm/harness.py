"""vLLM as the contract suite makes it: a small random model in float32, on whatever processor."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dora_rl.core.protocol.types import TrajectoryId
from dora_rl.engines.base import Engine
from dora_rl.engines.registry import EngineOptions
from dora_rl.engines.vllm import create as creation
from dora_rl.engines.vllm.backend import Backend, Emitted
from dora_rl.engines.vllm.engine import VllmEngine
from tests.engines.contract import Harness
from tests.engines.random_versions import AdapterModels, Models
from tests.engines.vllm.shape import BLOCK


class Backends:
    """Engines of vLLM that no test uses now: to start one takes seconds, and it has no weights."""

    def __init__(self) -> None:
        self._idle: dict[str, list[Backend]] = {}

    def make(self, arguments: dict[str, Any]) -> Backend:
        idle = self._idle.setdefault(repr(sorted(arguments.items())), [])
        return idle.pop() if idle else _Lent(arguments, idle)


class _Lent(Backend):
    def __init__(self, arguments: dict[str, Any], idle: list[Backend]) -> None:
        super().__init__(arguments)
        self._return_to = idle

    def close(self) -> None:
        assert self.used_blocks == 0 and not self.running
        if "enable_lora" in self._arguments:
            for adapter in self._engine.list_loras():
                self._engine.remove_lora(adapter)
        self._return_to.append(self)


class VllmHarness(Harness):
    kv_unit = BLOCK
    exact = False
    tolerance = 1e-3

    def __init__(self, models: Models, backends: Backends) -> None:
        super().__init__()
        self.models = models
        self.backends = backends
        self.vocab_size = models.config.vocab_size
        self.context = models.config.context
        (self.eos,) = models.config.eos_token_ids
        self.most_versions = 1 if models.base is None else 4

    def _make(self, *, deterministic: bool, **settings: Any) -> VllmEngine:
        """As `create` makes it, with an engine of vLLM that is there already, if one is."""
        options = EngineOptions(
            model=self.models.directory,
            kv_dtype="float32",
            deterministic=False,
            extra={"block_size": BLOCK},
            lora_rank=None if self.models.base is None else AdapterModels.RANK,
            **{"kv_budget_tokens": 64 * BLOCK, "prefill_chunk": 64, **settings},
        )
        plain = creation.Backend
        creation.Backend = self.backends.make  # type: ignore[misc,assignment]
        try:
            return creation.create(options)
        finally:
            creation.Backend = plain  # type: ignore[misc]

    def weights(self, n: int) -> Path:
        return self.models.path(n)

    def decode(self, tokens: Sequence[int]) -> str:
        return self.models.tokenizer.decode(tokens)

    def fail(self, engine: Engine, trajectory: TrajectoryId) -> None:
        """Its next token has no log-probability, as where the logits are no numbers."""
        assert isinstance(engine, VllmEngine)
        request, step = engine._live[trajectory].id, engine.backend.step

        def broken() -> list[Emitted]:
            engine.backend.step = step  # type: ignore[method-assign]
            return [
                one._replace(logprob=float("nan")) if one.request == request else one
                for one in step()
            ]

        engine.backend.step = broken  # type: ignore[method-assign]

    def fail_load(self, engine: Engine) -> None:
        """The next version finds no memory when vLLM loads it."""
        assert isinstance(engine, VllmEngine)
        backend, name = engine.backend, "reload" if self.models.base is None else "add_adapter"
        plain = getattr(backend, name)

        def broken(weights: object) -> None:
            setattr(backend, name, plain)
            raise RuntimeError("asked not to load by a test")

        setattr(backend, name, broken)
