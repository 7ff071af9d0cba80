"""What every pool of workers offers to whoever runs a loop: when to look, and how it ends."""

from typing import Self

from dora_rl.tasks.workers.crew import Crew
from dora_rl.tasks.workers.wire import Isolation


class Pool:
    """A crew with a door: its subclasses say what the workers are asked."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew

    @property
    def isolation(self) -> Isolation:
        """What is kept from the workers on this machine."""
        return self._crew.isolation

    def filenos(self) -> list[int]:
        """What to wait on until `poll` has something to do; it stays the same."""
        return [self._crew.fileno()]

    def due_in_s(self) -> float | None:
        """When `poll` must be called at the latest, since a time limit ends."""
        return self._crew.due_in_s()

    def close(self) -> None:
        """End all workers; what is out has no answer any more."""
        self._crew.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
