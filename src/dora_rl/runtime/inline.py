"""A whole asynchronous run in one process, on a logical clock: a function of its seed.

Engines step, rewards are computed and batches are trained for real; only time is not. Everything
that takes time ends at an instant that follows from the configuration, so two runs of the same
seed write the same journal and end with the same weights. For tests, debugging and notebooks.
"""

from typing import Any

import msgspec
import torch

from dora_rl.core.types import InstanceId
from dora_rl.engines.base import Engine
from dora_rl.runtime import messages as ms
from dora_rl.runtime.base import Runtime
from dora_rl.runtime.engines import make_engine, sampling_of
from dora_rl.runtime.errors import RunFailed
from dora_rl.runtime.evaluation import EVALUATOR
from dora_rl.runtime.rollout import RolloutInstance
from dora_rl.runtime.session import Ending, Session
from dora_rl.runtime.training import TrainerPart
from dora_rl.simulator.clock import Clock
from dora_rl.tasks.workers.scores import ScoreJob
from dora_rl.weights.store import WeightStore


class InlineRuntime(Runtime):
    """Carries a session's messages in its own process."""

    def __init__(self, session: Session) -> None:
        super().__init__(session, anew=True)
        self._time = session.config.runtime.inline
        self._clock = Clock()
        self._store = WeightStore(session.weights)
        self._trainer: TrainerPart | None = None
        self._instances: dict[InstanceId, RolloutInstance] = {}
        self._stepping: set[InstanceId] = set()
        self._timer = 0

    def run(self) -> Ending:
        threads = torch.get_num_threads()
        torch.set_num_threads(self._config.threads().train)
        try:
            self._start()
            while not self._done:
                if self.driver.halted is not None:
                    self._saver.halted()
                if self._clock.next_time() is None:
                    raise RunFailed("nothing is left to happen, and the core has not halted")
                self._clock.step()
            return self._saver.ending()
        finally:
            if self._trainer is not None:
                list(self._trainer.handle(ms.Shutdown()))
            for instance in self._instances.values():
                instance.handle(ms.Shutdown())
            self._close_workers()
            torch.set_num_threads(threads)

    def _start(self) -> None:
        config, plan = self._config, self._session.plan
        self._trainer = TrainerPart.open(
            config, plan.model, self._store, self._session.last_checkpoint
        )
        self._open_workers()
        self._clock.now = self._session.orchestrator.state.now
        incarnations = self._begin()
        for name in range(config.runtime.instances):
            self._join(name, incarnations.get(name, 0), make_engine(config, plan.model))

    def stop(self) -> None:
        self._saver.stop()

    def _join(self, name: InstanceId, incarnation: int, engine: Engine) -> None:
        instance = self._instances[name] = self._instance(name, incarnation, engine)
        instance.join()
        self._collect(instance)
        self._clock.after(self._config.runtime.report_period_s, self._heartbeat, instance)

    def _instance(self, name: InstanceId, incarnation: int, engine: Engine) -> RolloutInstance:
        sampling = sampling_of(self._config, evaluation=name == EVALUATOR)
        seed = self._config.run.seed
        return RolloutInstance(
            name, incarnation, engine, self._store.path, sampling, seed, clock=self.now
        )

    def _heartbeat(self, instance: RolloutInstance) -> None:
        instance.report()
        self._collect(instance)
        self._clock.after(self._config.runtime.report_period_s, self._heartbeat, instance)

    def _collect(self, instance: RolloutInstance) -> None:
        """Deliver what an instance has to say, and let it go on."""
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

    def now(self) -> float:
        return self._clock.now

    def set_timer(self, at: float) -> None:
        self._timer += 1
        self._clock.at(at, self._ring, self._timer)

    def _ring(self, timer: int) -> None:
        if timer == self._timer:
            self.driver.ring()

    def to_rollout(self, instance: InstanceId, message: ms.ToRollout) -> None:
        self._clock.after(0.0, self._deliver, (instance, _carried(message)))

    def _deliver(self, argument: tuple[InstanceId, ms.ToRollout]) -> None:
        name, message = argument
        instance = self._instances.get(name)
        if instance is not None:  # else the last life had more of them
            instance.handle(message)
            self._collect(instance)

    def to_every_rollout(self, message: ms.ToRollout) -> None:
        for name in self._instances:
            if name != EVALUATOR:
                self.to_rollout(name, message)

    def to_evaluator(self, message: ms.ToRollout) -> None:
        if EVALUATOR not in self._instances:
            engine = make_engine(self._config, self._session.plan.model)
            self._instances[EVALUATOR] = self._instance(EVALUATOR, 0, engine)
        self.to_rollout(EVALUATOR, message)

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
                    len(sample.trajectory.prompt) + len(sample.trajectory.tokens)
                    for sample in message.samples
                )
                return tokens * self._time.train_token_s
            case ms.PublishVersion():
                return self._time.publish_s
        return 0.0

    def expel(self, instance: InstanceId, incarnation: int, reason: str) -> None:
        raise RunFailed(f"instance {instance} had to be given up: {reason}")

    def score(self, ticket: int, job: ScoreJob) -> None:
        assert self._scores is not None
        outcome = msgspec.structs.replace(self._scores.run(job), ticket=ticket)
        self._clock.after(self._time.score_s, self._asker(ticket).scored, outcome)

    def open_episode(self, ticket: int, example: dict[str, Any]) -> None:
        super().open_episode(ticket, example)
        self._await_episode()

    def step_episode(self, ticket: int, text: str) -> None:
        super().step_episode(ticket, text)
        self._await_episode()

    def _await_episode(self) -> None:
        """The environment's real time is not the run's."""
        assert self._episodes is not None
        while not (replies := self._episodes.poll(1.0)):
            pass
        for reply in replies:
            asker = self._asker(reply.ticket)
            self._clock.after(self._time.score_s, asker.answered, reply)


def _carried(message: Any) -> Any:
    """As it would arrive in another process."""
    return ms.decode(ms.encode(message))
