"""Who watches a run: the journal, the audit, metrics, the display, the timeline."""

from collections.abc import Mapping, Sequence

from dora_rl.core.commands import Command
from dora_rl.core.events import Event
from dora_rl.core.types import InstanceId
from dora_rl.machine.fast_paths import Trial
from dora_rl.runtime import messages as ms
from dora_rl.runtime.shelf import Item
from dora_rl.samples import Sample


class Listener:
    """What the driver tells; a listener overrides what it wants to hear. It changes nothing."""

    def observed(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """The core has handled an event; its commands are not performed yet."""

    def refused(self, now: float, event: Event, reason: str) -> None:
        """The core made no sense of an event, and changed nothing."""

    def trained(self, now: float, report: ms.Trained, samples: Sequence[Sample]) -> None:
        """A step was taken on these samples."""

    def rejected(self, now: float, report: ms.Rejected) -> None:
        """A batch was refused by the trainer."""

    def published(self, now: float, report: ms.Published) -> None:
        """A version is complete in the store."""

    def replaced(self, now: float, why: str) -> None:
        """A part has died or hung, and another takes its place."""

    def tried(self, now: float, trials: Mapping[str, Trial]) -> None:
        """A worker has tried fast paths of this machine."""

    def must_end(self, now: float, why: str) -> None:
        """The run must end, though nobody asked for it: the step is finished, all is saved."""

    def kept(self, item: Item) -> None:
        """A whole trajectory was taken, or has got its reward."""

    def saved(self, prefix: ms.Prefix, whole: ms.Prefix) -> None:
        """A running trajectory has written this since it was last saved, and `whole` in all."""

    def used(self, now: float, instance: InstanceId, used: ms.Used) -> None:
        """An instance reports its counters."""
