"""Progress is told wherever the trainer waits, and what it raises leaves nothing half done."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import dora_rl.trainer.trainer as module
from dora_rl.trainer.errors import StepRejected
from dora_rl.trainer.progress import Progress, nothing
from dora_rl.trainer.trainer import Trainer
from dora_rl.transports.weights.shared_directory import WeightStore
from tests.models.random_models import make_model
from tests.trainer.samples import all_of, batch_of, opened, same
from tests.trainer.test_checkpoint_writer import held
from tests.trainer.test_trainer import poisoned

torch.set_num_threads(1)
SETTINGS: dict[str, Any] = {"algorithm": {"preset": "ppo"}, "token_budget": 120}


class Gone(Exception):
    """Nobody listens any more."""


class Failing:
    """Raises in call number `at`; counts them all."""

    def __init__(self, at: int = 0) -> None:
        self.at, self.calls = at, 0

    def __call__(self) -> None:
        self.calls += 1
        if self.calls == self.at:
            raise Gone


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "llama", seed=1, num_hidden_layers=1)


@pytest.fixture(scope="module", params=[1, 2], ids=["one-update", "two-updates"])
def trainer(
    model: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Trainer]:
    store = tmp_path_factory.mktemp("store")
    with opened(model, store, minibatches=request.param, **SETTINGS) as trainer:
        trainer.train(0, batch_of(0))
        yield trainer


@contextmanager
def telling(trainer: Trainer, tell: Callable[[], None]) -> Iterator[None]:
    trainer.progress = tell
    try:
        yield
    finally:
        trainer.progress = nothing


def every(trainer: Trainer, action: Callable[[], object]) -> Iterator[None]:
    """Has every single sign of progress during the action raise, one a turn."""
    count = Failing()
    with telling(trainer, count):
        action()
    yield  # as it is when nothing is raised
    assert count.calls > 2
    for at in range(1, count.calls + 1):
        with telling(trainer, Failing(at)), pytest.raises(Gone):
            action()
        yield


def test_what_is_raised_is_held_back_and_nobody_is_asked_again() -> None:
    progress, tell = Progress(), Failing(2)
    progress.tell = tell
    done = []
    with pytest.raises(Gone), progress.deferred():
        for _ in range(4):
            progress()
        done.append(True)
    assert (tell.calls, done) == (2, [True])
    tell.calls = 1
    with pytest.raises(Gone):
        progress()
    with progress.deferred():
        progress()


def test_no_error_is_lost() -> None:
    progress = Progress()
    progress.tell = Failing(1)
    with pytest.raises(Gone) as caught, progress.deferred():
        progress()
        raise ValueError("its own")
    assert isinstance(caught.value.__context__, ValueError)


def test_a_step_is_counted_whatever_progress_raises(trainer: Trainer, tmp_path: Path) -> None:
    trainer.save(tmp_path / "saved")
    before = all_of(trainer)
    ends = []
    for _ in every(trainer, lambda: trainer.train(1, batch_of(1))):
        assert trainer.step == 2
        ends.append(all_of(trainer))
        assert same(ends[0], ends[-1])
        assert trainer.train(1, batch_of(1)) is trainer._replica.report  # not taken again
        assert same(ends[0], all_of(trainer))
        trainer.restore(tmp_path / "saved")
        assert same(before, all_of(trainer))


def test_a_rejected_step_leaves_no_trace_whatever_progress_raises(trainer: Trainer) -> None:
    before = all_of(trainer)

    def rejected() -> None:
        trainer.train(1, poisoned(batch_of(1), group=2, reward=3e38))

    count = Failing()
    with telling(trainer, count), pytest.raises(StepRejected):
        rejected()
    for at in range(1, count.calls + 1):
        with telling(trainer, Failing(at)), pytest.raises(Gone) as caught:
            rejected()
        assert isinstance(caught.value.__context__, StepRejected)
        assert same(before, all_of(trainer))


def test_what_is_restored_is_whole_whatever_progress_raises(
    trainer: Trainer, tmp_path: Path
) -> None:
    trainer.save(tmp_path / "saved")
    before = all_of(trainer)
    trainer.train(1, batch_of(1))
    trainer.save(tmp_path / "after")
    after = all_of(trainer)
    seen = []
    for _ in every(trainer, lambda: trainer.restore(tmp_path / "saved")):
        seen.append(trainer.step)
        assert same({1: before, 2: after}[trainer.step], all_of(trainer))
        trainer.restore(tmp_path / "after")
    assert set(seen) == {1, 2}  # refused before anything was changed, or done
    trainer.restore(tmp_path / "saved")


def test_a_save_has_begun_or_not_whatever_progress_raises(trainer: Trainer, tmp_path: Path) -> None:
    before, number = all_of(trainer), 0

    def begin() -> None:
        nonlocal number
        number += 1
        trainer.begin_save(tmp_path / f"saved-{number}").wait()

    for _ in every(trainer, begin):
        assert same(before, all_of(trainer))
        assert [path.name for path in tmp_path.iterdir()] == ["saved-1"]
    begin()
    trainer.restore(tmp_path / f"saved-{number}")
    assert same(before, all_of(trainer))


def test_a_version_is_published_whatever_progress_raises(model: Path, tmp_path: Path) -> None:
    with opened(model, tmp_path) as trainer:
        digest = trainer.publish(0)
        for _ in every(trainer, lambda: trainer.publish(0)):
            assert trainer.publish(0) == digest
    assert WeightStore(tmp_path).verify(0).digest == digest


@pytest.mark.parametrize("then", ["begin_save", "save", "restore", "close"])
def test_progress_is_told_while_a_save_is_waited_for(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    monkeypatch.setattr(module, "_TELL_S", 0.001)
    ticks = []

    def tell() -> None:
        ticks.append(saving.done)
        if len(ticks) == 3:
            go_on.set()  # else it would never end

    with opened(model, tmp_path / "store") as trainer, held(2) as go_on:
        saving = trainer.begin_save(tmp_path / "saved")
        with telling(trainer, tell):
            match then:
                case "begin_save":
                    trainer.begin_save(tmp_path / "next").wait()
                case "save":
                    trainer.save(tmp_path / "next")
                case "restore":
                    trainer.restore(tmp_path / "saved")
                case "close":
                    trainer.close()
        assert ticks[:3] == [False] * 3
        assert saving.failure is None


def test_progress_is_told_while_a_version_is_written(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_TELL_S", 0.001)
    ticks = []

    def tell() -> None:
        ticks.append(True)
        if len(ticks) == tensors + 5:
            go_on.set()

    with opened(model, tmp_path) as trainer, held(2, "publication") as go_on:
        tensors = len(trainer._replica.source.names)
        with telling(trainer, tell):
            digest = trainer.publish(0)
    assert WeightStore(tmp_path).verify(0).digest == digest


def test_closing_waits_whatever_progress_raises(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_TELL_S", 0.001)

    def tell() -> None:
        go_on.set()
        raise Gone

    with opened(model, tmp_path / "store") as trainer, held(2) as go_on:
        saving = trainer.begin_save(tmp_path / "saved")
        with telling(trainer, tell), pytest.raises(Gone):
            trainer.close()
        assert saving.done
    assert (tmp_path / "saved" / "config.json").is_file()
