"""Two processes train what one does, a death is named, and nobody is left behind."""

import io
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from dora_rl.trainer.errors import FollowerDied, StepRejected
from dora_rl.trainer.parallel import Followers, Publish, Restore, Save, Train, receive, send
from dora_rl.trainer.trainer import Trainer
from dora_rl.trainer.world import loopback_interface
from dora_rl.weights.store import WeightStore
from tests.models.random_models import make_model
from tests.trainer.samples import batch_of, opened
from tests.trainer.test_trainer import poisoned

torch.set_num_threads(1)
SETTINGS: dict[str, Any] = {
    "algorithm": {"preset": "ppo", "kl": "k3"},
    "behaviour": "recompute",
    "minibatches": 2,
    "token_budget": 64,
    "threads": 1,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("model")
    return make_model(root, "qwen3", seed=1, tie_word_embeddings=True)


def test_commands_come_through_the_pipe() -> None:
    pipe = io.BytesIO()
    commands = [Train(batch_of(1)), Publish(), Restore("somewhere"), Save()]
    for command in commands:
        send(pipe, command)
    data = pipe.getvalue()
    pipe.seek(0)
    assert [receive(pipe) for _ in commands] == commands
    assert receive(pipe) is None
    assert receive(io.BytesIO(data[:-1])) == commands[0]
    assert receive(io.BytesIO(data[:20])) is None


def three_steps(trainer: Trainer, saved: Path) -> None:
    trainer.publish(0)
    trainer.train(0, batch_of(0))
    trainer.publish(1)
    with pytest.raises(StepRejected):
        trainer.train(1, poisoned(batch_of(1, version=1), group=2))
    # One sequence: the other process has nothing to do, and must not mind.
    trainer.train(1, batch_of(1, groups=1, group_size=1, version=1))
    trainer.publish(2)
    trainer.train(2, batch_of(2, version=1))
    trainer.publish(3)
    saving = trainer.begin_save(saved)
    # Goes on meanwhile; what is saved is from before.
    trainer.train(3, batch_of(33, version=1))
    saving.wait()
    saving.check()


@pytest.mark.parametrize(
    ("names", "found"),
    [(["eth0", "lo"], "lo"), (["en0", "lo0"], "lo0"), (["eth0"], None)],
)
def test_the_group_meets_on_the_loopback_of_any_system(
    names: list[str], found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(names, start=1)))
    assert loopback_interface() == found


@pytest.mark.slow
def test_two_processes_train_what_one_does(model: Path, tmp_path: Path) -> None:
    losses = []
    with opened(model, tmp_path / "one", **SETTINGS) as alone:
        three_steps(alone, tmp_path / "saved-by-one")
        with opened(model, tmp_path / "two", processes=2, **SETTINGS) as both:
            three_steps(both, tmp_path / "saved-by-two")
            # Each goes on from the other's checkpoint.
            for trainer, saved in ((alone, "saved-by-two"), (both, "saved-by-one")):
                trainer.restore(tmp_path / saved)
                losses.append(trainer.train(3, batch_of(3, version=1)).metrics["loss"])
            (follower,) = both._followers._processes
            follower.send_signal(signal.SIGKILL)
            with pytest.raises(FollowerDied, match=r"process `1 \(exit code -9\)` of 2 has died"):
                both.train(4, batch_of(4, version=1))
    one, two = (WeightStore(tmp_path / name).load(3).tensors for name in ("one", "two"))
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert float((two[name] - tensor).norm()) <= 1e-5 * float(tensor.norm()), name
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


class Hanging(subprocess.Popen[bytes]):
    """Is waited for in vain, however short a time."""

    def wait(self, timeout: float | None = None) -> int:
        return super().wait(timeout and 0.1)


def test_followers_are_gone_after_closing() -> None:
    """One ends with its pipe, as a follower does; the other hangs."""
    processes = [
        subprocess.Popen(["cat"], stdin=subprocess.PIPE),
        Hanging(["sleep", "600"], stdin=subprocess.PIPE),
    ]
    followers = Followers(3, list(processes))
    followers.close()
    followers.close()
    assert [process.returncode for process in processes] == [0, -signal.SIGKILL]
