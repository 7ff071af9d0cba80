"""Prompts by their group, read from the task's stream; siblings ask one after the other."""

from dora_rl.core.protocol.types import GroupId, TrajectoryId
from dora_rl.tasks.prompts import Prompt
from dora_rl.tasks.task import Task

_KEPT = 1024  # for siblings and scores; others are read again


class PromptCache:
    """The prompt of each trajectory that runs or is scored."""

    def __init__(self, task: Task, group_size: int) -> None:
        self._task = task
        self._group_size = group_size
        self._prompts: dict[GroupId, Prompt] = {}
        self._encoded: tuple[GroupId, tuple[int, ...]] | None = None  # of the last one asked for

    def group(self, trajectory: TrajectoryId) -> GroupId:
        return trajectory // self._group_size

    def tokens(self, group: GroupId) -> tuple[int, ...]:
        """The prompt as the policy reads it."""
        if self._encoded is None or self._encoded[0] != group:
            self._encoded = group, tuple(self._task.encoder.encode(self.of(group)))
        return self._encoded[1]

    def of(self, group: GroupId) -> Prompt:
        prompt = self._prompts.get(group)
        if prompt is None:
            prompt = self._prompts[group] = self._task.stream.read(group, 1)[0]
            if len(self._prompts) > _KEPT:
                del self._prompts[next(iter(self._prompts))]
        return prompt
