"""Runs on Ray whose actors, nodes and drivers die; what all launchers share is in `test_local`."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from dora_rl.core.protocol.commands import Command, Dismiss, Start
from dora_rl.core.protocol.events import (
    BatchTrained,
    Event,
    InstanceFailed,
    InstanceJoined,
    TrajectoryFinished,
)
from dora_rl.runtime.control.listeners import Listener
from dora_rl.runtime.launchers.ray.ranks import FOLLOWER
from tests.patience import PATIENCE_S
from tests.runtime.conftest import NODE
from tests.runtime.harness import assert_sound, records, run
from tests.runtime.test_local import (
    ALONE,
    LOCAL,
    by,
    driver,
    goes_on,
    has_trained,
    interrupt,
    parts,
    wait_for,
)
from tests.runtime.test_local import nobody_is_left_behind as nobody_is_left_behind

pytestmark = pytest.mark.ray
DRAIN_S = 30.0  # that Ray gives a node by default, whose processes are killed then


class ActorKiller(Listener):
    """Strikes the actors, not the workers that they host: of an instance, then of the trainer."""

    def __init__(self, how: signal.Signals) -> None:
        self.how = how
        self.left = {"rollout-0": 3, "trainer": 6}  # trajectories that finish before

    def observed(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        for name in list(self.left):
            self.left[name] -= isinstance(event, TrajectoryFinished)
            if self.left[name] <= 0:
                for worker in parts(name):
                    del self.left[name]
                    worker.parent().send_signal(self.how)


def test_actors_that_are_killed_are_replaced_with_their_workers(
    ray_address: str, model: Path, tmp_path: Path
) -> None:
    killer = ActorKiller(signal.SIGKILL)
    kind = {"kind": "ray", "ray": {"address": ray_address}}
    ended = run(model, tmp_path / "run", killer, **by(ALONE, kind))
    assert not killer.left
    assert_sound(ended)
    found = [record.event for record in records(ended.directory)]
    (lost,) = [event.reason for event in found if isinstance(event, InstanceFailed)]
    assert lost.startswith("rollout instance 0 is lost: The actor is dead")
    joined = [event.incarnation for event in found if isinstance(event, InstanceJoined)]
    assert joined == [0, 1]


def test_actors_that_are_told_to_go_have_their_work_handed_over(
    ray_address: str, model: Path, tmp_path: Path
) -> None:
    """The instance finishes what it has, the trainer saves; none of them is lost."""
    teller = ActorKiller(signal.SIGTERM)
    sections = by(ALONE, {"kind": "ray", "ray": {"address": ray_address}})
    ended = run(model, tmp_path / "run", teller, **{**sections, "run": {"steps": 6}})
    assert not teller.left
    assert_sound(ended)
    found = records(ended.directory)
    assert not [r.event for r in found if isinstance(r.event, InstanceFailed)]
    joined = [r.event.incarnation for r in found if isinstance(r.event, InstanceJoined)]
    assert joined == [0, 1]
    starts = [c.trajectory for r in found for c in r.commands if isinstance(c, Start)]
    assert len(starts) == len(set(starts)), "something was written again"
    saved = [int(path.name.removeprefix("step-")) for path in checkpoints(ended.directory)]
    assert len(saved) == 2 and saved[-1] == 6, "the trainer saves when it is told to go"


def checkpoints(directory: Path) -> list[Path]:
    return sorted((directory / "checkpoints").glob("step-*"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head that trains, and a node that has an instance and may train, too."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "resources": {"trains": 1}, **NODE}
    )
    add_node(cluster, num_cpus=2, resources={"rolls": 1, "trains": 1})
    yield cluster
    cluster.shutdown()


def on(cluster: Any) -> dict[str, dict[str, Any]]:
    needs = {"trainer": {"custom": {"trains": 1}}, "rollout": {"custom": {"rolls": 1}}}
    return by(LOCAL, {"kind": "ray", "ray": {"address": cluster.address, **needs}})


def add_node(cluster: Any, **has: Any) -> Any:
    node = {"num_cpus": 1, "resources": {"rolls": 1}, **has}
    return cluster.add_node(object_store_memory=NODE["object_store_memory"], **node)


class RankKiller(Listener):
    """Kills the second rank of the trainer after a step."""

    def __init__(self) -> None:
        self.killed: list[psutil.Process] = []

    def observed(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        if isinstance(event, BatchTrained) and not self.killed:
            below = psutil.Process().children(recursive=True)
            self.killed = [p for p in below if FOLLOWER in p.cmdline()]
            for process in self.killed:
                process.kill()


def test_the_ranks_of_a_trainer_are_on_several_nodes(
    cluster: Any, model: Path, tmp_path: Path
) -> None:
    """No node has room for two. One that dies takes the trainer along, which is replaced."""
    sections = on(cluster)
    sections["runtime"]["instances"] = 1
    sections["train"] = {"processes": 2, "threads": None}
    killer = RankKiller()
    ended = run(model, tmp_path / "run", killer, **sections)
    assert_sound(ended)
    assert len(ended.steps) == 4
    (killed,) = killer.killed
    assert not killed.is_running()
    log = (ended.directory / "logs" / "trainer.log").read_text()
    assert "training process `1 (connection lost)` of 2 has died" in log


class NodeLoss(Listener):
    """Once both instances have joined, one loses its node; after a step, another is added.

    Once that has an instance, and a step was taken, the run is stopped.
    """

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        self.nodes = [add_node(cluster)]
        self.joined: set[tuple[int, int]] = set()
        self.lost = 0

    def observed(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        if isinstance(event, InstanceJoined):
            self.joined.add((event.instance, event.incarnation))
        self.lost += isinstance(event, InstanceFailed)
        if not isinstance(event, BatchTrained):
            return
        if len(self.joined) == 2 and self.nodes and not self.lost:
            self.cluster.remove_node(self.nodes.pop(), allow_graceful=False)
        elif self.lost and not self.nodes:
            self.nodes.append(add_node(self.cluster))
        elif len(self.joined) > 2:
            os.kill(os.getpid(), signal.SIGINT)


def test_a_node_takes_its_instance_along_and_another_one_gets_it(
    cluster: Any, model: Path, tmp_path: Path
) -> None:
    loss = NodeLoss(cluster)
    ended = run(model, tmp_path / "run", loss, **{**on(cluster), "run": {"steps": 10_000}})
    for node in loss.nodes:
        cluster.remove_node(node)
    assert ended.ending.interrupted and ended.audit.ok, ended
    assert ended.audit.lost == ended.audit.failed == 0
    found = [record.event for record in records(ended.directory)]
    (lost,) = [event for event in found if isinstance(event, InstanceFailed)]
    assert (lost.instance, 1) in loss.joined


class Preemption(Listener):
    """Once two instances have joined, the node of one gets SIGTERM, as from a scheduler.

    Once it has ended, and a step was taken since, the run is stopped.
    """

    def __init__(self, node: "subprocess.Popen[bytes]") -> None:
        self.node = node
        self.joined = 0
        self.told = 0.0
        self.gone = 0.0

    def observed(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        self.joined += isinstance(event, InstanceJoined)
        if self.told and not self.gone and self.node.poll() is not None:
            self.gone = now
        if not isinstance(event, BatchTrained):
            return
        if self.joined == 2 and not self.told:
            self.told = now
            self.node.send_signal(signal.SIGTERM)
        elif self.gone:
            os.kill(os.getpid(), signal.SIGINT)


@contextmanager
def node_by_command(address: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A node as on any machine: `ray start --block` is what a scheduler tells to go."""
    ray = Path(sys.executable).with_name("ray")
    resources = ["--num-cpus=1", '--resources={"rolls": 1}', "--object-store-memory=80000000"]
    node = subprocess.Popen(
        [ray, "start", f"--address={address}", *resources, "--block"], stderr=subprocess.DEVNULL
    )
    try:
        yield node
    finally:
        node.kill()
        node.wait()


