"""The embedded engine, by its contract: all requests in, steps until it is idle."""

import importlib.metadata
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dora_rl.benchmarks.models import publish_versions
from dora_rl.engines.base import Request, Sampled, Sampling
from dora_rl.engines.embedded import EmbeddedEngine, EngineSettings
from dora_rl.transports.weights.shared_directory import WeightStore


class Ours:
    """An engine with `versions` versions of the model, 0 being the model itself."""

    def __init__(
        self,
        directory: str,
        work: str,
        threads: int,
        slots: int,
        prompt_tokens: int,
        new_tokens: int,
        versions: int | None = None,
    ) -> None:
        torch.set_num_threads(threads)
        settings = EngineSettings(slots=slots)
        block = settings.block_tokens
        blocks = -(-prompt_tokens // block) + -(-(new_tokens + 1) // block)
        settings = replace(
            settings,
            kv_budget_tokens=slots * blocks * block,
            version_slots=versions or settings.version_slots,
        )
        self._engine = EmbeddedEngine.for_model(directory, settings)
        store = WeightStore(Path(work) / "weights")
        publish_versions(store, Path(directory), versions or 1)
        for version in range(versions or 1):
            self._engine.install(version, store.path(version))
        self._issued = 0

    def about(self) -> dict[str, Any]:
        return {
            "version": importlib.metadata.version("dora-rl"),
            "torch": str(torch.__version__),
            "threads": torch.get_num_threads(),
            "notes": [],
        }

    def generate(
        self, prompts: list[list[int]], new_tokens: int, versions: int = 1
    ) -> dict[str, Any]:
        """A batch from fresh prompts; its rows are split evenly over the first `versions`."""
        sampling = Sampling(max_tokens=new_tokens, ignore_eos=True)
        engine = self._engine
        logprobs: list[float] = []
        began = time.perf_counter()
        for row, prompt in enumerate(prompts):
            version = row * versions // len(prompts)
            engine.submit(Request(self._issued, version, tuple(prompt), sampling))
            self._issued += 1
        while not engine.idle:
            for output in engine.step():
                if not isinstance(output, Sampled):
                    raise RuntimeError(f"the engine was not to do this: {output}")
                logprobs.extend(output.logprobs)
        seconds = time.perf_counter() - began
        return {
            "seconds": seconds,
            "tokens": len(logprobs),
            "logprobs": sum(math.isfinite(value) for value in logprobs),
        }


def load(**settings: Any) -> Ours:
    return Ours(**settings)
