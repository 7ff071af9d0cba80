"""A whole asynchronous run in one process, on a logical clock: a function of its seed.

Engines step, rewards are computed and batches are trained for real; only time is not. Everything
that takes time ends at an instant that follows from the configuration, so two runs of the same
seed write the same journal and end with the same weights. For tests, debugging and notebooks.
"""

from collections.abc import Callable
from typing import Any

import torch

from dora_rl.core.protocol.types import InstanceId
from dora_rl.engines.base import Engine
from dora_rl.runtime.control import messages as ms
from dora_rl.runtime.control.decisions import (
    ELASTIC_INSTANCES,
    EVALUATOR,
    EVALUATOR_INSTANCE,
    TRAINER,
    Role,
    Worker,
    is_elastic,
    rollout,
)
from dora_rl.runtime.control.services import Environment
from dora_rl.runtime.control.task_workers import TaskWorkers
from dora_rl.runtime.launchers.base import Runtime
from dora_rl.runtime.records.run_files import Ending, RunFiles
from dora_rl.runtime.workers.engines import make_engine, sampling_of
from dora_rl.runtime.workers.rollout import RolloutInstance
from dora_rl.runtime.workers.trainer import TrainerWorker
from dora_rl.simulator.clock import Clock
from dora_rl.store.rundir import TRAJECTORIES, copies_of
from dora_rl.tasks.environment_pool import EnvReply
from dora_rl.tasks.scores import Outcome, ScoreJob
from dora_rl.transports.samples.shared_directory import SampleWriter
from dora_rl.transports.weights.registry import make_publisher, make_receiver


class LogicalTime:
    """The run's clock and timer: now is when the action that runs was due."""

    def __init__(self, clock: Clock, ring: Callable[[], None]) -> None:
        self._clock = clock
        self._ring = ring
        self._set = 0

    def now(self) -> float:
        return self._clock.now

    def set(self, at: float) -> None:
        self._set += 1
        self._clock.at(at, self._due, self._set)

    def _due(self, number: int) -> None:
        if number == self._set:  # else another time was set since
            self._ring()


class LogicalTaskWorkers:
    """Rewards and environments whose real time is not the run's: each call takes `seconds`."""

    def __init__(self, workers: TaskWorkers, clock: Clock, seconds: float) -> None:
        self._workers = workers
        self._clock = clock
        self._seconds = seconds

    def score(self, job: ScoreJob, about: str, reply: Callable[[Outcome], None]) -> None:
        self._workers.score(job, about, self._later(reply))
        while not self._workers.poll_scores(1.0):
            pass

    def open(
        self, example: dict[str, Any], about: str, reply: Callable[[EnvReply], None]
    ) -> "LogicalEnvironment":
        environment = self._workers.open(example, about, self._later(reply))
        self._await_reply()
        return LogicalEnvironment(environment, self._await_reply)

    def _await_reply(self) -> None:
        while not self._workers.poll_environments(1.0):
            pass

    def _later(self, reply: Callable[[Any], None]) -> Callable[[Any], None]:
        return lambda said: self._clock.after(self._seconds, reply, said)


class LogicalEnvironment:
    """An environment whose reply to a step is there before the step returns, and is told later."""

    def __init__(self, environment: Environment, await_reply: Callable[[], None]) -> None:
        self._environment = environment
        self._await_reply = await_reply

    def step(self, text: str) -> None:
        self._environment.step(text)
        self._await_reply()

    def discard(self) -> None:
        self._environment.discard()


