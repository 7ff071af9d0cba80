"""The workers of a task: rewards and environments, with replies to the asker.

The pools know tickets; here each ticket is used once and belongs to a reply. Replies are called
from `poll_scores` and `poll_environments`, which the loop of a launcher calls.
"""

from collections.abc import Callable
from itertools import count
from typing import Any, NamedTuple

from dora_rl.sandbox.pool import Pool
from dora_rl.tasks.environment_pool import EnvironmentPool, EnvReply
from dora_rl.tasks.scores import Outcome, ScoreJob, ScorePool
from dora_rl.tasks.task import Task


class _Asked(NamedTuple):
    about: str
    reply: Callable[[Any], None]


class TaskWorkers:
    """A `Scorer` and an `EnvironmentHost` over pools of processes.

    Between `start` and `close` the processes run. `log` is told what they print, and about whom.
    """

    def __init__(
        self, task: Task, log: Callable[[str, str], object], *, scores: bool = True
    ) -> None:
        """Without `scores`, the rewards are somebody else's."""
        self._task = task
        self._log = log
        self._tickets = count()
        self._has_scores = scores and bool(task.rewards)
        self._asked: dict[int, _Asked] = {}
        self._scores: ScorePool | None = None
        self._environments: EnvironmentPool | None = None

    def start(self) -> None:
        task = self._task
        self._scores = task.score_pool() if self._has_scores else None
        self._environments = task.environment_pool() if task.has_environment else None
        for pool in self.pools:
            pool.log = self._log_output

    def close(self) -> None:
        """End all processes; what is out has no reply any more."""
        for pool in self.pools:
            pool.close()

    @property
    def pools(self) -> list[Pool[Any]]:
        return [pool for pool in (self._scores, self._environments) if pool is not None]

    def _log_output(self, ticket: int, text: str) -> None:
        self._log(self._asked[ticket].about, text)

    # Rewards

    def score(self, job: ScoreJob, about: str, reply: Callable[[Outcome], None]) -> None:
        assert self._scores is not None, "the task has rewards"
        ticket = next(self._tickets)
        self._asked[ticket] = _Asked(about, reply)
        self._scores.submit(ticket, job)

    def poll_scores(self, timeout_s: float = 0.0) -> int:
        """Hand out what has come, waiting up to the time given for one; how many."""
        outcomes = [] if self._scores is None else self._scores.poll(timeout_s)
        for outcome in outcomes:
            self._asked.pop(outcome.ticket).reply(outcome)
        return len(outcomes)

    # Environments

    def open(
        self, example: dict[str, Any], about: str, reply: Callable[[EnvReply], None]
    ) -> "OpenEnvironment":
        assert self._environments is not None, "the task has an environment"
        ticket = next(self._tickets)
        self._asked[ticket] = _Asked(about, reply)
        self._environments.open(ticket, example)
        return OpenEnvironment(self, ticket)

    def step(self, ticket: int, text: str) -> None:
        assert self._environments is not None
        self._environments.step(ticket, text)

    def discard(self, ticket: int) -> None:
        assert self._environments is not None
        self._environments.discard(ticket)
        self._asked.pop(ticket, None)

    def poll_environments(self, timeout_s: float = 0.0) -> int:
        """Hand out what has come, waiting up to the time given for one; how many."""
        replies = [] if self._environments is None else self._environments.poll(timeout_s)
        for reply in replies:
            asked = self._asked.get(reply.ticket)
            if asked is None:
                continue  # it was discarded with this reply under way
            if reply.failure is not None:
                del self._asked[reply.ticket]
            asked.reply(reply)
        return len(replies)


class OpenEnvironment:
    """The handle of one session."""

    __slots__ = ("_ticket", "_workers")

    def __init__(self, workers: TaskWorkers, ticket: int) -> None:
        self._workers = workers
        self._ticket = ticket

    def step(self, text: str) -> None:
        self._workers.step(self._ticket, text)

    def discard(self) -> None:
        self._workers.discard(self._ticket)
