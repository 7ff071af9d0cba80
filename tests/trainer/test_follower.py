"""What a follower does with its commands, and that it never continues with other weights."""

import io
import os
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch
from torch import Tensor

from dora_rl.core.protocol.errors import UserError
from dora_rl.trainer import follower
from dora_rl.trainer.errors import CheckpointError, TrainerError
from dora_rl.trainer.follower import perform
from dora_rl.trainer.parallel import Command, Hello, Publish, Restore, Save, Train, send
from dora_rl.trainer.replica import Replica
from dora_rl.trainer.trainer import Trainer
from dora_rl.trainer.world import World
from tests.models.random_models import make_model
from tests.trainer.samples import all_of, batch_of, opened, same

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "llama", seed=1, num_hidden_layers=1)


def step_of(trainer: Trainer, step: int) -> Train:
    replica = trainer._replica
    return Train(step, replica.deal(replica.batch(batch_of(step))).shares[0])


def test_a_follower_at_another_step_ends(model: Path, tmp_path: Path) -> None:
    with opened(model, tmp_path) as trainer:
        command = step_of(trainer, 1)
        with pytest.raises(TrainerError, match="takes step `1`, and this process is at step 0"):
            perform(trainer._replica, command)
        assert trainer.step == 0
        perform(trainer._replica, Publish())
        perform(trainer._replica, Save())
        with pytest.raises(TypeError, match="Hello"):
            perform(trainer._replica, Hello())


def test_what_only_a_follower_cannot_do_is_raised(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would continue with other weights than the rest, and nobody would know."""

    def failing(self: Replica, share: object) -> None:
        raise UserError("no such version")

    with opened(model, tmp_path) as trainer:
        command = step_of(trainer, 0)
        monkeypatch.setattr(Replica, "follow", failing)
        with pytest.raises(UserError, match="no such version"):
            perform(trainer._replica, command)


class Other(World):
    """One of two, whose other process gives what it is told."""

    other = 0

    def largest(self, tensor: Tensor) -> Tensor:
        return torch.maximum(tensor, torch.tensor([self.other, -self.other]))


@pytest.mark.parametrize(("other", "agree"), [(1, True), (-1, False), (2, False)])
def test_a_checkpoint_is_restored_by_all_or_none(
    other: int, agree: bool, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Other, "other", other)
    with opened(model, tmp_path / "store") as trainer:
        trainer.train(0, batch_of(0))
        trainer.save(tmp_path / "saved")
        saved = all_of(trainer)
        trainer.train(1, batch_of(1))
        now = all_of(trainer)
        trainer._replica._world = Other()
        if agree:
            trainer.restore(tmp_path / "saved")
            assert same(all_of(trainer), saved)
            return
        with pytest.raises(CheckpointError, match="another training process cannot restore `"):
            trainer.restore(tmp_path / "saved")
        assert same(all_of(trainer), now)


def test_a_checkpoint_that_all_refuse_is_told_and_changes_nothing(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with opened(model, tmp_path / "store") as trainer:
        before = all_of(trainer)
        perform(trainer._replica, Restore(str(tmp_path / "nowhere")))
        assert "nowhere" in capsys.readouterr().err
        assert same(all_of(trainer), before)


class Ended(BaseException):
    """Instead of the end of this process."""


def test_a_follower_ends_with_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it waits for: NCCL does not notice."""
    codes = []

    def end(code: int) -> None:
        codes.append(code)
        raise Ended

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(follower, "_END_S", 0.0)
    pipe = io.BytesIO()
    send(pipe, Publish())
    for rest, wanted in ((b"", [Publish(), None]), (bytes([1, *bytes(7), 0xC1]), [Publish()])):
        commands: SimpleQueue[Command | None] = SimpleQueue()
        with pytest.raises(Ended):
            follower._read_commands(io.BytesIO(pipe.getvalue() + rest), commands)
        assert [commands.get() for _ in wanted] == wanted
        assert commands.empty()
    assert codes == [1, 1]
