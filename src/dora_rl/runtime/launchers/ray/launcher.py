"""Workers on the nodes of a Ray cluster: starts, stops and reaches them, and reports their facts.

An instance that finds no room waits for it, and is no worker until then: a node that is added gets
the instances that a node took along. The trainer comes first: if it waits, an instance makes room.
Elastic instances are in the trainer's placement group, wherever that is, and follow it.
"""

import os
import secrets
import selectors
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import ray
from ray.exceptions import RayError

from dora_rl.core.protocol.errors import UserError
from dora_rl.runtime.control import messages as ms
from dora_rl.runtime.control.decisions import (
    ELASTIC_INSTANCES,
    TRAINER,
    Death,
    Role,
    Worker,
    is_elastic,
)
from dora_rl.runtime.control.memory import Watch
from dora_rl.runtime.launchers.local.processes import Exit
from dora_rl.runtime.launchers.ray.actor import Order
from dora_rl.runtime.launchers.ray.cluster import connected
from dora_rl.runtime.launchers.ray.drains import watched_drains
from dora_rl.runtime.launchers.ray.introductions import (
    Introductions,
    uses_objects,
    with_transports,
)
from dora_rl.runtime.launchers.ray.placement import Placement
from dora_rl.runtime.launchers.ray.ranks import TOKEN, Group
from dora_rl.runtime.launchers.ray.remote_worker import CallQueue, Ears, RemoteWorker
from dora_rl.runtime.launchers.ray.rewards import RemoteScorer, order_of
from dora_rl.runtime.launchers.wall_clock import WallClockRuntime
from dora_rl.runtime.records.run_files import Ending, RunFiles
from dora_rl.transports.handshake import Address

_END_S = 30.0  # for workers to end when they are asked to; then their actors are killed
_YIELD_S = 10.0  # that the trainer waits for room before an instance makes some
_PASSED_ON = "DORA_RL_"  # begins the variables of the environment that workers share


