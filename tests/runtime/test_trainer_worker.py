"""The trainer as a worker of a run: checkpoints in the background, and steps taken again."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dora_rl.runtime.control import messages as ms
from dora_rl.runtime.workers.trainer import TrainerWorker
from dora_rl.samples import Sample, SampleRef, pack
from dora_rl.trainer.checkpoint_writer import CheckpointWriter
from dora_rl.trainer.errors import CheckpointError, StepRejected, TrainerError
from dora_rl.trainer.report import StepReport
from dora_rl.trainer.trainer import Trainer
from dora_rl.transports.samples.memory import SampleMemory
from tests.models.random_models import make_model
from tests.patience import PATIENCE_S
from tests.trainer.samples import all_of, batch_of, opened, same
from tests.trainer.test_trainer import poisoned

torch.set_num_threads(1)
Samples = tuple[Sample, ...]


class FakeWriter:
    """Ends when it is told to."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.done = False
        self.failure: str | None = None

    def wait(self) -> None:
        self.done = True


class FakeTrainer:
    """Counts what it is asked for."""

    def __init__(self, step: int = 0) -> None:
        self.step = step
        self.taken: list[int] = []
        self.error: Exception | None = None
        self.savings: list[Any] = []
        self.closed = False

    def train(self, step: int, samples: Samples) -> StepReport:
        if self.error is not None:
            raise self.error
        if step != self.step:
            raise TrainerError(f"step `{step}` was asked for")
        self.taken.append(step)
        self.step += 1
        return StepReport(
            step=step, seconds=0.5, tokens=3, sampled_tokens=2, updates=1, metrics={"a": 1.0}
        )

    def begin_save(self, directory: Path) -> Any:
        if self.error is not None:
            raise self.error
        for saving in self.savings:
            saving.wait()
        self.savings.append(FakeWriter(directory))
        return self.savings[-1]

    def close(self) -> None:
        self.closed = True


RECORDS = SampleMemory()


def worker_of(trainer: Any, checkpoints: Path = Path("missing")) -> TrainerWorker:
    return TrainerWorker(cast(Trainer, trainer), RECORDS, checkpoints)


def told(worker: TrainerWorker, message: ms.ToTrainer) -> list[ms.FromTrainer]:
    return list(worker.handle(message))


def refs(samples: Samples) -> tuple[SampleRef, ...]:
    """The samples by reference, with their tokens in the transport."""
    return tuple(
        SampleRef(
            trajectory=s.trajectory.by_reference(RECORDS.put(pack(s.trajectory))),
            reward=s.reward,
            parts=s.parts,
        )
        for s in samples
    )


def redo(step: int, samples: Samples = ()) -> ms.Redo:
    return ms.Redo(step, (1, 2), refs(samples))


def test_a_checkpoint_is_reported_once_when_it_is_there(tmp_path: Path) -> None:
    trainer = FakeTrainer()
    worker = worker_of(trainer, tmp_path)
    assert told(worker, ms.Save(7)) == []
    assert list(worker.poll()) == []
    assert told(worker, ms.TrainOn(0, (), ())) == [ms.Trained(0, 2, 0.5, {"a": 1.0})]
    trainer.savings[0].done = True
    assert list(worker.poll()) == [ms.Saved(7)]
    assert list(worker.poll()) == []
    assert list(worker.finish_saves()) == []


def test_a_checkpoint_that_failed_is_reported_with_the_reason(tmp_path: Path) -> None:
    trainer = FakeTrainer()
    worker = worker_of(trainer, tmp_path)
    told(worker, ms.Save(7))
    trainer.savings[0].failure = "no room"
    assert list(worker.finish_saves()) == [ms.Saved(7, "no room")]


@pytest.mark.parametrize(
    "error", [CheckpointError("no\nroom"), OSError("no room"), RuntimeError("no room")]
)
def test_a_save_that_cannot_begin_is_answered(tmp_path: Path, error: Exception) -> None:
    trainer = FakeTrainer()
    trainer.error = error
    worker = worker_of(trainer)
    assert told(worker, ms.Save(3)) == [ms.Saved(3, "no room")]
    assert list(worker.finish_saves()) == []


