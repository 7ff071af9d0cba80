"""Checkpoints that are written while training continues."""

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from dora_rl.trainer.checkpoint_writer import CheckpointWriter
from dora_rl.trainer.errors import CheckpointError
from dora_rl.weights import disk
from tests.models.random_models import make_model
from tests.patience import PATIENCE_S
from tests.trainer.samples import all_of, batch_of, opened, same

torch.set_num_threads(1)
PPO = {"preset": "ppo", "kl": "k3"}


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("model")
    return make_model(root, "qwen3", seed=1, dtype=request.param, tie_word_embeddings=True)


@contextmanager
def held(at: int, writer: str = "checkpoint") -> Iterator[threading.Event]:
    """A background writer stops before its write number `at`, until the event is set."""
    go_on = threading.Event()
    real, seen = disk._write, 0

    def write(fd: int, data: Any, path: Path) -> None:
        nonlocal seen
        if threading.current_thread().name.startswith(f"dora-rl {writer}"):
            seen += 1
            if seen == at and not go_on.wait(PATIENCE_S):
                raise AssertionError("nobody let the writer continue")
        real(fd, data, path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk, "_write", write)
        try:
            yield go_on
        finally:
            go_on.set()
        assert seen >= at


def files(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def test_it_is_done_when_the_writer_is() -> None:
    gate, written = threading.Event(), []

    def write() -> None:
        assert gate.wait(PATIENCE_S)
        written.append(True)

    saving = CheckpointWriter(Path("somewhere"), write)
    assert (saving.done, saving.failure, saving.directory) == (False, None, Path("somewhere"))
    gate.set()
    saving.wait()
    saving.check()
    assert (saving.done, saving.failure, written) == (True, None, [True])


def test_what_went_wrong_is_told_in_one_line_and_raised() -> None:
    def write() -> None:
        raise CheckpointError("first\nsecond")

    saving = CheckpointWriter(Path("somewhere"), write)
    saving.wait()
    assert (saving.done, saving.failure) == (True, "first second")
    with pytest.raises(CheckpointError, match="first"):
        saving.check()


def test_a_failed_save_does_not_keep_the_weights() -> None:
    class Weights:
        pass

    weights = Weights()
    kept = weakref.ref(weights)

    def write(weights: Weights) -> None:
        try:
            raise OSError("disk")
        except OSError as error:
            raise CheckpointError("no") from error

    class Write:
        def __init__(self, weights: Weights) -> None:
            self.weights = weights

        def __call__(self) -> None:
            write(self.weights)

    saving = CheckpointWriter(Path("somewhere"), Write(weights))
    del weights
    saving.wait()
    gc.collect()
    assert saving.failure == "no"
    assert kept() is None


@pytest.mark.parametrize("at", [1, 25])
def test_it_is_the_trainer_at_that_moment(model: Path, tmp_path: Path, at: int) -> None:
    settings: dict[str, Any] = {"schedule": "linear", "minibatches": 2}
    with opened(model, tmp_path / "store", PPO, **settings) as trainer:
        trainer.train(0, batch_of(0))
        trainer.save(tmp_path / "at-once")
        then = all_of(trainer)
        with held(at) as go_on:
            saving = trainer.begin_save(tmp_path / "meanwhile")
            trainer.train(1, batch_of(1))
            trainer.publish(2)
            trainer.train(2, batch_of(2))
            assert not saving.done
            assert not (tmp_path / "meanwhile").exists()
            assert not same(then, all_of(trainer))
            go_on.set()
            saving.wait()
        assert saving.failure is None
        assert files(tmp_path / "meanwhile") == files(tmp_path / "at-once")
        trainer.restore(tmp_path / "meanwhile")
        assert trainer.step == 1
        assert same(then, all_of(trainer))


def test_one_is_written_at_a_time(model: Path, tmp_path: Path) -> None:
    with opened(model, tmp_path / "store") as trainer, held(3) as go_on:
        first = trainer.begin_save(tmp_path / "first")
        threading.Timer(0.1, go_on.set).start()
        assert not first.done
        second = trainer.begin_save(tmp_path / "second")
        assert first.done
        second.wait()
        assert (first.failure, second.failure) == (None, None)
    assert files(tmp_path / "first") == files(tmp_path / "second")


@pytest.mark.parametrize("then", ["close", "restore"])
def test_whoever_needs_it_waits_for_it(model: Path, tmp_path: Path, then: str) -> None:
    with opened(model, tmp_path / "store") as trainer, held(3) as go_on:
        saving = trainer.begin_save(tmp_path / "saved")
        threading.Timer(0.1, go_on.set).start()
        assert not saving.done
        if then == "restore":
            trainer.restore(tmp_path / "saved")
        else:
            trainer.close()
        assert saving.done
    assert (tmp_path / "saved" / "config.json").is_file()


def test_what_cannot_be_saved_is_refused_in_the_background(model: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with opened(model, tmp_path / "store") as trainer:
        saving = trainer.begin_save(tmp_path / "there")
        saving.wait()
        assert saving.failure is not None
        assert f"`{tmp_path / 'there'}` exists" in saving.failure
        trainer.train(0, batch_of(0))
        trainer.save(tmp_path / "elsewhere")
    assert not list((tmp_path / "there").iterdir())
