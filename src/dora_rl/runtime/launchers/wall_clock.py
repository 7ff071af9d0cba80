"""The loop of every launcher whose workers are processes of their own, on the machine's clock.

A subclass starts workers and carries bytes to and from them; it calls `_receive` for each message
and `_died` for each death. What a fact leads to is decided elsewhere: of the run by the core, of
workers by the supervisor. A worker that dies or hangs is replaced: a rollout worker resumes from
the prefixes that it saved, a trainer from the last checkpoint with the steps since.
"""

import logging
import os
import selectors
from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Generic, Literal

from dora_rl.core.protocol.errors import UserError
from dora_rl.core.protocol.events import InstanceJoined, InstanceLeaving, InstanceSlept
from dora_rl.core.protocol.settings import Elastic
from dora_rl.core.protocol.types import InstanceId, SleepState
from dora_rl.core.state.run import TrainerPhase
from dora_rl.engines.registry import own_interpreter
from dora_rl.machine.cycle_search import CycleSearch
from dora_rl.runtime.control import messages as ms
from dora_rl.runtime.control.decisions import (
    ELASTIC_INSTANCES,
    EVALUATOR,
    EVALUATOR_INSTANCE,
    TRAINER,
    Death,
    Role,
    Worker,
    is_elastic,
    rollout,
)
from dora_rl.runtime.control.memory import Watch
from dora_rl.runtime.control.services import Scorer
from dora_rl.runtime.control.task_workers import TaskWorkers
from dora_rl.runtime.launchers.base import Runtime
from dora_rl.runtime.launchers.handle import H, Receive
from dora_rl.runtime.launchers.local.site import Site
from dora_rl.runtime.launchers.wall_time import WallTime
from dora_rl.runtime.records.run_files import Ending, RunFiles
from dora_rl.store.scale_request import take_request
from dora_rl.transports.kv import KvControl

_log = logging.getLogger(__name__)
_LONGEST_WAIT_S = 0.5  # so that an interrupt is noticed soon


