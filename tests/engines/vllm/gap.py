"""The gap between the log-probabilities of vLLM and those of the trainer, for the same weights.

    PYTHONPATH=src .venv-vllm/bin/python -m tests.engines.vllm.gap MODEL [DTYPE]

measures it for a model directory, in both dtypes of vLLM; DTYPE is the trainer's.
"""

import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from dora_rl.algorithms.settings import AlgorithmSettings
from dora_rl.engines.base import Sampling
from dora_rl.engines.registry import EngineOptions
from dora_rl.engines.vllm.environment import variables
from dora_rl.models.config import read_config
from dora_rl.samples import Sample
from dora_rl.trainer.report import StepReport
from dora_rl.trainer.settings import TrainSettings
from dora_rl.trainer.trainer import Trainer
from dora_rl.transports.weights.shared_directory import WeightStore
from tests.trainer.rollouts import Rollouts

GROUP_SIZE = 4
MAX_TOKENS = 64


def open_trainer(
    model: Path, store: Path, algorithm: dict[str, Any] | None = None, **train: Any
) -> Trainer:
    """At version 0. Nothing is clipped, so that moments of the optimizer are gradients."""
    return Trainer.open(
        model,
        WeightStore(store),
        TrainSettings(**{"max_grad_norm": 1e9, "behaviour": "recompute", **train}),
        AlgorithmSettings(**(algorithm or {})),
        max_tokens=MAX_TOKENS,
        temperature=1.0,
        total_steps=1,
        seed=0,
    )


def generate(model: Path, store: Path, dtype: str, num_groups: int) -> list[Sample]:
    """What vLLM samples in this dtype from version 0 of the store; the reward is arbitrary."""
    from dora_rl.engines.vllm.create import create

    draw, size = random.Random(0), read_config(model).vocab_size
    prompts = [tuple(draw.randrange(1, size) for _ in range(12)) for _ in range(num_groups)]
    engine = create(
        EngineOptions(
            model=model,
            slots=16,
            version_slots=1,
            kv_budget_tokens=4096,
            kv_dtype="float32",
            prefill_chunk=64,
            deterministic=False,
            extra={"dtype": dtype, "context": 256},
        )
    )
    try:
        sampling = Sampling(max_tokens=MAX_TOKENS, ignore_eos=True)
        rollouts = Rollouts(engine, store, sampling, GROUP_SIZE)
        return rollouts.generate(0, prompts, lambda tokens: float(sum(tokens) % 3))
    finally:
        engine.close()


def step_on(
    model: Path, store: Path, samples: list[Sample], dtype: str, **algorithm: Any
) -> StepReport:
    """What a first step on these samples says; the trainer computes in this dtype."""
    trainer = open_trainer(model, store, algorithm, dtype=dtype)
    try:
        return trainer.train(0, samples)
    finally:
        trainer.close()


def main(model: Path, dtype: str = "float32") -> None:
    os.environ |= variables("cpu")
    with tempfile.TemporaryDirectory() as directory:
        store = Path(directory)
        trainer = open_trainer(model, store)
        trainer.publish(0)
        trainer.close()
        for engine in ("bfloat16", "float32"):
            samples = generate(model, store, engine, num_groups=4)
            found = step_on(model, store, samples, dtype).metrics
            print(
                f"vLLM {engine}, trainer {dtype}: mean {found['logprob_gap_mean']:.2g}, "
                f"max {found['logprob_gap_max']:.2g}",
                flush=True,
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
