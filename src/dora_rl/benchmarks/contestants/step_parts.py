"""The parts of a train step, each alone: decoding in a batch of so many rows, training a batch.

Trains on the right responses to a workload's prompts, and decodes those prompts.
"""

import time
from pathlib import Path
from typing import Any

import torch

from dora_rl.core.protocol.types import Segment
from dora_rl.engines.base import Request, Sampled, Sampling
from dora_rl.runtime.prepare.plan import prepare, read_config
from dora_rl.runtime.workers.engines import make_engine
from dora_rl.samples import Sample, Trajectory
from dora_rl.tasks import chains
from dora_rl.trainer.trainer import Trainer
from dora_rl.transports.weights.registry import make_publisher
from dora_rl.transports.weights.shared_directory import WeightStore

_WARM_STEPS = 8
_LOGPROB = -0.1  # of a token: training takes as long whatever it is


class StepParts:
    """A trainer and an engine of a configuration, both at version 0."""

    def __init__(self, config: dict[str, Any], work: str) -> None:
        torch.set_num_threads(1)
        plan = prepare(read_config(config), out=Path(work) / "run")
        self._task, self._config = plan.task, plan.config
        store = Path(work) / "weights"
        self._trainer = Trainer.open(
            plan.model,
            make_publisher(self._config.runtime.weights, store),
            self._config.train,
            self._config.algorithm,
            max_tokens=self._config.rollout.max_tokens,
            temperature=self._config.rollout.temperature,
            total_steps=0,
            seed=self._config.run.seed,
            lora=self._config.model.lora,
        )
        self._trainer.publish(0)
        self._engine = make_engine(self._config, plan.model)
        self._engine.install(0, WeightStore(store).path(0))
        self._issued = 0

    def decode(self, rows: int, seconds: float) -> dict[str, float]:
        """Keep so many rows in the batch for a while; core-seconds and tokens of that time."""
        torch.set_num_threads(1)
        first = self._issued
        for _ in range(rows):
            self._submit()
        for _ in range(_WARM_STEPS):
            self._step()
        began, tokens = time.process_time(), 0
        while time.process_time() - began < seconds:
            tokens += self._step()
        core_s = time.process_time() - began
        for trajectory in range(first, self._issued):
            self._engine.cancel(trajectory)
        return {"core_s": core_s, "tokens": tokens}

    def train(self, groups: int, threads: int, steps: int) -> dict[str, float]:
        """Train on so many batches; the least seconds and core-seconds for a token of them."""
        torch.set_num_threads(threads)
        seconds, core_s = [], []
        for number in range(steps):
            samples = self._samples(number * groups, groups)
            tokens = sum(len(sample.trajectory.tokens) for sample in samples)
            began, began_cpu = time.perf_counter(), time.process_time()
            self._trainer.train(self._trainer.step, samples)
            seconds.append((time.perf_counter() - began) / tokens)
            core_s.append((time.process_time() - began_cpu) / tokens)
        return {"token_s": min(seconds), "token_core_s": min(core_s)}

    def _submit(self) -> None:
        [prompt] = self._task.stream.read(self._issued, 1)
        sampling = Sampling(max_tokens=self._config.rollout.max_tokens)
        tokens = tuple(self._task.encoder.encode(prompt))
        self._engine.submit(Request(self._issued, 0, tokens, sampling))
        self._issued += 1

    def _step(self) -> int:
        tokens = 0
        for output in self._engine.step():
            if not isinstance(output, Sampled):
                raise RuntimeError(f"the engine was not to do this: {output}")
            tokens += len(output.tokens)
            if output.finish is not None:
                self._submit()
        return tokens

    def _samples(self, first: int, groups: int) -> list[Sample]:
        """A batch as the trainer gets it; siblings have different rewards, for a gradient."""
        size = self._config.orchestration.group_size
        encode = self._task.encoder
        samples = []
        for group, prompt in enumerate(self._task.stream.read(first, groups)):
            read = tuple(encode.encode(prompt))
            text = chains.solution(prompt.example["prompt"])
            written = tuple(encode.encode_text(text))
            for member in range(size):
                trajectory = Trajectory(
                    id=group * size + member,
                    group=group,
                    version=0,
                    prompt=read,
                    tokens=written,
                    logprobs=(_LOGPROB,) * len(written),
                    segments=(Segment(0, "", len(written)),),
                    truncated=False,
                )
                samples.append(Sample(trajectory=trajectory, reward=float(member % 2)))
        return samples


def load(**settings: Any) -> StepParts:
    return StepParts(**settings)
