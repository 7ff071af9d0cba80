"""The trainer as a part of a run: performs messages, one after the other, and answers each.

A batch that the trainer rejects is remembered, so that a repeated command is answered alike.
Checkpoints are written while it goes on: `poll` tells when one is there.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from dora_rl.core.errors import UserError
from dora_rl.core.types import GroupId
from dora_rl.runtime import messages as ms
from dora_rl.runtime.config import RunConfig
from dora_rl.trainer.checkpoint import sweep
from dora_rl.trainer.errors import StepRejected
from dora_rl.trainer.progress import nothing
from dora_rl.trainer.saving import Saving
from dora_rl.trainer.trainer import Trainer
from dora_rl.weights.store import WeightStore


class TrainerPart:
    """Performs `TrainOn`, `Redo`, `PublishVersion` and `Save` on a trainer."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._rejected: dict[tuple[GroupId, ...], ms.Rejected] = {}
        self._saves: deque[tuple[str, Saving]] = deque()  # not yet reported, the first first
        self._swept: set[Path] = set()

    @classmethod
    def open(
        cls,
        config: RunConfig,
        model: Path,
        store: WeightStore,
        checkpoint: Path | None = None,
        progress: Callable[[], None] = nothing,
    ) -> "TrainerPart":
        """`progress` is called often during whatever takes long; see `Trainer.progress`."""
        trainer = Trainer.open(
            model,
            store,
            config.train,
            config.algorithm,
            max_tokens=config.rollout.max_tokens,
            temperature=config.rollout.temperature,
            total_steps=config.run.steps,
            seed=config.run.seed,
            progress=progress,
        )
        try:
            if checkpoint is not None:
                trainer.restore(checkpoint)
        except BaseException:
            trainer.close()
            raise
        return cls(trainer)

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
            case ms.Shutdown():
                self._trainer.close()

    def poll(self) -> Iterator[ms.FromTrainer]:
        """`Saved` for each checkpoint that has been written, or has failed, since the last call."""
        while self._saves and self._saves[0][1].done:
            directory, saving = self._saves.popleft()
            yield ms.Saved(directory, saving.failure)

    def finish_saves(self) -> Iterator[ms.FromTrainer]:
        """The same, after waiting for all of them."""
        for _, saving in self._saves:
            saving.wait()
        yield from self.poll()

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
            return ms.TrainingFailed(message.step, _line(error))
        return ms.Trained(report.step, report.sampled_tokens, report.seconds, report.metrics)

    def _redo(self, message: ms.Redo) -> str | None:
        """Why the step could not be taken again, if so."""
        if message.step < self._trainer.step:
            return None  # the checkpoint is from after it
        try:
            self._trainer.train(message.step, message.samples)
        except (StepRejected, UserError, OSError, MemoryError) as error:
            return _line(error)
        return None

    def _publish(self, message: ms.PublishVersion) -> ms.FromTrainer:
        start = time.perf_counter()
        try:
            digest = self._trainer.publish(message.version)
        except (UserError, OSError) as error:
            return ms.NotPublished(message.version, _line(error))
        return ms.Published(message.version, digest, time.perf_counter() - start)

    def _save(self, message: ms.Save) -> Iterator[ms.FromTrainer]:
        directory = Path(message.directory)
        self._sweep(directory.parent)
        try:
            saving = self._trainer.begin_save(directory)
        # torch, too, runs out of memory for the copy: that is its RuntimeError.
        except (UserError, OSError, MemoryError, RuntimeError) as error:
            yield ms.Saved(message.directory, _line(error))
        else:
            self._saves.append((message.directory, saving))

    def _sweep(self, parent: Path) -> None:
        """Once: this is the only trainer of its run, so what is unfinished there is nobody's."""
        if parent not in self._swept:
            self._swept.add(parent)
            with suppress(UserError):
                sweep(parent)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