class InlineRuntime(Runtime):
    """Carries a run's messages in its own process."""

    def __init__(self, files: RunFiles) -> None:
        self._time = files.config.runtime.inline
        self._clock = Clock()
        self._task_workers = TaskWorkers(files.plan.task, files.reward_log.entry)
        time = LogicalTime(self._clock, lambda: self.driver.ring())
        tasks = LogicalTaskWorkers(self._task_workers, self._clock, self._time.score_s)
        super().__init__(
            files,
            clock=time,
            timer=time,
            scorer=tasks,
            environments=tasks,
            anew=True,
            replaces_workers=False,
        )
        self._publisher = make_publisher(files.config.runtime.weights, files.weights)
        self._trainer: TrainerWorker | None = None
        self._instances: dict[InstanceId, RolloutInstance] = {}
        self._stepping: set[InstanceId] = set()

    def run(self) -> Ending:
        threads = torch.get_num_threads()
        torch.set_num_threads(self._config.threads().train)
        try:
            self._start()
            while not self._done:
                if self.driver.halted is not None:
                    self._checkpointer.halted()
                if self._clock.next_time() is None:
                    self._obey(self.supervisor.nothing_left())
                self._clock.step()
            return self._checkpointer.ending()
        finally:
            if self._trainer is not None:
                list(self._trainer.handle(ms.Shutdown()))
            for instance in self._instances.values():
                instance.handle(ms.Shutdown())
            self._task_workers.close()
            torch.set_num_threads(threads)

    def _start(self) -> None:
        self.start_worker(TRAINER, 0)
        self._task_workers.start()
        self._clock.now = self._files.orchestrator.state.now
        incarnations = self._begin()
        elastic = range(ELASTIC_INSTANCES, ELASTIC_INSTANCES + self._config.elastic_instances)
        for name in (*range(self._config.runtime.instances), *elastic):
            self.start_worker(rollout(name), incarnations.get(name, 0))

    def start_worker(self, worker: Worker, incarnation: int) -> None:
        config, model = self._config, self._files.plan.model
        self.supervisor.started(self.clock.now(), worker, incarnation)
        match worker.role:
            case Role.TRAINER:
                checkpoint = self._files.committer.last_checkpoint
                self._trainer = TrainerWorker.open(
                    *(config, model, self._publisher),
                    *(self._files.samples, self._files.checkpoints, checkpoint),
                )
            case Role.ROLLOUT:
                assert worker.instance is not None
                self._join(worker.instance, incarnation, make_engine(config, model))
            case Role.EVALUATOR:
                engine = make_engine(config, model)
                self._instances[EVALUATOR_INSTANCE] = self._instance(EVALUATOR_INSTANCE, 0, engine)

    def kill_worker(self, worker: Worker) -> None:
        raise AssertionError(f"{worker} is no process: the supervisor is told not to replace it")

    def stop(self) -> None:
        self._checkpointer.stop()

    def _join(self, name: InstanceId, incarnation: int, engine: Engine) -> None:
        instance = self._instances[name] = self._instance(name, incarnation, engine)
        instance.join()
        self._collect(instance)
        self._clock.after(self._config.runtime.report_period_s, self._heartbeat, instance)

    def _instance(self, name: InstanceId, incarnation: int, engine: Engine) -> RolloutInstance:
        sampling = sampling_of(self._config, evaluation=name == EVALUATOR_INSTANCE)
        seed = self._config.run.seed
        copies = copies_of(self._files.exchange, name)
        return RolloutInstance(
            name,
            incarnation,
            engine,
            make_receiver(self._config.runtime.weights, self._files.weights, copies),
            SampleWriter(self._files.plan.out / TRAJECTORIES, name, incarnation),
            self._files.samples,
            self._files.kv,
            sampling,
            seed,
            clock=self.clock.now,
            elastic=is_elastic(name),
        )

    def _heartbeat(self, instance: RolloutInstance) -> None:
        instance.report()
        self._collect(instance)
        self._clock.after(self._config.runtime.report_period_s, self._heartbeat, instance)

    def _collect(self, instance: RolloutInstance) -> None:
        """Deliver what an instance has to say, and let it continue."""
        for message in instance.outbox:
            self._clock.after(0.0, self._arrive, (instance.instance, _carried(message)))
        instance.outbox.clear()
        if instance.busy and instance.instance not in self._stepping:
            self._stepping.add(instance.instance)
            self._clock.after(self._time.step_s, self._step, instance)

    def _step(self, instance: RolloutInstance) -> None:
        self._stepping.discard(instance.instance)
        if instance.busy:
            instance.step()
        self._collect(instance)

    def _arrive(self, argument: tuple[InstanceId, ms.FromRollout]) -> None:
        self._from_rollout(*argument)

    # What the driver asks for

    def to_rollout(self, instance: InstanceId, message: ms.ToRollout) -> None:
        self._clock.after(0.0, self._deliver, (instance, _carried(message)))

    def _deliver(self, argument: tuple[InstanceId, ms.ToRollout]) -> None:
        name, message = argument
        instance = self._instances.get(name)
        if instance is not None:  # else the last incarnation of the run had more of them
            instance.handle(message)
            self._collect(instance)

    def to_every_rollout(self, message: ms.ToRollout) -> None:
        for name in self._instances:
            if name != EVALUATOR_INSTANCE:
                self.to_rollout(name, message)

    def to_evaluator(self, message: ms.ToRollout) -> None:
        if EVALUATOR_INSTANCE not in self._instances:
            self.start_worker(EVALUATOR, 0)
        self.to_rollout(EVALUATOR_INSTANCE, message)

    def to_trainer(self, message: ms.ToTrainer) -> None:
        self._clock.after(0.0, self._train, message)

    def _train(self, message: ms.ToTrainer) -> None:
        assert self._trainer is not None
        answers = [*self._trainer.handle(message), *self._trainer.finish_saves()]
        for answer in answers:
            self._clock.after(self._duration(message), self._from_trainer, answer)

    def _duration(self, message: ms.ToTrainer) -> float:
        match message:
            case ms.TrainOn():
                tokens = sum(
                    sample.trajectory.num_prompt + sample.trajectory.num_tokens
                    for sample in message.samples
                )
                return tokens * self._time.train_token_s
            case ms.PublishVersion():
                return self._time.publish_s
        return 0.0


def _carried(message: Any) -> Any:
    """As it would arrive in another process."""
    return ms.decode(ms.encode(message))