def test_a_node_that_is_preempted_with_notice_hands_its_work_over(
    cluster: Any, model: Path, tmp_path: Path
) -> None:
    sections = {**on(cluster), "run": {"steps": 10_000}}
    sections["rollout"] = {"slots": 8, "max_tokens": 200, "stop": None}
    with node_by_command(cluster.address) as node:
        preemption = Preemption(node)
        ended = run(model, tmp_path / "run", preemption, **sections)
    assert ended.ending.interrupted and ended.audit.ok, ended
    assert ended.audit.lost == ended.audit.failed == 0
    found = records(ended.directory)
    dismissed = [c for r in found for c in r.commands if isinstance(c, Dismiss)]
    assert len(dismissed) == 1
    assert not [r.event for r in found if isinstance(r.event, InstanceFailed)]
    starts = [c.trajectory for r in found for c in r.commands if isinstance(c, Start)]
    assert len(starts) == len(set(starts)), "something was written again"
    assert preemption.gone - preemption.told < DRAIN_S, "it was not empty when its time was over"


# Drivers with clusters of their own


def test_an_interrupted_driver_ends_its_cluster_and_its_run_goes_on_elsewhere(
    ray_address: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    with driver(model, out, steps=8, kind={"kind": "ray"}) as process:
        wait_for(lambda: has_trained(out), process)
        below = psutil.Process(process.pid).children(recursive=True)
        interrupt(process, out)
        assert not psutil.wait_procs(below, timeout=PATIENCE_S)[1]
    monkeypatch.setenv("RAY_ADDRESS", ray_address)
    goes_on(out, steps=8)


def test_a_killed_driver_leaves_nobody_behind_and_its_run_goes_on_elsewhere(
    ray_address: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    with driver(model, out, steps=8, kind={"kind": "ray"}) as process:
        wait_for(lambda: has_trained(out), process)
        below = psutil.Process(process.pid).children(recursive=True)
        listening = [c for p in below for c in connections(p) if c.status == psutil.CONN_LISTEN]
        process.kill()
        process.wait()
        assert not psutil.wait_procs(below, timeout=PATIENCE_S)[1]
    ours = {connection.laddr.ip.removeprefix("::ffff:") for connection in listening}
    assert ours == {"127.0.0.1"}
    monkeypatch.setenv("RAY_ADDRESS", ray_address)
    goes_on(out, steps=8)


def connections(process: psutil.Process) -> list[Any]:
    try:
        return list(process.net_connections("inet"))
    except psutil.Error:
        return []
