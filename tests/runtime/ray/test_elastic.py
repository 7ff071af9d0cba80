"""The trainer's placement group lends its devices: who generates there is beside the trainer.

A cluster of three nodes: instances fit on the head alone, the trainer on either of the others.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from dora_rl.core.protocol.commands import Command, Start
from dora_rl.core.protocol.events import (
    BatchTrained,
    Event,
    InstanceFailed,
    InstanceJoined,
    InstanceLeaving,
    InstanceSlept,
    InstanceWoke,
)
from dora_rl.runtime.control.decisions import ELASTIC_INSTANCES
from dora_rl.runtime.control.listeners import Listener
from dora_rl.runtime.execution import Run
from tests.runtime.conftest import NODE
from tests.runtime.harness import records, run
from tests.runtime.test_local import nobody_is_left_behind as nobody_is_left_behind
from tests.runtime.test_local import parts

pytestmark = pytest.mark.ray
TRAINS = {"num_cpus": 1, "resources": {"trains": 1}}
DRAIN_S = 60
ELASTIC = f"rollout-{ELASTIC_INSTANCES}"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 1, "resources": {"rolls": 1}, **NODE}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    yield cluster
    cluster.shutdown()


@pytest.fixture
def nodes(cluster: Any) -> Iterator[list[Any]]:
    """Two that the trainer fits on."""
    store = NODE["object_store_memory"]
    added = [cluster.add_node(object_store_memory=store, **TRAINS) for _ in range(2)]
    yield added
    for node in added:
        if node in cluster.worker_nodes:
            cluster.remove_node(node, allow_graceful=False)


def lending(cluster: Any) -> dict[str, dict[str, Any]]:
    """The trainer waits for long responses, and lending costs nothing, as far as it is known."""
    needs = {"trainer": {"custom": {"trains": 1}}, "rollout": {"custom": {"rolls": 1}}}
    return {
        "orchestration": {
            "groups_per_step": 4,
            "elastic": "both",
            "elastic_gain": 1.0,
            "switch_estimate_s": 0.0,
            "install_estimate_s": 0.0,
        },
        "rollout": {"slots": 2, "max_tokens": 200, "stop": []},
        "runtime": {"kind": "ray", "ray": {"address": cluster.address, **needs}},
        "run": {"steps": 10_000},
    }


def raylet_of(worker: str) -> int:
    """Of the node that a worker runs on: it has started the actor, which has started the worker."""
    (process,) = parts(worker)
    return int(process.parent().parent().pid)


def node_of(worker: str, nodes: list[Any]) -> Any:
    raylet = raylet_of(worker)
    (node,) = [n for n in nodes if n.all_processes["raylet"][0].process.pid == raylet]
    return node


class Loan(Listener):
    """Once something runs on lent devices, `strike`; the run ends after a loan and a step since."""

    def __init__(self, strike: Callable[[], None], *, same: bool = False) -> None:
        self.strike = strike
        self.struck = False
        self.since: set[type[Event]] = set()
        self.same = same  # the instance stays
        self.incarnation = 0
        self.ended = False

    def observed(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        here = getattr(event, "instance", None) == ELASTIC_INSTANCES
        lent = any(isinstance(c, Start) and c.instance == ELASTIC_INSTANCES for c in commands)
        if lent and not self.struck:
            self.struck = True
            self.strike()
        elif self.struck:
            if here and isinstance(event, InstanceJoined):
                self.incarnation = event.incarnation
            if self.incarnation or self.same:
                self.since |= {type(event)} if here or isinstance(event, BatchTrained) else set()
            if {InstanceWoke, InstanceSlept, BatchTrained} <= self.since and not self.ended:
                self.ended = True
                os.kill(os.getpid(), signal.SIGINT)


def events(ended: Run) -> list[Event]:
    """Of the elastic instance."""
    found = [record.event for record in records(ended.directory)]
    return [event for event in found if getattr(event, "instance", None) == ELASTIC_INSTANCES]


def assert_nothing_lost(ended: Run) -> None:
    assert ended.ending.interrupted and ended.audit.ok, "\n".join(ended.audit.summary())
    assert ended.audit.lost == ended.audit.failed == 0


def test_a_trainer_that_dies_leaves_the_instance_on_its_devices_alone(
    cluster: Any, nodes: list[Any], model: Path, tmp_path: Path
) -> None:
    """Its successor starts beside it, in the same placement group."""
    raylets: list[int] = []

    def kill_trainer() -> None:
        raylets.append(raylet_of("trainer"))
        assert raylet_of(ELASTIC) == raylets[0]
        parts("trainer")[0].kill()

    class Look(Loan):
        def observed(self, now: float, event: Event, commands: Sequence[Command]) -> None:
            if self.struck and isinstance(event, BatchTrained):
                raylets.append(raylet_of("trainer"))
            super().observed(now, event, commands)

    ended = run(model, tmp_path / "run", Look(kill_trainer, same=True), **lending(cluster))
    assert_nothing_lost(ended)
    assert len(raylets) > 1 and len(set(raylets)) == 1
    joined = [e.incarnation for e in events(ended) if isinstance(e, InstanceJoined)]
    assert joined == [0]
    found = [record.event for record in records(ended.directory)]
    elsewhere = [e.lendable for e in found if isinstance(e, InstanceJoined) and e.instance == 0]
    assert elsewhere == [False], "its cores are of another node than the trainer's"


def test_a_node_that_dies_while_its_devices_are_lent_loses_nothing(
    cluster: Any, nodes: list[Any], model: Path, tmp_path: Path
) -> None:
    """Trainer and elastic instance are gone at once; both continue on the other node."""

    def kill_node() -> None:
        cluster.remove_node(node_of(ELASTIC, nodes), allow_graceful=False)

    ended = run(model, tmp_path / "run", Loan(kill_node), **lending(cluster))
    assert_nothing_lost(ended)
    found = events(ended)
    # If the trainer's death is heard of first, its guest is told to go, though it is gone already.
    gone = [e.incarnation for e in found if isinstance(e, InstanceFailed | InstanceLeaving)]
    joined = [event.incarnation for event in found if isinstance(event, InstanceJoined)]
    assert gone[0] == joined[0] == 0 < joined[1] and len(joined) == 2


def test_a_node_that_is_drained_while_its_devices_are_lent_hands_its_work_over(
    cluster: Any, nodes: list[Any], model: Path, tmp_path: Path
) -> None:
    """The trainer saves and moves, the elastic instance is emptied and follows."""

    def drain() -> None:
        node = f"--node-id={node_of(ELASTIC, nodes).node_id}"
        why = ["--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=test"]
        until = f"--deadline-remaining-seconds={DRAIN_S}"
        ray = Path(sys.executable).with_name("ray")
        command = [ray, "drain-node", f"--address={cluster.address}", node, *why, until]
        subprocess.run(command, check=True, capture_output=True)

    ended = run(model, tmp_path / "run", Loan(drain), **lending(cluster))
    assert_nothing_lost(ended)
    found = events(ended)
    assert not [event for event in found if isinstance(event, InstanceFailed)]
    assert len([event for event in found if isinstance(event, InstanceLeaving)]) == 1
    starts = [
        command.trajectory
        for record in records(ended.directory)
        for command in record.commands
        if isinstance(command, Start)
    ]
    assert len(starts) == len(set(starts)), "something was written again"