class RayRuntime(WallClockRuntime[RemoteWorker]):
    """Carries a run's messages by calls of actors."""

    def __init__(self, files: RunFiles, memory: Watch | None = None) -> None:
        self._calls = CallQueue()
        self._scorer = _remote_scorer(files, self._calls)
        introductions = Introductions(lambda: self._processes.get(TRAINER))
        config = with_transports(files.config)
        by_objects = config.runtime.kv.transport == "object_store"
        kv = introductions if by_objects else None
        super().__init__(files, memory, scorer=self._scorer, kv=kv)
        self._config = config
        self.driver.listeners.append(introductions)
        self._introductions = introductions
        self._node = ""
        self._yielded_at = 0.0
        self._trainer_room: Placement | None = None  # of its last incarnation
        self._postponed: dict[Worker, int] = {}  # elastic instances, until the trainer has moved
        self._ears = Ears(
            started=self._started,
            refused=self._refused,
            said=self._receive,
            ended=self._ended,
            lost=self._lost,
        )

    def run(self) -> Ending:
        self._selector.register(self._calls, selectors.EVENT_READ, self._calls.run)
        try:
            with connected(self._config):
                self._node = ray.get_runtime_context().get_node_id()
                with watched_drains(self._calls, self._drained), self._scoring():
                    return super().run()
        finally:
            self._calls.close()
            self._selector.close()

    def _turn(self) -> None:
        super()._turn()
        self._make_room()
        self._follow_trainer()
        if self._scorer is not None:
            self._scorer.check()

    @contextmanager
    def _scoring(self) -> Iterator[None]:
        """Reward workers run inside, if they are on nodes."""
        if self._scorer is None:
            yield
            return
        self._scorer.start()
        try:
            yield
        finally:
            self._scorer.close()

    def _spawn(self, worker: Worker, setup: ms.Setup, log: str) -> RemoteWorker:
        path = str(self._files.plan.out.resolve() / "logs" / f"{log}.log")
        interpreter = None if worker.role is Role.TRAINER else self._interpreter
        own: dict[str, Any] = {}
        if interpreter is not None:
            own = {"python": str(interpreter.python), "python_variables": interpreter.variables}
        ranks = None
        shared = _shared_variables()
        if worker.role is Role.TRAINER and self._config.train.processes > 1 and self._over_nodes:
            ranks = self._group(setup.threads, path, shared)
            shared[TOKEN] = ranks.token
        order = Order(
            name=str(worker),
            setup=ms.encode(setup),
            site=self._site.encode(),
            log=path,
            meets=ranks is not None,
            variables=shared,
            objects=worker.role is not Role.TRAINER and uses_objects(self._config),
            **own,
        )
        placement, bundle = self._place(worker, 1 if ranks is None else ranks.size)
        return RemoteWorker(
            order,
            placement,
            self._calls,
            self._ears,
            title=f"{worker}, incarnation {setup.incarnation}",
            py_executable=self._config.runtime.ray.py_executable,
            ranks=ranks,
            guest_in=bundle,
        )

    def _place(self, worker: Worker, bundles: int) -> tuple[Placement, int | None]:
        """The group for a worker, and for a guest of the trainer's the number of its bundle."""
        settings = self._config.runtime.ray
        match worker.role:
            case Role.TRAINER:
                return self._place_trainer(bundles), None
            case Role.ROLLOUT if _elastic(worker):
                assert self._trainer_room is not None and worker.instance is not None
                number = worker.instance - ELASTIC_INSTANCES
                return self._trainer_room, number % self._trainer_room.bundles
            case Role.ROLLOUT:
                return Placement(settings.rollout), None
            case Role.EVALUATOR:
                return Placement(settings.evaluator), None

    def _place_trainer(self, bundles: int) -> Placement:
        """Where its last incarnation was, if guests are there; or else where there is room."""
        if self._trainer_room is None or not self._trainer_room.takes_another:
            resources = self._config.runtime.ray.trainer
            if bundles == 1 and self._config.train.rendezvous is None:
                # Rank 0 starts the others beside itself.
                resources = resources.times(self._config.train.processes)
            self._trainer_room = Placement(resources, bundles)
        return self._trainer_room

    @property
    def _over_nodes(self) -> bool:
        """Whether ranks of the trainer may be on several nodes.

        Not of a cluster on loopback, which is this machine; nor where the user starts them.
        """
        here = Address(ray.util.get_node_ip_address(), 0)
        return self._config.train.rendezvous is None and not here.loopback

    def _group(self, threads: int, log: str, variables: Mapping[str, str]) -> Group:
        """Of a trainer's ranks. Each incarnation has its own token, unless the user names one."""
        token = variables.get(TOKEN) or secrets.token_hex(32)
        others = {name: value for name, value in variables.items() if name != TOKEN}
        size = self._config.train.processes
        return Group(size=size, token=token, threads=threads, log=log, variables=others)

    def _started(self, process: RemoteWorker) -> None:
        """An instance had no room until now; of the others, the wait counts as their start."""
        worker = self._worker(process)
        if worker is not None and worker.role is Role.ROLLOUT:
            self.supervisor.started(self.clock.now(), worker, self._incarnations[worker])

    def _refused(self, process: RemoteWorker, absent: str) -> None:
        raise UserError(
            f"{process.name} cannot run on node {process.node}, which has no `{absent}`. Put the "
            "run directory, the model and the interpreter where all nodes have them."
        )

    def _ended(self, process: RemoteWorker, ended: Exit) -> None:
        here = process.node == self._node  # else it was another machine's memory
        deaths = self._memory.deaths
        why = ended.described(process.name, *([self._memory.blame] if here else []))
        if self._memory.deaths > deaths:
            self._killed_short(why)
        self._died(process, Death(why, own_error=ended.failed))

    def _lost(self, process: RemoteWorker, why: str, own_error: bool) -> None:
        if self._worker(process) == TRAINER:
            process.placement.condemned = True  # its node may be lost, and Ray not know it yet
        if process.waiting:
            self._started(process)  # one that never was has died as well
        self._died(process, Death(why, own_error=own_error))

    # Instances on the trainer's devices

    def start_worker(self, worker: Worker, incarnation: int) -> None:
        room = self._trainer_room
        if _elastic(worker) and (room is None or room.condemned):
            self._postponed[worker] = incarnation
        else:
            super().start_worker(worker, incarnation)

    def _follow_trainer(self) -> None:
        """What generates on devices that the trainer has left hands its work over, and moves."""
        room = self._trainer_room
        if room is None or room.condemned:
            return
        postponed, self._postponed = self._postponed, {}
        for worker, incarnation in postponed.items():
            self.start_worker(worker, incarnation)
        for worker, process in list(self._processes.items()):
            if not _elastic(worker) or process.over or process.placement is room:
                continue
            if process.waiting:  # it was no worker yet
                process.close()
                self.start_worker(worker, self._incarnations[worker] + 1)
            else:
                self.told_to_go(worker, "the trainer has other devices now")

    def _can_lend(self, process: RemoteWorker) -> bool:
        """The trainer can use cores of its own node alone."""
        trainer = self._processes.get(TRAINER)
        beside = trainer is not None and process.node == trainer.node
        return beside and super()._can_lend(process)

    # Nodes

    def _drained(self, nodes: Collection[str]) -> None:
        """Nodes that are about to go; they take no new workers, by Ray."""
        trainer = self._processes.get(TRAINER)
        if trainer is not None and trainer.is_on(nodes):
            trainer.placement.condemned = True
        for worker, process in list(self._processes.items()):
            if process.is_on(nodes):
                self.told_to_go(worker, "its node is drained")
        if self._scorer is not None:
            self._scorer.drained(nodes)

    def _make_room(self) -> None:
        """Its replacement waits behind the trainer."""
        trainer, now = self._processes.get(TRAINER), time.monotonic()
        if trainer is None or not trainer.waiting:
            return
        if now < max(trainer.since, self._yielded_at) + _YIELD_S:
            return
        self._yielded_at = now
        if not trainer.placement.lacks_room:
            return
        for worker, process in reversed(self._processes.items()):
            guest = process.placement is trainer.placement
            if worker.role is Role.ROLLOUT and not guest and not process.waiting:
                process.kill()
                return

    def _send(self, process: RemoteWorker, message: ms.Message) -> None:
        process.send(message, self._introductions.peers_for(process, message))

    def _end(self, processes: Iterable[RemoteWorker]) -> None:
        processes = list(processes)
        answers = [answer for process in processes for answer in process.ask_to_end()]
        with suppress(RayError):
            if answers:
                ray.wait(answers, num_returns=len(answers), timeout=_END_S)
        for process in processes:
            process.close()


def _elastic(worker: Worker) -> bool:
    return worker.instance is not None and is_elastic(worker.instance)


def _shared_variables() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key.startswith(_PASSED_ON)}


def _remote_scorer(files: RunFiles, calls: CallQueue) -> RemoteScorer | None:
    """What scores on the nodes, if the run wants that and has rewards."""
    ray_settings, task = files.config.runtime.ray, files.plan.task
    if not ray_settings.rewards.number or not task.rewards:
        return None
    return RemoteScorer(
        order_of(task, _shared_variables()),
        ray_settings.rewards,
        calls,
        files.reward_log.entry,
        patience_s=files.config.runtime.start_timeout_s,
        py_executable=ray_settings.py_executable,
    )
