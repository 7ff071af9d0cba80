"""Where each running trajectory is, as the core wants it, and what it has written so far.

Messages of a placement that was superseded, and duplicates, are told by fences and turns and have
no effect here; whether a placement is superseded is the core's decision.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from dora_rl.core.protocol import commands as cm
from dora_rl.core.protocol import events as ev
from dora_rl.core.protocol.events import Event
from dora_rl.core.protocol.types import Fence, InstanceId, TrajectoryId, Version
from dora_rl.runtime.control import messages as ms
from dora_rl.runtime.control.episodes import Episode
from dora_rl.runtime.control.listeners import Listener
from dora_rl.runtime.control.prompts import PromptCache
from dora_rl.runtime.control.services import EnvironmentHost, WorkerLink
from dora_rl.tasks.environment_pool import EnvReply
from dora_rl.tasks.task import Task


@dataclass(slots=True)
class _Placed:
    instance: InstanceId
    fence: Fence
    version: Version
    episode: Episode | None = None
    answer: ms.Continue | ms.Conclude | None = None  # not taken in yet


class Placements:
    """Starts, reaches and ends trajectories on their instances."""

    def __init__(
        self,
        task: Task,
        prompts: PromptCache,
        workers: WorkerLink,
        environments: EnvironmentHost,
        post: Callable[[Event], None],
        listeners: Sequence[Listener],
    ) -> None:
        self._task = task
        self._prompts = prompts
        self._workers = workers
        self._environments = environments
        self._post = post
        self._listeners = listeners
        self._placed: dict[TrajectoryId, _Placed] = {}
        self._prefixes: dict[TrajectoryId, ms.Prefix] = {}

    # What the core asks for

    def start(self, command: cm.Start) -> None:
        trajectory_id = command.trajectory
        self.leave(trajectory_id)
        placed = _Placed(command.instance, command.fence, command.version)
        self._placed[trajectory_id] = placed
        group = self._prompts.group(trajectory_id)
        if self._task.has_environment:
            placed.episode = Episode(
                self._task,
                self._environments,
                self._prompts.of(group),
                f"trajectory {trajectory_id}",
                begin=partial(self._begin, trajectory_id, placed, None),
                answer=partial(self._answered, trajectory_id, placed),
                fail=partial(self._environment_failed, trajectory_id, placed),
            )
        else:
            prefix = self._prefix(command)
            self._begin(trajectory_id, placed, prefix, self._prompts.tokens(group))

    def _prefix(self, command: cm.Start) -> ms.Prefix | None:
        if not command.prefix_tokens:
            return None
        return self._prefixes[command.trajectory].cut(command.prefix_tokens)

    def _begin(
        self,
        trajectory_id: TrajectoryId,
        placed: _Placed,
        prefix: ms.Prefix | None,
        prompt: tuple[int, ...],
    ) -> None:
        self._workers.to_rollout(
            placed.instance,
            ms.Begin(
                trajectory_id,
                placed.fence,
                self._prompts.group(trajectory_id),
                placed.version,
                prompt,
                episode=placed.episode is not None,
                prefix=prefix,
            ),
        )

    def cancel(self, command: cm.Cancel) -> None:
        placed = self._placed.get(command.trajectory)
        if placed is not None and placed.fence == command.fence:
            self.leave(command.trajectory)
        self._workers.to_rollout(command.instance, ms.Perform.of(command))

    def unpark(self, command: cm.Unpark) -> None:
        self._workers.to_rollout(command.instance, ms.Perform.of(command))
        for trajectory_id, _ in command.placements:
            self.answer_again(trajectory_id)

    def leave(self, trajectory_id: TrajectoryId) -> None:
        """The trajectory is nowhere any more, and its environment is not needed."""
        placed = self._placed.pop(trajectory_id, None)
        if placed is not None and placed.episode is not None:
            placed.episode.discard()

    def move(
        self, trajectory_id: TrajectoryId, fence: Fence, target: InstanceId, new_fence: Fence
    ) -> None:
        """The core has taken a migration: the trajectory is on another instance."""
        placed = self._placed.get(trajectory_id)
        if placed is not None and placed.fence == fence:
            placed.instance, placed.fence = target, new_fence
            self.answer_again(trajectory_id)

    # Episodes

    def episode_reward(self, trajectory_id: TrajectoryId) -> float | None:
        """What its environment has given a trajectory so far, if it has one."""
        placed = self._placed.get(trajectory_id)
        if placed is None or placed.episode is None:
            return None
        return placed.episode.reward

    def turn_ended(self, message: ms.TurnEnded) -> None:
        placed = self._placed.get(message.trajectory)
        if placed is not None and placed.fence == message.fence and placed.episode is not None:
            placed.episode.turn_ended(message)

    def resumed(self, event: ev.TrajectoryResumed) -> None:
        """The trajectory has taken its environment's answer in."""
        placed = self._placed.get(event.trajectory)
        if placed is None or placed.episode is None:
            return
        # A duplicate speaks of an earlier answer.
        if (placed.fence, placed.episode.turns) == (event.fence, event.turn):
            placed.answer = None

    def _environment_failed(
        self, trajectory_id: TrajectoryId, placed: _Placed, failure: str
    ) -> None:
        self._post(ev.TrajectoryFailed(trajectory_id, placed.fence, f"environment: {failure}"))

    def _answered(self, trajectory_id: TrajectoryId, placed: _Placed, reply: EnvReply) -> None:
        assert placed.episode is not None
        placed.answer = placed.episode.message(trajectory_id, placed.fence, reply)
        self._workers.to_rollout(placed.instance, placed.answer)

    def answer_again(self, trajectory_id: TrajectoryId) -> None:
        """The trajectory may have been out of reach when its answer came."""
        placed = self._placed.get(trajectory_id)
        if placed is not None and placed.answer is not None:
            placed.answer = msgspec.structs.replace(placed.answer, fence=placed.fence)
            self._workers.to_rollout(placed.instance, placed.answer)

    # Prefixes

    def save(self, prefix: ms.Prefix) -> None:
        """Keep what a trajectory has written, if it is the placement that counts."""
        placed = self._placed.get(prefix.trajectory)
        if placed is None or placed.fence != prefix.fence:
            return
        before = self._prefixes.get(prefix.trajectory)
        known = 0 if before is None or before.fence != prefix.fence else before.num_tokens
        if prefix.num_tokens <= known:
            return  # a duplicate: the core counts on what came since
        whole = self.keep_prefix(prefix)
        for listener in self._listeners:
            listener.saved(prefix, whole)

    def keep_prefix(self, prefix: ms.Prefix) -> ms.Prefix:
        """What the trajectory had written, with what it has written since."""
        before = self._prefixes.get(prefix.trajectory)
        whole = prefix if before is None else prefix.after(before)
        self._prefixes[prefix.trajectory] = whole
        return whole

    def forget_prefix(self, trajectory_id: TrajectoryId) -> None:
        """The trajectory is terminal."""
        self._prefixes.pop(trajectory_id, None)
