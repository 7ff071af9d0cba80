"""What every runtime has: the driver, who saves, who evaluates, and the workers of the task.

A runtime is the `Outside` of the driver. A subclass brings the clock, the parts of the run, and
the way that a message takes.
"""

from typing import Any

from dora_rl.core.types import InstanceId, Version
from dora_rl.runtime import driver, evaluation
from dora_rl.runtime import messages as ms
from dora_rl.runtime.driver import Driver
from dora_rl.runtime.evaluation import EVALUATOR, FIRST_TICKET, Examiner
from dora_rl.runtime.resuming import go_on, put_back
from dora_rl.runtime.saving import Saver
from dora_rl.runtime.session import Ending, Session
from dora_rl.tasks.workers.pool import Pool
from dora_rl.tasks.workers.scores import ScorePool
from dora_rl.tasks.workers.sessions import EnvironmentPool


class Runtime(driver.Outside, evaluation.Outside):
    """Carries one session's messages."""

    def __init__(self, session: Session, *, anew: bool = False) -> None:
        """With `anew`, the run is done at every checkpoint, to be resumed at once."""
        self._session = session
        self._config = session.config
        self._scores: ScorePool | None = None
        self._episodes: EnvironmentPool | None = None
        self.driver = Driver(
            session.orchestrator,
            session.plan.task,
            session.judge,
            self,
            session.exchange,
            session.listeners,
        )
        self._saver = Saver(self.driver, session, self, anew=anew)
        self.driver.listeners.append(self._saver)
        self._examiner = session.examiner(self, self.driver.post)
        if self._examiner is not None:
            self.driver.listeners.append(self._examiner)

    def run(self) -> Ending:
        """Until the core halts, or the run was asked to stop and has saved."""
        raise NotImplementedError

    def stop(self) -> None:
        """Finish the step that is under way, save, and end."""
        raise NotImplementedError

    @property
    def _done(self) -> bool:
        examining = self._examiner is not None and self._examiner.busy
        return self._saver.done and (self.driver.halted is None or not examining)

    def _begin(self) -> dict[InstanceId, int]:
        """Ask for version 0, or go on with a run; the incarnations that instances start with."""
        session = self._session
        if session.plan.resumed:
            put_back(self.driver, session.ledger)
            session.take_over()
        if session.orchestrator.state.versions.newest < 0:
            self.to_trainer(ms.PublishVersion(0))
        if not session.plan.resumed:
            return {}
        self.driver.halted = session.halted
        if self._examiner is not None:
            self._examiner.take_over(
                session.orchestrator.state.versions,
                session.last_evaluated,
                halted=session.halted is not None,
            )
        return go_on(self.driver, session.orchestrator)

    def delete(self, version: Version) -> None:
        self._session.delete(version)

    # What the parts say

    def _from_rollout(self, instance: InstanceId, message: ms.FromRollout) -> None:
        if instance == EVALUATOR:
            assert self._examiner is not None
            self._examiner.from_evaluator(message)
            return
        self.driver.from_rollout(instance, message)
        self._saver.from_rollout(instance, message)

    def _from_trainer(self, message: ms.FromTrainer) -> None:
        self.driver.from_trainer(message)
        self._saver.from_trainer(message)

    # The workers of the task

    def _open_workers(self) -> None:
        task = self._session.plan.task
        self._scores = task.score_pool() if task.rewards else None
        self._episodes = task.environment_pool() if task.has_environment else None

    def _close_workers(self) -> None:
        for pool in self._pools:
            pool.close()

    @property
    def _pools(self) -> list[Pool]:
        return [pool for pool in (self._scores, self._episodes) if pool is not None]

    def _asker(self, ticket: int) -> Driver | Examiner:
        """Who asked for a reward or an environment's answer."""
        if ticket < FIRST_TICKET:
            return self.driver
        assert self._examiner is not None
        return self._examiner

    def open_episode(self, ticket: int, example: dict[str, Any]) -> None:
        assert self._episodes is not None
        self._episodes.open(ticket, example)

    def step_episode(self, ticket: int, text: str) -> None:
        assert self._episodes is not None
        self._episodes.step(ticket, text)

    def discard_episode(self, ticket: int) -> None:
        assert self._episodes is not None
        self._episodes.discard(ticket)
