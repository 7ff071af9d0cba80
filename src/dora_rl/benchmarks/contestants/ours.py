"""An engine of this project, by its contract: all requests in, steps until it is idle.

Also runs in the environment of an engine that has its own.
"""

import math
import time
from pathlib import Path
from typing import Any

import torch

import dora_rl
from dora_rl.benchmarks.models import publish_versions
from dora_rl.engines.base import Request, Sampled, Sampling
from dora_rl.engines.embedded.settings import EngineSettings
from dora_rl.engines.kv_room import BLOCK_TOKENS
from dora_rl.engines.registry import EngineName, EngineOptions, create_engine
from dora_rl.transports.weights.shared_directory import WeightStore


class Ours:
    """An engine with `versions` versions of the model.

    They are in the store `weights`; without one they are published here, 0 being the model itself.
    """

    def __init__(
        self,
        directory: str,
        work: str,
        threads: int,
        slots: int,
        prompt_tokens: int,
        new_tokens: int,
        versions: int | None = None,
        engine: str = EngineName.EMBEDDED,
        weights: str | None = None,
        lora_rank: int | None = None,
    ) -> None:
        torch.set_num_threads(threads)
        block = BLOCK_TOKENS
        blocks = -(-prompt_tokens // block) + -(-(new_tokens + 1) // block)
        defaults = EngineSettings()
        options = EngineOptions(
            model=Path(directory),
            slots=slots,
            version_slots=versions or defaults.version_slots,
            kv_budget_tokens=slots * blocks * block,
            kv_dtype=defaults.kv_dtype,
            prefill_chunk=defaults.prefill_chunk,
            deterministic=False,
            lora_rank=lora_rank,
        )
        self._engine = create_engine(EngineName(engine), options)
        store = WeightStore(Path(weights or Path(work) / "weights"))
        if weights is None:
            publish_versions(store, Path(directory), versions or 1)
        for version in range(versions or 1):
            self._engine.install(version, store.path(version))
        self._issued = 0

    def about(self) -> dict[str, Any]:
        return {
            "version": dora_rl.__version__,
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
