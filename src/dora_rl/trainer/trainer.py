"""The trainer that a runtime talks to: steps, versions and checkpoints, in order.

Not thread-safe; checkpoints are written by a thread that it keeps to itself. Train step `s` is
taken at version `s` and makes version `s + 1`.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path

from dora_rl.algorithms.settings import AlgorithmSettings
from dora_rl.algorithms.shapes import ShapeError
from dora_rl.core.protocol.errors import UserError
from dora_rl.core.protocol.types import Version
from dora_rl.machine.processor import cores
from dora_rl.samples import Sample
from dora_rl.trainer.checkpoint_writer import CheckpointWriter
from dora_rl.trainer.errors import StepRejected, TrainerError
from dora_rl.trainer.parallel import Followers, Publish, Restore, Save, Train
from dora_rl.trainer.progress import nothing
from dora_rl.trainer.replica import Replica, ReplicaSettings
from dora_rl.trainer.report import StepReport
from dora_rl.trainer.settings import LoraSettings, TrainSettings
from dora_rl.transports.weights import WeightPublisher

__all__ = ["CheckpointWriter", "StepRejected", "StepReport", "Trainer"]

_TELL_S = 1.0  # between two signs of progress while a thread of the trainer writes


class Trainer:
    """One policy in training. Make it with `open`, and `close` it."""

    def __init__(self, replica: Replica, followers: Followers, weights: WeightPublisher) -> None:
        self._replica = replica
        self._followers = followers
        self._weights = weights
        self._writer: CheckpointWriter | None = None  # the last

    @classmethod
    def open(
        cls,
        model: Path,
        weights: WeightPublisher,
        train: TrainSettings,
        algorithm: AlgorithmSettings,
        *,
        max_tokens: int,
        temperature: float,
        total_steps: int,
        seed: int,
        lora: LoraSettings | None = None,
        progress: Callable[[], None] = nothing,
    ) -> "Trainer":
        """A trainer at version 0, the policy in `model`; nothing is published yet.

        `temperature` is that of sampling: logits are divided by it. `total_steps` ends the
        schedule, and may be 0 where it is constant. With `lora`, an adapter of the model is trained
        and published. `progress` is an attribute too.
        """
        if not 0 < temperature < float("inf"):
            raise TrainerError(
                f"temperature must be > 0 and finite to train: `{temperature}`. "
                "A greedy policy has no gradient."
            )
        if train.processes > 1 and train.threads is None:
            share = max(1, cores() // train.processes)
            train = train.model_copy(update={"threads": share})
        settings = ReplicaSettings(
            model=str(model),
            store=str(weights.root),
            train=train.model_dump(mode="json"),
            algorithm=algorithm.model_dump(mode="json"),
            max_tokens=max_tokens,
            temperature=temperature,
            total_steps=total_steps,
            seed=seed,
            lora=None if lora is None else lora.model_dump(mode="json"),
        )
        followers = Followers.start(settings, train.processes)
        try:
            with followers.watched(UserError):
                replica = Replica(settings, followers.join(progress))
        except BaseException:
            followers.close()
            raise
        trainer = cls(replica, followers, weights)
        trainer.progress = progress
        return trainer

    @property
    def progress(self) -> Callable[[], None]:
        """Called often during whatever takes long, so that a long step is not taken for a hang.

        After every pass of a micro-batch, around every update, between the tensors and files of
        a checkpoint, and while one or a version is waited for. It must be quick. What it raises
        passes where nothing is half done: that of a step, after the step has been counted.
        """
        return self._replica.progress.tell

    @progress.setter
    def progress(self, progress: Callable[[], None]) -> None:
        self._replica.progress.tell = progress

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
        dealt = self._replica.deal(self._replica.batch(tuple(samples)))
        # A broken batch is rejected by every process, or by the leader before the others begin.
        with self._followers.watched(StepRejected, ShapeError):
            self._followers.tell_each([Train(step, share) for share in dealt.shares[1:]])
            return self._replica.take(dealt)

    def publish(self, version: Version) -> str:
        """Publish the weights as they are; their digest. The same version again does nothing."""
        if version != self.step:
            raise TrainerError(
                f"version `{version}` was asked for, and the trainer has version {self.step}. "
                "A version is published before the next step is taken."
            )
        with self._followers.watched():
            self._followers.tell(Publish())
            fingerprint = self._replica.fingerprint()
            tensors = self._replica.published()
        tell = self._replica.progress
        # By a thread, so that a slow disk or a lock is not taken for a hang here.
        with ThreadPoolExecutor(1, "dora-rl publication") as pool:
            written = pool.submit(
                self._weights.publish,
                version,
                tensors,
                fingerprint=fingerprint,
                adapter=self._replica.source.adapter,
            )
            tell()
            while wait([written], _TELL_S).not_done:
                tell()
        tell()
        return written.result().digest

    def begin_save(self, directory: Path) -> CheckpointWriter:
        """Copy all that a checkpoint holds, as it is now, and write it from a thread.

        Training may continue at once. One is written at a time: the next waits for it here. What
        goes wrong with the disk shows in the `CheckpointWriter`.
        """
        self._wait_for_writer()
        with self._followers.watched():
            self._followers.tell(Save())
            snapshot = self._replica.snapshot()
        assert snapshot is not None  # this is the leader
        directory = Path(directory)
        self._writer = CheckpointWriter(directory, partial(snapshot.write, directory))
        return self._writer

    def save(self, directory: Path) -> None:
        """Write a checkpoint: a Hugging Face model directory that `restore` continues from."""
        writer = self.begin_save(directory)
        self._wait_for_writer()
        writer.check()

    def restore(self, directory: Path) -> None:
        """Continue from a checkpoint, to the bit. Another model or other settings are refused."""
        self._wait_for_writer()  # it may be this one
        with self._followers.watched(UserError):  # which every process raises, or none
            self._followers.tell(Restore(str(directory)))
            self._replica.restore(Path(directory))

    def close(self) -> None:
        """Wait for a checkpoint that is being written, end the other processes and the transport.

        The trainer must not be used again.
        """
        with self._replica.progress.deferred():
            self._wait_for_writer()
            self._followers.close()
        self._weights.close()

    def _wait_for_writer(self) -> None:
        while self._writer is not None and not self._writer.wait(_TELL_S):
            self._replica.progress()
