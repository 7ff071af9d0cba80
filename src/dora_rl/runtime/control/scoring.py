"""Scores: whole trajectories get their rewards, and groups their verdict."""

import logging
from collections.abc import Callable, Sequence
from functools import partial

from dora_rl.core.protocol import commands as cm
from dora_rl.core.protocol import events as ev
from dora_rl.core.protocol.events import Event
from dora_rl.core.protocol.types import Fence, TrajectoryId
from dora_rl.runtime.control.listeners import Listener
from dora_rl.runtime.control.prompts import PromptCache
from dora_rl.runtime.control.services import Scorer
from dora_rl.runtime.control.trajectory_buffer import TrajectoryBuffer
from dora_rl.samples import unpack
from dora_rl.tasks.scores import Outcome
from dora_rl.tasks.task import Task
from dora_rl.transports.errors import RecordLost
from dora_rl.transports.samples import SampleSource

LOST = "its tokens are lost"
_log = logging.getLogger(__name__)


class Scoring:
    """Asks for the rewards of what the core has accepted, and keeps them in the buffer."""

    def __init__(
        self,
        task: Task,
        prompts: PromptCache,
        buffer: TrajectoryBuffer,
        samples: SampleSource,
        scorer: Scorer,
        judge: Callable[[Sequence[float]], str | None],
        post: Callable[[Event], None],
        listeners: Sequence[Listener],
    ) -> None:
        self._task = task
        self._prompts = prompts
        self._buffer = buffer
        self._samples = samples
        self._scorer = scorer
        self._judge = judge
        self._post = post
        self._listeners = listeners
        self._asked: dict[TrajectoryId, Fence] = {}  # whose reward is awaited

    def score(self, command: cm.Score) -> None:
        trajectory_id, fence = command.trajectory, command.fence
        self._buffer.accept(trajectory_id, fence)
        self._keep(trajectory_id)
        if not self._task.rewards:  # its environment has given all of it
            self._give_reward(trajectory_id, 0.0, {})
            self._post(ev.TrajectoryScored(trajectory_id, fence))
            return
        try:
            trajectory = unpack(self._samples.get(self._buffer.trajectory(trajectory_id).content))
        except RecordLost as error:
            _log.warning("trajectory %d is lost: %s", trajectory_id, error)
            self._post(ev.TrajectoryFailed(trajectory_id, fence, LOST))
            return
        self._asked[trajectory_id] = fence
        response = self._task.encoder.decode(trajectory.tokens)
        job = self._task.job(self._prompts.of(trajectory.group), response, trajectory)
        self._scorer.score(
            job, f"trajectory {trajectory_id}", partial(self._scored, trajectory_id, fence)
        )

    def _scored(self, trajectory_id: TrajectoryId, fence: Fence, outcome: Outcome) -> None:
        if self._asked.get(trajectory_id) != fence:
            return  # of a superseded placement, whose response the buffer has no more
        del self._asked[trajectory_id]
        if trajectory_id not in self._buffer:
            return
        if outcome.failure is not None:
            self._post(ev.TrajectoryFailed(trajectory_id, fence, f"reward: {outcome.failure}"))
        else:
            self._give_reward(trajectory_id, outcome.reward, outcome.parts)
            self._post(ev.TrajectoryScored(trajectory_id, fence))

    def _give_reward(
        self, trajectory_id: TrajectoryId, reward: float, parts: dict[str, float]
    ) -> None:
        episode = self._buffer.episode_reward(trajectory_id)
        if episode is not None:
            reward, parts = reward + episode, {**parts, "environment": episode}
        self._buffer.reward(trajectory_id, reward, parts)
        self._keep(trajectory_id)

    def _keep(self, trajectory_id: TrajectoryId) -> None:
        for listener in self._listeners:
            listener.kept(self._buffer.item(trajectory_id))

    def verdict(self, trajectories: Sequence[TrajectoryId]) -> str | None:
        """Why a group is filtered, from its rewards, or None."""
        return self._judge(
            [self._buffer.sample(trajectory_id).reward for trajectory_id in trajectories]
        )
