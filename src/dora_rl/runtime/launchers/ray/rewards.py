"""Reward workers on the nodes of a cluster: beside each actor, a sandbox with one worker.

    driver    a queue of jobs; each actor has up to two, so that none waits for the driver
    actor     scores one job after the other in its sandbox (`tasks.scores`), with the task's limits
    outcome   every job has exactly one: the jobs of an actor that is lost are given to another

An actor that is lost is replaced, and waits for room. A job that is lost with its actor again and
again may be what kills them: it fails.
"""

import json
import logging
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError

from dora_rl.core.protocol.errors import UserError
from dora_rl.runtime.errors import RunFailed
from dora_rl.runtime.launchers.ray.actor import GROUPS
from dora_rl.runtime.launchers.ray.placement import Placement
from dora_rl.runtime.launchers.ray.remote_worker import CallQueue, last_line
from dora_rl.runtime.launchers.ray.settings import RewardWorkers
from dora_rl.sandbox.protocol import UserFunction
from dora_rl.tasks.scores import Outcome, ScoreJob, ScorePool, encode_job
from dora_rl.tasks.task import Task

_AHEAD = 2  # jobs of one actor: the next is there when one is done
_MOST_LOSSES = 3  # of one job, with the actors that had it
_MOST_FAILED_STARTS = 4  # in a row, besides all workers at once
_log = logging.getLogger(__name__)


class RewardOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What the actor of a reward worker is to start."""

    rewards: tuple[UserFunction, ...]
    options: dict[str, Any]
    variables: dict[str, str]


class RewardStarted(msgspec.Struct, frozen=True):
    """The answer to an order: its node and the gaps of its sandbox; or why there is none."""

    node: str
    gaps: tuple[str, ...] = ()
    refusal: str | None = None


def order_of(task: Task, variables: dict[str, str]) -> RewardOrder:
    """For the rewards of a task, which must have names: objects would need pickle."""
    unnamed = [reward.name for reward in task.rewards if not isinstance(reward.function, str)]
    if unnamed:
        raise UserError(
            f"runtime.ray.rewards needs rewards that are named by import path: `{unnamed[0]}` is "
            "an object. Use module:function, or number = 0."
        )
    options: dict[str, Any] = {**task.pool_options}
    # Where the driver finds the user's modules, but for what is installed.
    ours = [path for path in map(os.path.abspath, sys.path) if not path.startswith(_INSTALLED)]
    options["import_path"] = tuple(dict.fromkeys((*options["import_path"], *ours)))
    options["workers"] = 1
    return RewardOrder(rewards=tuple(task.rewards), options=options, variables=variables)


_INSTALLED = (sys.prefix, sys.base_prefix)


class RewardActor:
    """Hosts the sandbox, which ends with it."""

    def __init__(self) -> None:
        self._pool: ScorePool | None = None

    @ray.method(concurrency_group="control")
    def start(self, encoded: bytes) -> bytes:
        """Start the sandbox of a `RewardOrder`; the answer is an encoded `RewardStarted`."""
        order = msgspec.msgpack.decode(encoded, type=RewardOrder)
        os.environ.update(order.variables)
        node = str(ray.get_runtime_context().get_node_id())
        options = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in order.options.items()
        }
        try:
            self._pool = ScorePool(order.rewards, **options)  # type: ignore[arg-type]
        except UserError as error:
            return msgspec.msgpack.encode(RewardStarted(node, refusal=str(error)))
        return msgspec.msgpack.encode(RewardStarted(node, tuple(self._pool.isolation.gaps())))

    @ray.method(concurrency_group="inbox")
    def score(self, content: bytes) -> bytes:
        """The encoded `Outcome` of an encoded job."""
        assert self._pool is not None, "it is started first"
        job = msgspec.convert(json.loads(content), ScoreJob)
        return msgspec.msgpack.encode(self._pool.run(job))


@dataclass(slots=True, eq=False)
class _Job:
    content: bytes
    about: str
    reply: Callable[[Outcome], None]
    losses: int = 0


@dataclass(slots=True, eq=False)
class _Worker:
    """One actor, from its request for room until it is lost."""

    placement: Placement
    actor: Any
    node: str | None = None  # once it serves
    leaving: bool = False
    jobs: deque[_Job] = field(default_factory=deque)  # in the order of their answers

    def close(self) -> None:
        with suppress(RayError, ValueError, RuntimeError):
            ray.kill(self.actor)
        self.placement.leave(self)


class RemoteScorer:
    """A `Scorer` over actors. All that it calls back is called by whoever runs `calls`."""

    def __init__(
        self,
        order: RewardOrder,
        settings: RewardWorkers,
        calls: CallQueue,
        log: Callable[[str, str], object],
        *,
        patience_s: float,
        py_executable: str | None,
    ) -> None:
        """`log` is told what rewards print, and about whom; see `check` for `patience_s`."""
        self._order = msgspec.msgpack.encode(order)
        self._settings = settings
        self._calls = calls
        self._log = log
        self._patience_s = patience_s
        self._py_executable = py_executable
        self._workers: list[_Worker] = []
        self._waiting: deque[_Job] = deque()
        self._failed_starts = 0
        self._served_at = 0.0
        self._told: set[str] = set()
        self._number = 0

    def start(self) -> None:
        self._served_at = time.monotonic()
        for _ in range(self._settings.number):
            self._start_one()

    def score(self, job: ScoreJob, about: str, reply: Callable[[Outcome], None]) -> None:
        self._waiting.append(_Job(encode_job(job), about, reply))
        self._hand_out()

    def drained(self, nodes: Collection[str]) -> None:
        """Workers on these nodes finish what they have, and are replaced."""
        for worker in list(self._workers):
            if worker.node in nodes:
                worker.leaving = True
                self._replace_if_left(worker)

    def check(self) -> None:
        """Fail the run if jobs have waited too long for a worker to be there."""
        if not self._waiting or any(worker.node is not None for worker in self._workers):
            self._served_at = time.monotonic()
        elif time.monotonic() > self._served_at + self._patience_s:
            raise RunFailed(
                f"no reward worker has started within {self._patience_s:g} s of "
                "runtime.start_timeout_s. The cluster has no room: lower runtime.ray.rewards, or "
                "add a node."
            )

    def close(self) -> None:
        """End all of them; what is out has no reply any more."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.close()

    # Actors

    def _start_one(self) -> None:
        self._number += 1
        title = f"reward worker {self._number}"
        placement = Placement(self._settings)
        actor = placement.make_actor(RewardActor, GROUPS, title, self._py_executable)
        worker = _Worker(placement, actor)
        placement.enter(worker)
        self._workers.append(worker)
        self._ask(worker, worker.actor.start.remote(self._order), self._started)

    def _ask(self, worker: _Worker, answer: Any, then: Callable[[_Worker, Any], None]) -> None:
        def arrived(future: Any) -> None:  # on a thread of Ray's
            try:
                call = partial(then, worker, future.result())
            except Exception as error:
                call = partial(self._lost, worker, error)
            self._calls.put(lambda: call() if worker in self._workers else None)

        answer.future().add_done_callback(arrived)

    def _started(self, worker: _Worker, encoded: bytes) -> None:
        started = msgspec.msgpack.decode(encoded, type=RewardStarted)
        if started.refusal is not None:
            raise UserError(f"no reward worker on node {started.node}: {started.refusal}")
        worker.node = started.node
        self._failed_starts = 0
        gaps = "; ".join(started.gaps)
        if gaps and gaps not in self._told:
            self._told.add(gaps)
            _log.warning("sandbox gaps on node %s: reward workers can access %s", worker.node, gaps)
        self._hand_out()

    def _lost(self, worker: _Worker, error: Exception) -> None:
        """Its jobs come first for another; one that was lost too often has failed."""
        why = last_line(error)
        _log.warning("a reward worker is lost: %s", why)
        if worker.node is None:
            self._failed_starts += 1
            if self._failed_starts >= _MOST_FAILED_STARTS + self._settings.number:
                raise RunFailed(
                    f"{self._failed_starts} reward workers ended before they started: {why}"
                )
        self._workers.remove(worker)
        worker.close()
        self._start_one()
        for job in reversed(worker.jobs):
            job.losses += job is worker.jobs[0]  # the others had not begun
            if job.losses < _MOST_LOSSES:
                self._waiting.appendleft(job)
            else:
                failure = f"{job.losses} reward workers were lost with it: {why}"
                self._answer(job, Outcome(ticket=0, reward=math.nan, failure=failure))
        self._hand_out()

    # Jobs

    def _hand_out(self) -> None:
        """To who has the fewest."""
        while self._waiting:
            free = [
                worker
                for worker in self._workers
                if worker.node is not None and not worker.leaving and len(worker.jobs) < _AHEAD
            ]
            if not free:
                return
            worker = min(free, key=lambda worker: len(worker.jobs))
            job = self._waiting.popleft()
            worker.jobs.append(job)
            self._ask(worker, worker.actor.score.remote(job.content), self._scored)

    def _scored(self, worker: _Worker, encoded: bytes) -> None:
        job = worker.jobs.popleft()
        self._answer(job, msgspec.msgpack.decode(encoded, type=Outcome))
        self._replace_if_left(worker)
        self._hand_out()

    def _replace_if_left(self, worker: _Worker) -> None:
        if worker.leaving and not worker.jobs:
            self._workers.remove(worker)
            worker.close()
            self._start_one()

    def _answer(self, job: _Job, outcome: Outcome) -> None:
        failure = "" if outcome.failure is None else f"{outcome.failure}\n"
        if outcome.output or failure:
            self._log(job.about, outcome.output + failure)
        job.reply(outcome)
