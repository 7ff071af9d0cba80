"""Who is told of a run as it happens: the journal, the audit, metrics, the display, the timeline.

Most of them write down or show what they hear. The checkpointer and the evaluator act upon it, by
messages to workers and events to the core.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dora_rl.core.protocol.commands import Command
from dora_rl.core.protocol.events import Event
from dora_rl.core.protocol.types import InstanceId
from dora_rl.core.state.run import State
from dora_rl.machine.fast_paths import Trial
from dora_rl.observe.placements import Placements
from dora_rl.runtime.control import messages as ms
from dora_rl.runtime.control.trajectory_buffer import BufferedTrajectory
from dora_rl.samples import SampleRef

if TYPE_CHECKING:
    from dora_rl.runtime.control.evaluator import EvalRecord
    from dora_rl.runtime.records.step_metrics import StepRecord


class Listener:
    """What the driver tells; a listener overrides what it wants to hear.

    It cannot change what it is told: the core has decided before it hears. An event that it posts
    meanwhile is handled after the commands of the one that it was told of.
    """

    def resumed(
        self, records: Sequence["StepRecord | EvalRecord"], state: State, placements: Placements
    ) -> None:
        """A run is resumed: the records of its steps so far, what the core knows, and what ran.

        What was observed before is not told again. The placements change with what follows.
        """

    def observed(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """The core has handled an event; its commands are not performed yet."""

    def refused(self, now: float, event: Event, reason: str) -> None:
        """The core made no sense of an event, and changed nothing."""

    def trained(self, now: float, report: ms.Trained, samples: Sequence[SampleRef]) -> None:
        """A step was taken on these samples."""

    def rejected(self, now: float, report: ms.Rejected) -> None:
        """A batch was refused by the trainer."""

    def published(self, now: float, report: ms.Published) -> None:
        """A version is complete in the store."""

    def replaced(self, now: float, why: str) -> None:
        """A worker has died or hung, and another takes its place.

        An evaluator's is taken when the next evaluation begins.
        """

    def tried(self, now: float, trials: Mapping[str, Trial]) -> None:
        """A worker has tried fast paths of this machine."""

    def must_end(self, now: float, why: str) -> None:
        """The run must end, though nobody asked for it: the step is finished, all is saved."""

    def kept(self, item: BufferedTrajectory) -> None:
        """A whole trajectory was taken, or has got its reward."""

    def saved(self, prefix: ms.Prefix, whole: ms.Prefix) -> None:
        """A running trajectory has written this since it was last saved, and `whole` in all."""

    def used(self, now: float, instance: InstanceId, used: ms.Used) -> None:
        """An instance reports its counters."""
