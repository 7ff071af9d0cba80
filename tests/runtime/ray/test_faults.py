"""Runs on Ray whose actors, nodes and drivers die; what all launchers share is in `test_local`."""

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from dora_rl.core.protocol.commands import Command
from dora_rl.core.protocol.events import (
    BatchTrained,
    Event,
    InstanceFailed,
    InstanceJoined,
    TrajectoryFinished,
)
from dora_rl.runtime.control.listeners import Listener
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


class ActorKiller(Listener):
    """Kills the actors, not the workers that they host: of an instance, then of the trainer."""

    def __init__(self) -> None:
        self.left = {"rollout-0": 3, "trainer": 6}  # trajectories that finish before

    def observed(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        for name in list(self.left):
            self.left[name] -= isinstance(event, TrajectoryFinished)
            if self.left[name] <= 0:
                for worker in parts(name):
                    del self.left[name]
                    worker.parent().kill()


def test_actors_that_are_killed_are_replaced_with_their_workers(
    ray_address: str, model: Path, tmp_path: Path
) -> None:
    killer = ActorKiller()
    kind = {"kind": "ray", "ray": {"address": ray_address}}
    ended = run(model, tmp_path / "run", killer, **by(ALONE, kind))
    assert not killer.left
    assert_sound(ended)
    found = [record.event for record in records(ended.directory)]
    (lost,) = [event.reason for event in found if isinstance(event, InstanceFailed)]
    assert lost.startswith("rollout instance 0 is lost: The actor is dead")
    joined = [event.incarnation for event in found if isinstance(event, InstanceJoined)]
    assert joined == [0, 1]


@pytest.fixture
def nodes() -> Iterator[Any]:
    """A cluster that trains on its head, with two nodes for an instance each."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "resources": {"trains": 1}, **NODE}
    )
    for _ in range(2):
        add_node(cluster)
    yield cluster
    cluster.shutdown()


def add_node(cluster: Any) -> Any:
    store = NODE["object_store_memory"]
    return cluster.add_node(num_cpus=1, resources={"rolls": 1}, object_store_memory=store)


class NodeLoss(Listener):
    """Once both instances have joined, one loses its node; after a step, another is added.

    Once that has an instance, and a step was taken, the run is stopped.
    """

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        self.joined: set[tuple[int, int]] = set()
        self.lost = 0
        self.added = False

    def observed(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        if isinstance(event, InstanceJoined):
            self.joined.add((event.instance, event.incarnation))
        self.lost += isinstance(event, InstanceFailed)
        if not isinstance(event, BatchTrained):
            return
        if len(self.joined) == 2 and len(self.cluster.worker_nodes) == 2 and not self.lost:
            node = sorted(self.cluster.worker_nodes, key=str)[0]
            self.cluster.remove_node(node, allow_graceful=False)
        elif self.lost and not self.added:
            self.added = True
            add_node(self.cluster)
        elif len(self.joined) > 2:
            os.kill(os.getpid(), signal.SIGINT)


def test_a_node_takes_its_instance_along_and_another_one_gets_it(
    nodes: Any, model: Path, tmp_path: Path
) -> None:
    loss = NodeLoss(nodes)
    needs = {"trainer": {"custom": {"trains": 1}}, "rollout": {"custom": {"rolls": 1}}}
    sections = by(LOCAL, {"kind": "ray", "ray": {"address": nodes.address, **needs}})
    ended = run(model, tmp_path / "run", loss, **{**sections, "run": {"steps": 10_000}})
    assert ended.ending.interrupted and ended.audit.ok, ended
    assert ended.audit.lost == ended.audit.failed == 0
    found = [record.event for record in records(ended.directory)]
    (lost,) = [event for event in found if isinstance(event, InstanceFailed)]
    assert (lost.instance, 1) in loss.joined


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
