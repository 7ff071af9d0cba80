"""The trainer as a worker of a run: performs messages, one after the other, and answers each.

A batch that the trainer rejects is remembered, so that a repeated command is answered alike.
Checkpoints are written while it continues: `poll` tells when one is there.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from dora_rl.config.text import one_line
from dora_rl.core.protocol.errors import UserError
from dora_rl.core.protocol.types import GroupId
from dora_rl.runtime.config import RunConfig
from dora_rl.runtime.control import messages as ms
from dora_rl.samples import Sample, unpack
from dora_rl.store.rundir import checkpoint_path
from dora_rl.trainer.checkpoint import sweep
from dora_rl.trainer.checkpoint_writer import CheckpointWriter
from dora_rl.trainer.errors import StepRejected
from dora_rl.trainer.progress import nothing
from dora_rl.trainer.trainer import Trainer
from dora_rl.transports.samples import SampleSource
from dora_rl.transports.weights import WeightPublisher


class TrainerWorker:
    """Performs `TrainOn`, `Redo`, `PublishVersion` and `Save` on a trainer.

    Samples come from `samples`; `checkpoints` is the directory that those of the run are in.
    """

    def __init__(self, trainer: Trainer, samples: SampleSource, checkpoints: Path) -> None:
        self._trainer = trainer
        self._samples = samples
        self._checkpoints = checkpoints
        self._rejected: dict[tuple[GroupId, ...], ms.Rejected] = {}
        self._saves: deque[tuple[int, CheckpointWriter]] = (
            deque()
        )  # not yet reported, the first first
        self._swept = False

    @classmethod
    def open(
        cls,
        config: RunConfig,
        model: Path,
        weights: WeightPublisher,
        samples: SampleSource,
        checkpoints: Path,
        checkpoint: int | None = None,
        progress: Callable[[], None] = nothing,
    ) -> "TrainerWorker":
        """`checkpoint` is the step to begin after, if it is not the model itself.

        `progress` is called often during whatever takes long; see `Trainer.progress`.
        """
        trainer = Trainer.open(
            model,
            weights,
            config.train,
            config.algorithm,
            max_tokens=config.rollout.max_tokens,
            temperature=config.rollout.temperature,
            total_steps=config.run.steps,
            seed=config.run.seed,
            lora=config.model.lora,
            progress=progress,
        )
        try:
            if checkpoint is not None:
                trainer.restore(checkpoint_path(checkpoints, checkpoint))
        except BaseException:
            trainer.close()
            raise
        return cls(trainer, samples, checkpoints)

    def handle(self, message: ms.ToTrainer) -> Iterator[ms.FromTrainer]:
        """Perform a message; its answers, but for `Saved`, which comes by `poll`."""
        match message:
            case ms.TrainOn():
                yield self._train(message)
            case ms.Redo():
                yield ms.Redone(message.step, self._redo(message))
            case ms.PublishVersion():
                yield self._publish(message)
            case ms.Save():
                yield from self._save(message)
            case ms.LendThreads():
                pass  # too late: the step that they were lent for is taken
            case ms.Shutdown():
                self._trainer.close()

    def poll(self) -> Iterator[ms.FromTrainer]:
        """`Saved` for each checkpoint that has been written, or has failed, since the last call."""
        while self._saves and self._saves[0][1].done:
            step, saving = self._saves.popleft()
            yield ms.Saved(step, saving.failure)

    def finish_saves(self) -> Iterator[ms.FromTrainer]:
        """The same, after waiting for all of them."""
        for _, saving in self._saves:
            saving.wait()
        yield from self.poll()

    def _train(self, message: ms.TrainOn) -> ms.FromTrainer:
        if message.groups in self._rejected:
            return self._rejected[message.groups]
        try:
            report = self._trainer.train(message.step, self._read(message))
        except StepRejected as error:
            answer = ms.Rejected(message.step, message.groups, error.reason, error.trajectories)
            self._rejected[message.groups] = answer
            return answer
        except (UserError, OSError, MemoryError) as error:
            return ms.TrainingFailed(message.step, _reason(error))
        return ms.Trained(report.step, report.sampled_tokens, report.seconds, report.metrics)

    def _redo(self, message: ms.Redo) -> str | None:
        """Why the step could not be taken again, if so."""
        if message.step < self._trainer.step:
            return None  # the checkpoint is from after it
        try:
            self._trainer.train(message.step, self._read(message))
        except (StepRejected, UserError, OSError, MemoryError) as error:
            return _reason(error)
        return None

    def _read(self, message: ms.TrainOn | ms.Redo) -> tuple[Sample, ...]:
        """The samples of a batch, with their tokens."""
        return tuple(
            sample.resolve(unpack(self._samples.get(sample.trajectory.content)))
            for sample in message.samples
        )

    def _publish(self, message: ms.PublishVersion) -> ms.FromTrainer:
        start = time.perf_counter()
        try:
            digest = self._trainer.publish(message.version)
        except (UserError, OSError) as error:
            return ms.NotPublished(message.version, _reason(error))
        return ms.Published(message.version, digest, time.perf_counter() - start)

    def _save(self, message: ms.Save) -> Iterator[ms.FromTrainer]:
        self._sweep()
        try:
            saving = self._trainer.begin_save(checkpoint_path(self._checkpoints, message.step))
        # torch, too, runs out of memory for the copy: that is its RuntimeError.
        except (UserError, OSError, MemoryError, RuntimeError) as error:
            yield ms.Saved(message.step, _reason(error))
        else:
            self._saves.append((message.step, saving))

    def _sweep(self) -> None:
        """Once: this is the only trainer of its run, so what is unfinished there is nobody's."""
        if not self._swept:
            self._swept = True
            with suppress(UserError):
                sweep(self._checkpoints)


def _reason(error: BaseException) -> str:
    return one_line(error) or type(error).__name__
