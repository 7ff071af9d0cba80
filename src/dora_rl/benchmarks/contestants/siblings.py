"""Groups of responses through an engine with few slots, with speculation and without.

Both engines hold the same weights. What a group writes must come out the same.
"""

import time
from pathlib import Path
from typing import Any

import torch

from dora_rl.benchmarks.models import publish_versions
from dora_rl.engines.base import Request, Sampled, Sampling
from dora_rl.engines.embedded.engine import EmbeddedEngine
from dora_rl.engines.embedded.settings import EngineSettings
from dora_rl.engines.speculation import Speculation
from dora_rl.transports.weights.shared_directory import WeightStore


class Siblings:
    """Engines of each number of slots and each way, made when they are first asked for."""

    def __init__(self, directory: str, work: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self._directory = Path(directory)
        self._store = WeightStore(Path(work) / "weights")
        publish_versions(self._store, self._directory, 1)
        self._engines: dict[tuple[int, str], EmbeddedEngine] = {}

    def respond(
        self, prompt: list[int], group_size: int, slots: int, max_tokens: int, speculation: str
    ) -> dict[str, Any]:
        """A group of responses to a prompt, as soon as there are slots for them."""
        engine = self._engine(slots, speculation)
        before, steps = engine.load(), 0
        written: dict[int, list[int]] = {number: [] for number in range(group_size)}
        sampling = Sampling(max_tokens=max_tokens)
        for number in written:
            engine.submit(Request(number, 0, tuple(prompt), sampling, seed=len(prompt)))
        began = time.process_time()
        while not engine.idle:
            steps += 1
            for output in engine.step():
                if not isinstance(output, Sampled):
                    raise RuntimeError(f"the engine was not to do this: {output}")
                written[output.trajectory] += output.tokens
        seconds = time.process_time() - began
        after = engine.load()
        return {
            "seconds": seconds,
            "steps": steps,
            "written": list(written.values()),
            "proposed": after.proposed_tokens - before.proposed_tokens,
            "accepted": after.accepted_tokens - before.accepted_tokens,
        }

    def _engine(self, slots: int, speculation: str) -> EmbeddedEngine:
        if (slots, speculation) not in self._engines:
            settings = EngineSettings(
                slots=slots, version_slots=1, speculation=Speculation(speculation)
            )
            engine = EmbeddedEngine.for_model(self._directory, settings)
            engine.install(0, self._store.path(0))
            self._engines[slots, speculation] = engine
        return self._engines[slots, speculation]


def load(**settings: Any) -> Siblings:
    return Siblings(**settings)
