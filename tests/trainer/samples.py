"""Samples and small trainers that the tests of the trainer share."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from dora_rl.algorithms.settings import AlgorithmSettings
from dora_rl.core.protocol.types import Segment
from dora_rl.samples import Sample, Span, Trajectory
from dora_rl.trainer.settings import LoraSettings, TrainSettings
from dora_rl.trainer.trainer import Trainer
from dora_rl.transports.weights.shared_directory import WeightStore

VOCAB = 97


def sample(
    trajectory: int,
    prompt: tuple[int, ...] = (3, 4, 5),
    tokens: tuple[int, ...] = (6, 7, 8, 9),
    *,
    group_size: int = 4,
    reward: float | None = None,
    version: int = 0,
    observed: tuple[Span, ...] = (),
    **other: Any,
) -> Sample:
    """One sample; what is not said is plausible."""
    hidden = {i for start, end in observed for i in range(start, end)}
    logprobs = tuple(0.0 if i in hidden else -3.0 - 0.1 * i for i in range(len(tokens)))
    fields = {
        "logprobs": logprobs,
        "segments": (Segment(version, "digest", len(tokens) - len(hidden)),),
        "truncated": False,
        **other,
    }
    return Sample(
        trajectory=Trajectory(
            id=trajectory,
            group=trajectory // group_size,
            version=version,
            prompt=prompt,
            tokens=tokens,
            observed=observed,
            **fields,
        ),
        reward=float(trajectory % 3) if reward is None else reward,
    )


def batch_of(seed: int, groups: int = 3, group_size: int = 4, **other: Any) -> tuple[Sample, ...]:
    """Random samples of different lengths."""
    draw = random.Random(seed)

    def tokens(least: int, most: int) -> tuple[int, ...]:
        return tuple(draw.randrange(VOCAB) for _ in range(draw.randint(least, most)))

    return tuple(
        sample(i, tokens(1, 8), tokens(1, 20), group_size=group_size, reward=draw.random(), **other)
        for i in range(groups * group_size)
    )


@contextmanager
def opened(
    model: Path,
    store: Path,
    algorithm: dict[str, Any] | None = None,
    *,
    lora: LoraSettings | None = None,
    **train: Any,
) -> Iterator[Trainer]:
    """A trainer with these settings; closed at the end."""
    trainer = Trainer.open(
        model,
        WeightStore(store),
        TrainSettings(**{"learning_rate": 1e-3, **train}),
        AlgorithmSettings(**(algorithm or {"preset": "grpo"})),
        max_tokens=64,
        temperature=0.9,
        total_steps=10,
        seed=1,
        lora=lora,
    )
    try:
        yield trainer
    finally:
        trainer.close()


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """A copy of the weights as they are."""
    return {name: tensor.clone() for name, tensor in trainer._replica.published().items()}


def all_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """A copy of all that a step changes: float32 weights, value head, moments and counts."""
    replica = trainer._replica
    counts = torch.tensor([replica.step, replica._optimizer.count])
    tensors = {**dict(replica.policy.named_parameters()), **replica._optimizer.state()}
    return {"counts": counts} | {name: t.detach().clone() for name, t in tensors.items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """The same names and bits."""

    def bits(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.reshape(-1).view(torch.uint8)

    return left.keys() == right.keys() and all(
        torch.equal(bits(left[name]), bits(right[name])) for name in left
    )
