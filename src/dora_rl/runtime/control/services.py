"""What the driver and the evaluator need from outside, each as narrow as its use.

A launcher is the `WorkerLink`, and brings a clock and a timer; rewards and environments come from
`task_workers`, storage from the run's files. Nothing here waits for an answer. Whoever asks for a
reward or an environment's turn says where the reply goes: no name is shared between askers.
"""

from collections.abc import Callable
from typing import Any, Protocol

from dora_rl.core.protocol.types import InstanceId, Version
from dora_rl.runtime.control import messages as ms
from dora_rl.tasks.environment_pool import EnvReply
from dora_rl.tasks.scores import Outcome, ScoreJob


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since the run began, over all of its incarnations."""


class Timer(Protocol):
    def set(self, at: float) -> None:
        """Call `Driver.ring` at this time; replaces the time set before."""


class WorkerLink(Protocol):
    """Reaches workers. What is sent to one arrives in order, or not at all if it is gone."""

    def to_rollout(self, instance: InstanceId, message: ms.ToRollout) -> None: ...

    def to_every_rollout(self, message: ms.ToRollout) -> None:
        """To all instances but the evaluator's."""

    def to_evaluator(self, message: ms.ToRollout) -> None:
        """Starts the evaluator if it does not run."""

    def to_trainer(self, message: ms.ToTrainer) -> None: ...

    def expel(self, instance: InstanceId, incarnation: int, reason: str) -> None:
        """Kill this incarnation, and start a higher one."""


class Scorer(Protocol):
    def score(self, job: ScoreJob, about: str, reply: Callable[[Outcome], None]) -> None:
        """Compute the rewards of a response; `reply` is called once, later.

        `about` names the response in the log of what the rewards print.
        """


class Environment(Protocol):
    """One session of an environment."""

    def step(self, text: str) -> None:
        """Give it what the policy wrote. Its answer is awaited before the next."""

    def discard(self) -> None:
        """End it; a reply that is under way may still come. One that has ended stays so."""


class EnvironmentHost(Protocol):
    def open(
        self, example: dict[str, Any], about: str, reply: Callable[[EnvReply], None]
    ) -> Environment:
        """Start a session. `reply` is called, later, for the opening and for every step."""


class WeightStorage(Protocol):
    def delete(self, version: Version) -> None:
        """Nobody needs these weights any more."""
