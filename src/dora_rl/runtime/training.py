"""The trainer as a part of a run: performs messages, one after the other, and answers each.

A batch that the trainer rejects is remembered, so that a repeated command is answered alike.
"""

import time
from collections.abc import Iterator
from pathlib import Path

from dora_rl.core.errors import UserError
from dora_rl.core.types import GroupId
from dora_rl.runtime import messages as ms
from dora_rl.runtime.config import RunConfig
from dora_rl.trainer.errors import StepRejected
from dora_rl.trainer.trainer import Trainer
from dora_rl.weights.store import WeightStore


class TrainerPart:
    """Performs `TrainOn`, `PublishVersion` and `Save` on a trainer."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._rejected: dict[tuple[GroupId, ...], ms.Rejected] = {}

    @classmethod
    def open(
        cls, config: RunConfig, model: Path, store: WeightStore, checkpoint: Path | None = None
    ) -> "TrainerPart":
        trainer = Trainer.open(
            model,
            store,
            config.train,
            config.algorithm,
            max_tokens=config.rollout.max_tokens,
            temperature=config.rollout.temperature,
            total_steps=config.run.steps,
            seed=config.run.seed,
        )
        if checkpoint is not None:
            trainer.restore(checkpoint)
        return cls(trainer)

    def handle(self, message: ms.ToTrainer) -> Iterator[ms.FromTrainer]:
        match message:
            case ms.TrainOn():
                yield self._train(message)
            case ms.PublishVersion():
                yield self._publish(message)
            case ms.Save():
                yield self._save(message)
            case ms.Shutdown():
                self._trainer.close()

    def _train(self, message: ms.TrainOn) -> ms.FromTrainer:
        if message.groups in self._rejected:
            return self._rejected[message.groups]
        try:
            report = self._trainer.train(message.step, message.samples)
        except StepRejected as error:
            answer = ms.Rejected(message.step, message.groups, error.reason, error.trajectories)
            self._rejected[message.groups] = answer
            return answer
        except (UserError, OSError, MemoryError) as error:
            return ms.TrainingFailed(message.step, " ".join(str(error).split()))
        return ms.Trained(report.step, report.sampled_tokens, report.seconds, report.metrics)

    def _publish(self, message: ms.PublishVersion) -> ms.FromTrainer:
        start = time.perf_counter()
        try:
            digest = self._trainer.publish(message.version)
        except (UserError, OSError) as error:
            return ms.NotPublished(message.version, " ".join(str(error).split()))
        return ms.Published(message.version, digest, time.perf_counter() - start)

    def _save(self, message: ms.Save) -> ms.FromTrainer:
        try:
            self._trainer.save(Path(message.directory))
        except (UserError, OSError) as error:
            return ms.Saved(message.directory, " ".join(str(error).split()))
        return ms.Saved(message.directory)
