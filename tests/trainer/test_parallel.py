"""Two processes train what one does, a failure is named, and nobody is left behind."""

import io
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dora_rl.algorithms.settings import AlgorithmSettings
from dora_rl.algorithms.shapes import ShapeError
from dora_rl.core.protocol.errors import UserError
from dora_rl.machine import processor
from dora_rl.machine.fast_paths import Trial
from dora_rl.trainer import parallel
from dora_rl.trainer.errors import (
    CheckpointError,
    FollowerDied,
    GroupBroken,
    StepRejected,
    TrainerError,
)
from dora_rl.trainer.parallel import (
    Followers,
    Hello,
    Join,
    Link,
    Publish,
    Ready,
    Restore,
    Save,
    Train,
    receive,
    send,
)
from dora_rl.trainer.rendezvous import LOOPBACK, TOKEN, Address, Listener, connect
from dora_rl.trainer.replica import Replica, ReplicaSettings
from dora_rl.trainer.settings import TrainSettings
from dora_rl.trainer.shares import Share
from dora_rl.trainer.trainer import Trainer
from dora_rl.trainer.world import World, join, leave, loopback_interface
from dora_rl.transports.weights.shared_directory import WeightStore
from tests.models.random_models import make_model
from tests.patience import PATIENCE_S
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
# Weights alone say little: Adam's updates have the size of the learning rate, whatever the scale
# of the gradients.
MEASURED = ("grad_norm", "loss", "entropy_mean", "reference_kl_mean")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("model")
    return make_model(root, "qwen3", seed=1, tie_word_embeddings=True)


def test_commands_come_through_the_pipe() -> None:
    pipe = io.BytesIO()
    share = Share(
        samples=batch_of(1), minibatches=(0,) * 12, num_minibatches=1, versions=(0,), width=9
    )
    commands = [Hello(3), Ready(), Train(7, share), Publish(), Restore("somewhere"), Save()]
    for command in commands:
        send(pipe, command)
    data = pipe.getvalue()
    pipe.seek(0)
    assert [receive(pipe) for _ in commands] == commands
    assert receive(pipe) is None
    assert receive(io.BytesIO(data[:-1])) == commands[0]
    assert receive(io.BytesIO(data[:10])) is None