@given(st.lists(st.sampled_from(["save", "end", "poll"]), max_size=20))
def test_every_save_is_answered_once_and_in_order(actions: list[str]) -> None:
    trainer = FakeTrainer()
    worker = worker_of(trainer)
    asked: list[ms.FromTrainer] = []
    answers: list[ms.FromTrainer] = []
    for action in actions:
        if action == "save":
            asked.append(ms.Saved(len(asked)))
            answers += worker.handle(ms.Save(len(asked) - 1))
        elif action == "end" and trainer.savings:
            trainer.savings[-1].done = True
        else:
            answers += worker.poll()
        assert answers == asked[: len(answers)]
    answers += worker.finish_saves()
    assert answers == asked


def test_what_a_dead_trainer_left_is_swept_but_once(tmp_path: Path) -> None:
    for name in (".saving-dead", ".mine", "step-1"):
        (tmp_path / name).mkdir()
    worker = worker_of(FakeTrainer(), tmp_path)
    told(worker, ms.Save(2))
    assert sorted(os.listdir(tmp_path)) == [".mine", "step-1"]
    (tmp_path / ".saving-now").mkdir()  # from here on, what is there may be under way
    told(worker, ms.Save(3))
    assert ".saving-now" in os.listdir(tmp_path)


def test_a_step_of_the_checkpoint_is_not_taken_again() -> None:
    trainer = FakeTrainer(step=3)
    worker = worker_of(trainer)
    assert [told(worker, redo(step)) for step in range(3)] == [[ms.Redone(s)] for s in range(3)]
    assert trainer.taken == []
    assert told(worker, redo(3)) == [ms.Redone(3)]
    assert told(worker, redo(3)) == [ms.Redone(3)]
    assert trainer.taken == [3]


def test_a_step_that_cannot_be_taken_again_is_a_failure() -> None:
    trainer = FakeTrainer()
    worker = worker_of(trainer)
    assert told(worker, redo(2)) == [ms.Redone(2, "step `2` was asked for")]
    trainer.error = StepRejected("no\nnumber", [4])
    assert told(worker, redo(0)) == [ms.Redone(0, "no number")]
    trainer.error = None
    # It is not remembered as a batch that was rejected.
    assert told(worker, ms.TrainOn(0, (1, 2), ())) == [ms.Trained(0, 2, 0.5, {"a": 1.0})]


def test_shutting_down_closes_the_trainer() -> None:
    trainer = FakeTrainer()
    assert told(worker_of(trainer), ms.Shutdown()) == []
    assert trainer.closed


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "llama", seed=1, num_hidden_layers=1)


@contextmanager
def slow(trainer: Trainer) -> Iterator[threading.Event]:
    """Its checkpoints wait for an event before they are written."""
    event, real = threading.Event(), trainer.begin_save

    def begin_save(directory: Path) -> CheckpointWriter:
        saving = real(directory)

        def wait() -> None:
            assert event.wait(PATIENCE_S)
            saving.wait()

        return CheckpointWriter(directory, wait)

    trainer.begin_save = begin_save  # type: ignore[method-assign]
    yield event
    event.set()


def test_steps_taken_again_lead_to_where_the_trainer_was(model: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    with opened(model, tmp_path / "a", minibatches=2) as trainer, slow(trainer) as event:
        worker = worker_of(trainer, saved)
        for step in range(3):
            (answer,) = worker.handle(ms.TrainOn(step, (step,), refs(batch_of(step))))
            assert isinstance(answer, ms.Trained)
            if step == 0:
                assert told(worker, ms.Save(1)) == []
        assert list(worker.poll()) == []
        event.set()
        assert list(worker.finish_saves()) == [ms.Saved(1)]
        there = all_of(trainer)
    with opened(model, tmp_path / "b", minibatches=2) as trainer:
        trainer.restore(saved / "step-1")
        worker = worker_of(trainer)
        ticks = []
        trainer.progress = lambda: ticks.append(trainer.step)
        answers = [told(worker, redo(step, batch_of(step))) for step in range(3)]
        assert answers == [[ms.Redone(step)] for step in range(3)]
        assert same(there, all_of(trainer))
        assert set(ticks) == {1, 2}
        broken = poisoned(batch_of(3), group=1, reward=float("inf"))
        (answer,) = told(worker, redo(3, broken))
        assert isinstance(answer, ms.Redone)
        assert answer.failure is not None
        assert "trajectory `4` cannot be trained: its reward is `inf`" in answer.failure
        assert same(there, all_of(trainer))