class WallClockRuntime(Runtime, Generic[H]):
    """Carries a run's messages between processes."""

    def __init__(
        self,
        files: RunFiles,
        memory: Watch | None = None,
        *,
        scorer: Scorer | None = None,
        around_receive: Callable[[Receive[H]], Receive[H]] = lambda receive: receive,
        kv: KvControl | None = None,
    ) -> None:
        """`around_receive` wraps the receiver of all messages, to repeat, change or drop some.

        Without a `scorer`, rewards run in a sandbox of this machine.
        """
        self._memory = memory or Watch(files.config.runtime.min_free_memory_mb)
        self._time = WallTime()
        self._task_workers = self._make_task_workers(files, scores=scorer is None)
        super().__init__(
            files,
            clock=self._time,
            timer=self._time,
            scorer=scorer or self._task_workers,
            environments=self._task_workers,
            kv=kv,
            watches_memory=bool(self._memory.bound_mb),
        )
        plan = files.plan
        self._site = Site(str(plan.model.resolve()), str(plan.out.resolve()), os.getpid())
        engine = files.config.rollout
        self._interpreter = own_interpreter(engine.engine, engine.engine_options, engine.device)
        self._selector = selectors.DefaultSelector()
        self._processes: dict[Worker, H] = {}
        self._roles: dict[H, Worker] = {}  # of those very processes
        self._incarnations: dict[Worker, int] = {}  # the last that was started
        self._asked_at = 0.0  # when requests were last looked for
        self._evaluator_must_go = False
        self._evaluators = 0  # that were started: the incarnation of the next one
        self._receive = around_receive(self._take)

    # What a subclass does

    def _make_task_workers(self, files: RunFiles, *, scores: bool) -> TaskWorkers:
        """Who computes rewards and runs environments."""
        return TaskWorkers(files.plan.task, files.reward_log.entry, scores=scores)

    @abstractmethod
    def _spawn(self, worker: Worker, setup: ms.Setup, log: str) -> H:
        """Start a process for the worker; `log` names its file in `logs/`."""

    @abstractmethod
    def _send(self, process: H, message: ms.Message) -> None:
        """Queue a message. One that is gone gets none: its death is noticed otherwise."""

    @abstractmethod
    def _end(self, processes: Iterable[H]) -> None:
        """Ask all of them to end, and see to it that they do."""

    # The loop

    def stop(self) -> None:
        """Finish the step that is under way, save, and end. Safe to call from a signal."""
        self.supervisor.ask_to_stop()

    def run(self) -> Ending:
        (self._files.plan.out / "logs").mkdir(exist_ok=True)
        try:
            self._task_workers.start()
            for pool in self._task_workers.pools:
                for fd in pool.filenos():
                    self._selector.register(fd, selectors.EVENT_READ, None)
            self._time.begin(self._files.orchestrator.state.now)
            self.start_worker(TRAINER, 0)
            # A trainer that refuses the checkpoint leaves a resumed run as it was; so does a stop.
            while self._files.plan.resumed and not self.supervisor.trainer_ready:
                if self.supervisor.stop_asked:
                    return self._checkpointer.stopped_before(self.supervisor.because)
                self._turn()
            self._begin()
            self._begun = True
            self.scale(self._config.runtime.instances)
            self._start_elastic()
            with CycleSearch() as cycles:  # all messages wait for a search
                while not self._done:
                    self._turn()
                    cycles.step()
            return self._checkpointer.ending()
        finally:
            self._end_processes()
            self._task_workers.close()
            self._selector.close()

    def _turn(self) -> None:
        """Wait for whatever comes next, and let the driver have it."""
        for key, mask in self._selector.select(self._wait_s()):
            if key.data is not None:
                key.data(mask)
        self._task_workers.poll_scores()
        self._task_workers.poll_environments()
        if self._time.rings():
            self.driver.ring()
        if self.driver.halted is not None:
            self._checkpointer.halted()
        short = self._memory.short(self.clock.now())
        if short is not None:
            self._obey(self.supervisor.memory_short(short))
        self._obey(self.supervisor.check(self.clock.now(), self._facts))
        self._take_requests()
        if self._evaluator_must_go:
            self._end_idle_evaluator()
        # Last: what workers said during a long commit is heard before their silence is judged.
        self._files.committer.commit_if_due()

    def _wait_s(self) -> float:
        waits = [_LONGEST_WAIT_S]
        others = [self._files.committer.commit_in_s(), self._time.wait_s()]
        others += [pool.due_in_s() for pool in self._task_workers.pools]
        waits += [wait for wait in others if wait is not None]
        return max(0.0, min(waits))

    # The number of instances

    def scale(self, instances: int) -> None:
        """Have so many rollout instances: new ones join, those of the highest numbers leave.

        One that leaves hands its trajectories over, or finishes them, before it ends.
        """
        self.supervisor.resized(instances)
        fleet = self._files.orchestrator.state.fleet
        for worker in map(rollout, range(instances)):
            if worker not in self._processes:
                assert worker.instance is not None
                last = max(fleet.ended.get(worker.instance, -1), self._incarnations.get(worker, -1))
                self.start_worker(worker, last + 1)
        for worker in [w for w in self._processes if w.role is Role.ROLLOUT]:
            assert worker.instance is not None
            if worker.instance < instances or is_elastic(worker.instance):
                continue
            joined = fleet.instances.get(worker.instance)
            if joined is None:
                self.kill_worker(worker)
            elif not joined.leaving:
                self.driver.post(InstanceLeaving(joined.id, joined.incarnation))

    def _start_elastic(self) -> None:
        """Instances on the trainer's cores, which sleep until it waits."""
        fleet = self._files.orchestrator.state.fleet
        for number in range(self._config.elastic_instances):
            instance = ELASTIC_INSTANCES + number
            self.start_worker(rollout(instance), fleet.ended.get(instance, -1) + 1)

    def _can_lend(self, process: H) -> bool:
        """Whether the trainer could use the cores of this rollout worker while that sleeps."""
        return self._config.train.processes == 1

    def _joined(self, process: H, event: InstanceJoined) -> ms.Reported:
        """What the core is told: where an instance is, its worker does not know."""
        wanted = self._config.orchestration.elastic is Elastic.BOTH and not event.elastic
        lendable = not wanted or self._can_lend(process)
        return ms.Reported.of(replace(event, lendable=lendable))

    def _lend_cores(self) -> None:
        """The trainer has the cores of instances that sleep, until its step is taken."""
        state = self._files.orchestrator.state
        helping = [i.id for i in state.fleet.helping() if i.sleep is SleepState.ASLEEP]
        asleep = sum(self._can_lend(self._processes[rollout(name)]) for name in helping)
        if asleep and state.trainer.phase is TrainerPhase.TRAINING:
            threads = self._config.threads()
            self.to_trainer(ms.LendThreads(threads.train + asleep * threads.rollout))

    def _take_requests(self) -> None:
        """`dora-rl scale` leaves them in the run directory."""
        now = self.clock.now()
        if not self._begun or now < self._asked_at + _LONGEST_WAIT_S:
            return
        self._asked_at = now
        instances = take_request(self._files.plan.out)
        if instances is not None and self.driver.halted is None and not self._checkpointer.stopping:
            _log.info("rollout instances are to be %d", instances)
            self.scale(instances)

    def forget_worker(self, worker: Worker) -> None:
        del self._roles[self._processes.pop(worker)]

    # Workers that have to go

    def told_to_go(self, worker: Worker, why: str) -> None:
        """Others will end its process soon. Until then its work moves, or is saved.

        So a node that is preempted with notice loses nothing that could be moved in time.
        """
        if decisions := self.supervisor.told_to_go(worker, why):
            _log.info("%s is told to go: %s", worker, why)
            self._obey(decisions)

    def drain_worker(self, worker: Worker) -> None:
        match worker.role:
            case Role.TRAINER if self._config.run.durable:  # else nobody could take its place
                self._checkpointer.save_soon(lambda: self.kill_worker(TRAINER))
            case Role.ROLLOUT:
                assert worker.instance is not None
                incarnation = self._incarnations[worker]
                joined = self._files.orchestrator.state.fleet.known(worker.instance, incarnation)
                if joined is None:
                    self.kill_worker(worker)
                elif not joined.leaving:
                    self.driver.post(InstanceLeaving(worker.instance, incarnation))
            case Role.EVALUATOR:
                self._evaluator_must_go = True

    def _end_idle_evaluator(self) -> None:
        """One that has to go ends between two evaluations; the next has another process."""
        assert self._evaluator is not None
        if EVALUATOR in self._processes and not self._evaluator.busy:
            self.kill_worker(EVALUATOR)

    # Workers

    def start_worker(self, worker: Worker, incarnation: int) -> None:
        threads = self._config.threads()
        match worker.role:
            case Role.TRAINER:
                self._start_trainer(incarnation)
            case Role.ROLLOUT:
                assert worker.instance is not None
                elastic = is_elastic(worker.instance)
                instance = {
                    "instance": worker.instance,
                    "incarnation": incarnation,
                    "elastic": elastic,
                }
                share = self._config.elastic_threads() if elastic else threads.rollout
                setup = self._setup("rollout", share, **instance)
                self._start(worker, setup, f"rollout-{worker.instance}")
            case Role.EVALUATOR:
                instance = {
                    "instance": EVALUATOR_INSTANCE,
                    "incarnation": incarnation,
                    "evaluation": True,
                }
                setup = self._setup("rollout", threads.evaluation, **instance)
                self._start(worker, setup, "evaluator")

    def _start_trainer(self, incarnation: int) -> None:
        """From the last checkpoint on, through the steps that were trained since."""
        checkpoint = self._files.committer.last_checkpoint
        setup = self._setup(
            "trainer",
            self._config.threads().train,
            incarnation=incarnation,
            checkpoint=checkpoint,
        )
        self._start(TRAINER, setup, "trainer")
        self._redo_steps()

    def _setup(self, role: Literal["rollout", "trainer"], threads: int, **more: Any) -> ms.Setup:
        config = self._config.model_dump(mode="json", exclude_none=True)
        return ms.Setup(role=role, config=config, threads=threads, **more)

    def _start(self, worker: Worker, setup: ms.Setup, log: str) -> None:
        if worker in self._processes:
            self.forget_worker(worker)  # it is dead
        process = self._processes[worker] = self._spawn(worker, setup, log)
        self._roles[process] = worker
        self._incarnations[worker] = setup.incarnation
        if worker.role is not Role.ROLLOUT or not process.waiting:
            self.supervisor.started(self.clock.now(), worker, setup.incarnation)

    def kill_worker(self, worker: Worker) -> None:
        self._processes[worker].kill()

    def _worker(self, process: H) -> Worker | None:
        """Which worker it is, unless another process has taken its place."""
        return self._roles.get(process)

    def _take(self, process: H, message: Any) -> None:
        if isinstance(message, ms.Broken):
            if message.user:
                raise UserError(message.reason)
            return  # its death follows, and its log says more
        worker = self._worker(process)
        if isinstance(message, ms.ToldToGo):
            if worker is not None:
                self.told_to_go(worker, "it was sent SIGTERM")
            return
        if isinstance(message, ms.Tried):
            for listener in self.driver.listeners:
                listener.tried(self.clock.now(), message.trials)
            return
        if worker is None:
            return
        self._obey(self.supervisor.heard(self.clock.now(), worker, message))
        match worker.role:
            case Role.TRAINER:
                self._from_trainer(message)
            case Role.ROLLOUT:
                assert worker.instance is not None
                if ms.reports(message, InstanceJoined):
                    message = self._joined(process, message.event)
                self._from_rollout(worker.instance, message)
                if ms.reports(message, InstanceSlept):
                    self._lend_cores()
            case Role.EVALUATOR:
                self._from_rollout(EVALUATOR_INSTANCE, message)

    def _died(self, process: H, death: Death) -> None:
        """The process is gone, and so is all that it had started."""
        worker = self._worker(process)
        assert worker is not None, "who takes its place is started once it is dead"
        if worker == EVALUATOR:
            self.forget_worker(worker)  # the next evaluation starts another
            self._evaluator_must_go = False
        self._obey(self.supervisor.died(self.clock.now(), worker, death, self._facts))

    def _killed_short(self, why: str) -> None:
        """The kernel has killed a worker."""
        self._obey(self.supervisor.killed_out_of_memory(why))

    def _end_processes(self) -> None:
        """Rollout first: the trainer may still be writing."""
        rollouts = [p for w, p in self._processes.items() if w.role is Role.ROLLOUT]
        others = [p for w, p in self._processes.items() if w.role is not Role.ROLLOUT]
        for processes in (rollouts, others):
            self._end(processes)

    # What the driver asks for

    def to_rollout(self, instance: InstanceId, message: ms.ToRollout) -> None:
        process = self._processes.get(rollout(instance))
        if process is not None:  # else of an earlier incarnation of the run, about to be lost
            self._send(process, message)

    def to_every_rollout(self, message: ms.ToRollout) -> None:
        for worker, process in self._processes.items():
            if worker.role is Role.ROLLOUT:
                self._send(process, message)

    def to_evaluator(self, message: ms.ToRollout) -> None:
        if EVALUATOR not in self._processes:
            self.start_worker(EVALUATOR, self._evaluators)
            self._evaluators += 1
        self._send(self._processes[EVALUATOR], message)

    def to_trainer(self, message: ms.ToTrainer) -> None:
        self.supervisor.asked(self.clock.now(), message)
        self._send(self._processes[TRAINER], message)
