"""Real samples: what an engine generates from a published version."""

from collections.abc import Callable
from pathlib import Path

from dora_rl.core.protocol.types import Segment
from dora_rl.engines.base import Engine, FinishReason, Request, Sampled, Sampling
from dora_rl.engines.embedded import EmbeddedEngine, EngineSettings
from dora_rl.samples import Sample, Trajectory
from dora_rl.transports.weights.shared_directory import WeightStore


def embedded(model: Path) -> EmbeddedEngine:
    settings = EngineSettings(slots=16, version_slots=1, kv_budget_tokens=4096)
    return EmbeddedEngine.for_model(model, settings)


class Rollouts:
    """An engine that generates groups from the versions of a store."""

    def __init__(self, engine: Engine, store: Path, sampling: Sampling, group_size: int) -> None:
        self._engine = engine
        self._store = WeightStore(store)
        self._sampling = sampling
        self._group_size = group_size

    def generate(
        self,
        version: int,
        prompts: list[tuple[int, ...]],
        reward: Callable[[tuple[int, ...]], float],
    ) -> list[Sample]:
        """A group for each prompt; ids differ between versions, and so does the noise."""
        digest = self._engine.install(version, self._store.path(version))
        first = version * len(prompts) * self._group_size
        requests = {}
        for i in range(len(prompts) * self._group_size):
            prompt = prompts[i // self._group_size]
            requests[first + i] = Request(first + i, version, prompt, self._sampling, seed=7)
            self._engine.submit(requests[first + i])
        tokens: dict[int, list[int]] = {i: [] for i in requests}
        logprobs: dict[int, list[float]] = {i: [] for i in requests}
        truncated = {}
        while not self._engine.idle:
            for output in self._engine.step():
                assert isinstance(output, Sampled)
                tokens[output.trajectory] += output.tokens
                logprobs[output.trajectory] += output.logprobs
                truncated[output.trajectory] = output.finish is not FinishReason.STOP_TOKEN
        self._engine.evict(version)
        return [
            Sample(
                trajectory=Trajectory(
                    id=i,
                    group=i // self._group_size,
                    version=version,
                    prompt=request.prompt,
                    tokens=tuple(tokens[i]),
                    logprobs=tuple(logprobs[i]),
                    segments=(Segment(version, digest, len(tokens[i])),),
                    truncated=truncated[i],
                ),
                reward=reward(tuple(tokens[i])),
            )
            for i, request in requests.items()
        ]