@pytest.mark.parametrize(
    ("affinity", "quota", "threads"),
    [(0, 0, 32), (6, 0, 3), (6, 4, 2), (0, 4, 2), (1, 0, 1), (6, 1, 1)],
)
def test_processes_share_the_cores_that_they_may_use(
    affinity: int, quota: int, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container has fewer than the machine; 0 is a system that does not tell."""
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.setattr(processor, "affinity", lambda: Trial(affinity > 0, "", affinity))
    monkeypatch.setattr(processor, "cgroup_limits", lambda: Trial(quota > 0, "", quota))

    class Planned(Exception):
        pass

    def start(settings: ReplicaSettings, size: int) -> None:
        raise Planned(settings.train["threads"])

    monkeypatch.setattr(Followers, "start", start)
    with pytest.raises(Planned, match=f"^{threads}$"), opened(tmp_path, tmp_path, processes=2):
        pass


def measured(metrics: Mapping[str, float]) -> list[float]:
    return [metrics[name] for name in MEASURED]


def three_steps(trainer: Trainer, saved: Path) -> list[list[float]]:
    """What each step measured."""
    found = []
    trainer.publish(0)
    found.append(measured(trainer.train(0, batch_of(0)).metrics))
    trainer.publish(1)
    with pytest.raises(StepRejected):
        trainer.train(1, poisoned(batch_of(1, version=1), group=2))
    # No float32: the leader finds no targets, and the other process must not wait for them.
    with pytest.raises(ShapeError, match="rewards_N must be finite"):
        trainer.train(1, poisoned(batch_of(1, version=1), group=2, reward=1e39))
    # One sequence: the other process has nothing to do, and must not mind.
    alone = batch_of(1, groups=1, group_size=1, version=1)
    found.append(measured(trainer.train(1, alone).metrics))
    trainer.publish(2)
    found.append(measured(trainer.train(2, batch_of(2, version=1)).metrics))
    trainer.publish(3)
    saving = trainer.begin_save(saved)
    # Continues meanwhile; what is saved is from before.
    trainer.train(3, batch_of(33, version=1))
    saving.wait()
    saving.check()
    return found


@pytest.mark.parametrize(
    ("names", "found"),
    [(["eth0", "lo"], "lo"), (["en0", "lo0"], "lo0"), (["eth0"], None)],
)
def test_the_group_meets_on_the_loopback_of_any_system(
    names: list[str], found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(names, start=1)))
    assert loopback_interface() == found


def test_the_interface_is_chosen_for_the_group_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next group may be of several machines; and what a user has chosen stays."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    join(dist.HashStore(), 0, 1, CPU)
    assert os.environ["GLOO_SOCKET_IFNAME"] == loopback_interface()
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth7"
    leave(World(0, 2))
    assert not dist.is_initialized()
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth7"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("aggregation", "level", "max_grad_norm"),
    [
        ("token", "token", 0.01),
        ("token", "sequence", 1.0),
        ("sequence", "token", 1.0),
        ("sequence", "sequence", 1.0),
        ("constant", "token", 1.0),
        ("constant", "sequence", 1.0),
    ],
)
def test_two_processes_measure_what_one_does(
    aggregation: str, level: str, max_grad_norm: float, model: Path, tmp_path: Path
) -> None:
    """Weights of tokens are those of the whole mini-batch, wherever its rows are."""
    algorithm = {"preset": "grpo", "kl": "k3", "aggregation": aggregation}
    algorithm |= {"importance": "truncated", "importance_level": level}
    settings = {**SETTINGS, "algorithm": algorithm, "max_grad_norm": max_grad_norm}
    found = []
    for processes in (1, 2):
        store = tmp_path / str(processes)
        with opened(model, store, processes=processes, **settings) as trainer:
            for step in range(2):
                trainer.publish(step)
                report = trainer.train(step, batch_of(step, version=step))
                # Clipped, if that is the bound. Weights of whole sequences are small here.
                assert report.metrics["grad_norm"] > (0.01 if level == "token" else 1e-7)
                found.append(measured(report.metrics))
    for one, two in zip(found[:2], found[2:], strict=True):
        assert one[0] == pytest.approx(two[0], rel=1e-4, abs=0)
        assert one == pytest.approx(two, rel=1e-4, abs=1e-7)


@pytest.mark.slow
def test_two_processes_train_what_one_does(model: Path, tmp_path: Path) -> None:
    losses = []
    with opened(model, tmp_path / "one", **SETTINGS) as alone:
        by_one = three_steps(alone, tmp_path / "saved-by-one")
        with opened(model, tmp_path / "two", processes=2, **SETTINGS) as both:
            by_two = three_steps(both, tmp_path / "saved-by-two")
            for one, two in zip(by_one, by_two, strict=True):
                assert one == pytest.approx(two, rel=1e-4, abs=1e-7)
            # Refused by both, which are as before.
            with pytest.raises(CheckpointError, match="nowhere"):
                both.restore(tmp_path / "nowhere")
            # Each continues from the other's checkpoint.
            for trainer, saved in ((alone, "saved-by-two"), (both, "saved-by-one")):
                trainer.restore(tmp_path / saved)
                losses.append(trainer.train(3, batch_of(3, version=1)).metrics["loss"])
            (link,) = both._followers._links
            assert link.process is not None
            link.process.send_signal(signal.SIGKILL)
            with pytest.raises(FollowerDied, match=r"process `1 \(exit code -9\)` of 2 has died"):
                both.train(4, batch_of(4, version=1))
    ours, theirs = (WeightStore(tmp_path / name).load(3).tensors for name in ("one", "two"))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert float((theirs[name] - tensor).norm()) <= 1e-5 * float(tensor.norm()), name
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.slow
def test_a_leader_that_fails_alone_ends_the_group(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process waits for it in a collective; the next command would meet it there."""
    monkeypatch.setenv(TOKEN, "a secret of the test")
    trainer = Trainer.open(
        model,
        WeightStore(tmp_path / "store"),
        TrainSettings(processes=2, **{k: v for k, v in SETTINGS.items() if k != "algorithm"}),
        AlgorithmSettings(),
        max_tokens=64,
        temperature=1.0,
        total_steps=3,
        seed=1,
    )
    (link,) = trainer._followers._links
    assert link.process is not None
    if sys.platform == "linux":
        environment = Path(f"/proc/{link.process.pid}/environ").read_bytes()
        assert TOKEN.encode() not in environment
    trainer.publish(0)

    def load(version: int) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(trainer._replica._stepper._store, "load", load)
    with pytest.raises(GroupBroken, match="the others did not: `the disk is gone`"):
        trainer.train(0, batch_of(0))
    begun = time.monotonic()
    trainer.close()
    assert time.monotonic() < begun + 25.0  # it was not killed for being late
    assert link.process.returncode not in (0, None, -signal.SIGKILL)
    assert not dist.is_initialized()


@pytest.mark.parametrize("error", [RuntimeError, MemoryError, OSError, UserError])
def test_what_only_the_leader_meets_breaks_the_group(error: type[Exception]) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        followers = Followers(None, CPU, [Link(ours)])
        named = pytest.raises(GroupBroken, match=r"first of 2 training .* failed, .*: `no room`")
        with named, followers.watched(StepRejected):
            raise error("no room")
        with pytest.raises(error, match="no room"), followers.watched(error):
            raise error("no room")  # which all of them meet
        followers.close()
    # One process alone is never out of step.
    with pytest.raises(error, match="no room"), Followers(None, CPU, []).watched():
        raise error("no room")


def meeting(model: Path, root: Path) -> tuple[Followers, Address]:
    """A group of two that waits for the other, who is a thread of the test."""
    followers = Followers(plan_of(model, root, "127.0.0.1:0"), CPU, [Link()])
    followers._listener = Listener(LOOPBACK, "secret")
    return followers, followers._listener.address


def test_a_follower_without_a_device_is_not_waited_for(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes before it is ready; what makes no sense before that is sent away."""
    monkeypatch.setattr(parallel, "_POLL_S", 0.05)
    followers, address = meeting(model, tmp_path)
    told: list[float] = []
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(followers.join, lambda: told.append(time.monotonic()))
        with connect(address, "secret", 10.0) as confused:
            confused.sendall(b"\x03" + bytes(7) + b"\xff\xff\xff")
            assert confused.recv(1) == b""
        with connect(address, "secret", 10.0) as follower:
            with follower.makefile("wb") as out:
                send(out, Hello(None))
            with follower.makefile("rb") as pipe:
                first = receive(pipe)
            assert isinstance(first, Join)
            assert (first.device, first.rank, first.size) == ("cpu", 1, 2)
            before = len(told)
            time.sleep(0.3)
            assert len(told) > before > 0  # while it waits
            assert not joined.done()
        with pytest.raises(FollowerDied, match=r"process `1 \(connection lost\)` of 2 has died"):
            joined.result()

    def left(world: World) -> None:
        raise AssertionError("it was in no group; another trainer's may be there")

    monkeypatch.setattr(parallel, "leave", left)
    followers.close()


class Hanging(subprocess.Popen[bytes]):
    """Is waited for in vain, however short a time."""

    def wait(self, timeout: float | None = None) -> int:
        return super().wait(timeout and 0.1)


def test_followers_are_gone_after_closing() -> None:
    """One ends with its connection, as a follower does; the other hangs."""
    links = []
    for kind, command in ((subprocess.Popen, ["cat"]), (Hanging, ["sleep", "600"])):
        ours, theirs = socket.socketpair()
        with theirs:
            links.append(Link(ours, kind(command, stdin=theirs)))
    processes = [link.process for link in links]
    followers = Followers(None, torch.device("cpu"), links)
    assert followers.world.size == 3
    followers.close()
    followers.close()
    assert [p and p.returncode for p in processes] == [0, -signal.SIGKILL]


def test_followers_share_the_time_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "_END_S", 0.5)
    pairs = [socket.socketpair() for _ in range(4)]
    links = [Link(ours, subprocess.Popen(["sleep", "600"])) for ours, _ in pairs]
    begun = time.monotonic()
    Followers(None, CPU, list(links)).close()
    assert time.monotonic() < begun + 1.5
    assert [link.process and link.process.returncode for link in links] == [-signal.SIGKILL] * 4
    for _, theirs in pairs:
        theirs.close()


def test_a_death_is_seen_without_a_process_to_ask() -> None:
    """As of a follower on another machine."""
    ours, theirs = socket.socketpair()
    followers = Followers(None, torch.device("cpu"), [Link(ours)])
    theirs.close()
    with pytest.raises(FollowerDied, match=r"process `1 \(connection lost\)` of 2 has died"):
        followers.tell(Publish())
    followers.close()


@pytest.mark.slow
def test_followers_that_others_start_meet_at_the_address(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At an address that is not loopback nobody is started here; a stranger is sent away."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("203.0.113.1", 9))  # nothing is sent: it asks for the route
        except OSError:
            pytest.skip("this machine has no address but loopback")
        host = probe.getsockname()[0]
    with socket.create_server((host, 0)) as free:
        address = Address(host, free.getsockname()[1])
    with pytest.raises(TrainerError, match="open to other machines"):
        Followers.start(plan_of(model, tmp_path, str(address)), 2)
    monkeypatch.setenv(TOKEN, "a secret of the test")
    command = [sys.executable, "-m", "dora_rl.trainer.follower", str(address)]
    followers = Followers.start(plan_of(model, tmp_path, str(address)), 2)
    stranger = subprocess.Popen(command, env={**os.environ, TOKEN: "another secret"})
    started = [stranger]

    def next_one() -> None:
        """Once the stranger has been sent away: later nobody listens, and it would try on."""
        if len(started) == 1 and stranger.poll() is not None:
            started.append(subprocess.Popen(command))

    try:
        trainer = Trainer(
            Replica(plan_of(model, tmp_path, str(address)), followers.join(next_one)),
            followers,
            WeightStore(tmp_path / "store"),
        )
        trainer.publish(0)
        trainer.train(0, batch_of(0))
        trainer.close()
        assert started[1].wait(PATIENCE_S) == 0
        assert stranger.returncode == 1
    finally:
        followers.close()
        for process in started:
            process.kill()
            process.wait()


def plan_of(model: Path, root: Path, rendezvous: str) -> ReplicaSettings:
    train = TrainSettings(processes=2, threads=1, device="cpu", rendezvous=rendezvous)
    return ReplicaSettings(
        model=str(model),
        store=str(root / "store"),
        train=train.model_dump(mode="json"),
        algorithm=AlgorithmSettings().model_dump(mode="json"),
        max_tokens=64,
        temperature=1.0,
        total_steps=3,
        seed=1,
    )
