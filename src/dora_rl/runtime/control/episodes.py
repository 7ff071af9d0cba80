"""Episodes: a trajectory that takes turns with an environment, in training and in evaluation.

An episode is judged alike by both; they differ in where the trajectory is, and in what a failure
means to them.
"""

from collections.abc import Callable, Sequence

from dora_rl.core.protocol.types import Fence, TrajectoryId
from dora_rl.runtime.control import messages as ms
from dora_rl.runtime.control.services import EnvironmentHost
from dora_rl.tasks.environment_pool import EnvReply
from dora_rl.tasks.prompts import Prompt
from dora_rl.tasks.task import Task


class Episode:
    """One trajectory's environment, its reward so far, and the turn that it is in.

    episode = Episode(task, host, prompt, about, begin=…, answer=…, fail=…)
    begin(tokens)                                   # once: the opening was encoded
    episode.turn_ended(message)                     # the environment takes a step
    answer(reply)                                   # → episode.message(name, fence, reply)
    fail(failure)                                   # once: the environment is lost
    episode.discard()                               # nothing is called any more

    After `fail` or `discard`, turns and replies change nothing.
    """

    def __init__(
        self,
        task: Task,
        environments: EnvironmentHost,
        prompt: Prompt,
        about: str,
        *,
        begin: Callable[[tuple[int, ...]], None],
        answer: Callable[[EnvReply], None],
        fail: Callable[[str], None],
    ) -> None:
        self._task = task
        self._prompt = prompt
        self._begin, self._answer, self._fail = begin, answer, fail
        self._begun = False
        self._over = False
        self._room = 0  # tokens that the trajectory may still have
        self.reward = 0.0
        """Of the turns so far."""
        self.turns = 0
        """That the environment has been told of."""
        self._environment = environments.open(prompt.example, about, self._replied)

    def turn_ended(self, message: ms.TurnEnded) -> None:
        """The policy has ended a turn; a duplicate changes nothing."""
        if self._over or message.turn < self.turns:
            return  # it has no environment any more, or that has taken this step
        self.turns, self._room = message.turn + 1, message.room
        self._environment.step(self._task.encoder.decode(message.tokens))

    def _replied(self, reply: EnvReply) -> None:
        if self._over:
            return
        if reply.failure is not None:
            self._over = True  # the session is gone, whatever becomes of the trajectory
            self._fail(reply.failure)
            return
        self.reward += reply.reward
        if self._begun:
            self._answer(reply)
        else:
            self._begun = True
            self._begin(tuple(self._task.encode_opening(self._prompt, reply.observation)))

    def message(
        self, trajectory: TrajectoryId, fence: Fence, reply: EnvReply
    ) -> ms.Continue | ms.Conclude:
        """Continue after the observation, or conclude.

        An observation must leave room for a token after it. One that does not cuts the episode
        off: neither the policy nor the environment ended it.
        """
        tokens: Sequence[int] = ()
        if not reply.done and self.turns < self._task.settings.max_turns:
            tokens = tuple(self._task.encoder.observation(str(reply.observation or "")))
        if tokens and len(tokens) < self._room:
            return ms.Continue(trajectory, fence, self.turns - 1, tuple(tokens))
        return ms.Conclude(trajectory, fence, truncated=bool(tokens))

    def discard(self) -> None:
        """The environment is not needed any more."""
        self._over = True
        self._environment.discard()
