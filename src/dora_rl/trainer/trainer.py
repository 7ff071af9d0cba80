"""The trainer that a runtime talks to: steps, versions and checkpoints, in order.

Not thread-safe. Train step `s` is taken at version `s` and makes version `s + 1`.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from dora_rl.algorithms.settings import AlgorithmSettings
from dora_rl.core.types import Version
from dora_rl.samples import Sample
from dora_rl.trainer.errors import StepRejected, TrainerError
from dora_rl.trainer.parallel import Followers, Publish, Restore, Save, Train
from dora_rl.trainer.replica import Plan, Replica
from dora_rl.trainer.report import StepReport
from dora_rl.trainer.settings import TrainSettings
from dora_rl.trainer.world import leave
from dora_rl.weights.store import WeightStore

__all__ = ["StepRejected", "StepReport", "Trainer"]


class Trainer:
    """One policy in training. Make it with `open`, and `close` it."""

    def __init__(self, replica: Replica, followers: Followers, store: WeightStore) -> None:
        self._replica = replica
        self._followers = followers
        self._store = store

    @classmethod
    def open(
        cls,
        model: Path,
        store: WeightStore,
        train: TrainSettings,
        algorithm: AlgorithmSettings,
        *,
        max_tokens: int,
        temperature: float,
        total_steps: int,
        seed: int,
    ) -> "Trainer":
        """A trainer at version 0, the policy in `model`; nothing is published yet.

        `temperature` is that of sampling: logits are divided by it. `total_steps` ends the
        schedule, and may be 0 where it is constant.
        """
        if not 0 < temperature < float("inf"):
            raise TrainerError(
                f"temperature must be > 0 and finite to train: `{temperature}`. "
                "A greedy policy has no gradient."
            )
        if train.processes > 1 and train.threads is None:
            share = max(1, (os.cpu_count() or 1) // train.processes)
            train = train.model_copy(update={"threads": share})
        plan = Plan(
            model=str(model),
            store=str(store.root),
            train=train.model_dump(mode="json"),
            algorithm=algorithm.model_dump(mode="json"),
            max_tokens=max_tokens,
            temperature=temperature,
            total_steps=total_steps,
            seed=seed,
        )
        followers = Followers.start(plan, train.processes)
        try:
            return cls(Replica(plan, followers.join()), followers, store)
        except BaseException:
            followers.close()
            leave(followers.world)
            raise

    @property
    def step(self) -> int:
        """The next step, which is also the version of the weights as they are."""
        return self._replica.step

    def train(self, step: int, samples: Sequence[Sample]) -> StepReport:
        """Take a step. Asked again for the step just taken, its report, and nothing is trained.

        Raises `StepRejected`, and is as before, if the batch cannot be trained.
        """
        last = self._replica.report
        if last is not None and step == last.step == self.step - 1:
            return last
        if step != self.step:
            raise TrainerError(
                f"step `{step}` was asked for, and the trainer is at step {self.step}. "
                "Steps are taken in order, each once."
            )
        batch = self._replica.batch(tuple(samples))
        self._followers.tell(Train(tuple(samples)))
        with self._followers.watched():
            return self._replica.take(batch)

    def publish(self, version: Version) -> str:
        """Publish the weights as they are; their digest. The same version again does nothing."""
        if version != self.step:
            raise TrainerError(
                f"version `{version}` was asked for, and the trainer has version {self.step}. "
                "A version is published before the next step is taken."
            )
        self._followers.tell(Publish())
        with self._followers.watched():
            weights = self._replica.published()
        return self._store.publish(version, weights).digest

    def save(self, directory: Path) -> None:
        """Write a checkpoint: a Hugging Face model directory that `restore` continues from."""
        self._followers.tell(Save(str(directory)))
        with self._followers.watched():
            self._replica.save(Path(directory))

    def restore(self, directory: Path) -> None:
        """Go on from a checkpoint, to the bit. Another model or other settings are refused."""
        self._followers.tell(Restore(str(directory)))
        self._replica.restore(Path(directory))

    def close(self) -> None:
        """End the other processes; the trainer must not be used again."""
        self._followers.close()
        leave(self._followers.world)
