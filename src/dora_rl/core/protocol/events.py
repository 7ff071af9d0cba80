"""What the world reports to the core. Facts only: no verdict, no threshold.

An event about a trajectory carries the fence of the placement that it speaks of, one from an
instance the incarnation of that instance, so that whatever was superseded is told apart.
"""

from dataclasses import field
from typing import TypeAlias

from dora_rl.core.protocol.message import message
from dora_rl.core.protocol.types import (
    ADDED,
    Fence,
    GroupId,
    InstanceId,
    Length,
    MigrationId,
    Placement,
    Segment,
    TrajectoryId,
    Version,
)


@message
class PromptsAvailable:
    """Prompts `first` … `first + count - 1` of the stream are here; answers `FetchPrompts`.

    Fewer than asked for is fine; `exhausted` says that none will follow.
    """

    first: GroupId
    count: int
    exhausted: bool = False


@message
class InstanceJoined:
    """An instance is up and empty. Every start of the process is a higher incarnation.

    The devices of an `elastic` one are the trainer's: it joins asleep. The trainer can use those
    of a `lendable` one: they are of the same machine, say.
    """

    instance: InstanceId
    incarnation: int
    slots: int
    kv_capacity_tokens: int
    version_slots: int = 1
    elastic: bool = field(default=False, metadata=ADDED)
    lendable: bool = field(default=True, metadata=ADDED)


@message
class InstanceProgressed:
    """A periodic report: KV in use, and each trajectory that advanced since the last one.

    `saved` lists prefixes that have become durable, and so survive the instance.
    """

    instance: InstanceId
    incarnation: int
    kv_tokens: int
    lengths: tuple[Length, ...] = ()
    saved: tuple[Length, ...] = ()


@message
class InstanceLeaving:
    """An instance asks to leave; the core empties it and answers with `Dismiss`."""

    instance: InstanceId
    incarnation: int


@message
class InstanceFailed:
    """An instance is gone, with all that it held."""

    instance: InstanceId
    incarnation: int
    reason: str


@message
class InstanceStopped:
    """An instance is gone because the run was: nothing that it held is to blame."""

    instance: InstanceId
    incarnation: int


@message
class InstanceSlept:
    """Answers `Sleep`: no version is held any more, and training has the devices."""

    instance: InstanceId
    incarnation: int


@message
class InstanceWoke:
    """Answers `Wake`: rollout has the devices, and a version can be installed."""

    instance: InstanceId
    incarnation: int


@message
class VersionInstalled:
    """Answers `Install`; `digest` is of the weights now in the engine's memory."""

    instance: InstanceId
    incarnation: int
    version: Version
    digest: str


@message
class InstallFailed:
    """Answers `Install`: nothing changed on the instance."""

    instance: InstanceId
    incarnation: int
    version: Version
    reason: str


@message
class VersionEvicted:
    """Answers `Evict`: the instance no longer holds the version."""

    instance: InstanceId
    incarnation: int
    version: Version


@message
class TrajectoryFinished:
    """A trajectory is whole. `segments` say which weights sampled its tokens."""

    trajectory: TrajectoryId
    fence: Fence
    tokens: int
    segments: tuple[Segment, ...]


@message
class TrajectoryPaused:
    """A turn ended: the trajectory waits for its environment, its slot is free, its KV is kept."""

    trajectory: TrajectoryId
    fence: Fence
    turn: int


@message
class TrajectoryResumed:
    """The environment has answered turn `turn`: the trajectory wants a slot again."""

    trajectory: TrajectoryId
    fence: Fence
    turn: int


@message
class TrajectoryFailed:
    """Generation, environment or scoring of one trajectory failed."""

    trajectory: TrajectoryId
    fence: Fence
    reason: str


@message
class TrajectoryRefused:
    """One trajectory cannot be generated, such as for a long prompt: to try again is no use."""

    trajectory: TrajectoryId
    fence: Fence
    reason: str


@message
class TrajectoryScored:
    """Answers `Score`. The reward itself stays outside."""

    trajectory: TrajectoryId
    fence: Fence


@message
class GroupJudged:
    """Answers `Judge`: keep the group, or filter it for a reason."""

    group: GroupId
    filtered: str | None = None


@message
class TrajectoriesParked:
    """Answers `Park`: the KV of these is in host memory now, their slots are free."""

    instance: InstanceId
    incarnation: int
    parked: tuple[Placement, ...]


@message
class MigrationReserved:
    """Phase one is done: the target has room and the metadata."""

    migration: MigrationId


@message
class MigrationCompleted:
    """Phase two is done: the target runs these (old fences); the source still keeps its copy.

    A member that is not listed ended at the source before its KV was cut.
    """

    migration: MigrationId
    moved: tuple[Placement, ...]


@message
class MigrationFailed:
    """Either phase failed: every member continues where it was."""

    migration: MigrationId
    reason: str


@message
class BatchTrained:
    """Answers `Train`: the optimizer step is taken."""

    step: int


@message
class BatchFailed:
    """Answers `Train`: the step was not taken, the weights are as before."""

    step: int
    reason: str


@message
class BatchRejected:
    """Answers `Train`: this very batch cannot be trained on (its loss is no number).

    The weights are as before, and trying again would not help. `groups` name the batch, since
    another one may be asked for under the same step.
    """

    step: int
    groups: tuple[GroupId, ...]
    reason: str


@message
class WeightsPublished:
    """Answers `Publish`: the version is complete in the store. Version 0 opens the run."""

    version: Version
    digest: str


@message
class PublicationFailed:
    """Answers `Publish`: nothing of the version can be seen."""

    version: Version
    reason: str


@message
class VersionPinned:
    """Somebody outside (a checkpoint, an evaluation) needs the version's weights."""

    version: Version
    holder: str


@message
class VersionUnpinned:
    """That need is over."""

    version: Version
    holder: str


@message
class StepLimitRaised:
    """The run is to take so many steps in all, more than before; also after it has taken those."""

    max_steps: int


@message
class TimerFired:
    """The time asked for by the last `SetTimer` has come."""


Event: TypeAlias = (
    PromptsAvailable
    | InstanceJoined
    | InstanceProgressed
    | InstanceLeaving
    | InstanceFailed
    | InstanceStopped
    | InstanceSlept
    | InstanceWoke
    | VersionInstalled
    | InstallFailed
    | VersionEvicted
    | TrajectoryFinished
    | TrajectoryPaused
    | TrajectoryResumed
    | TrajectoryFailed
    | TrajectoryRefused
    | TrajectoryScored
    | GroupJudged
    | TrajectoriesParked
    | MigrationReserved
    | MigrationCompleted
    | MigrationFailed
    | BatchTrained
    | BatchFailed
    | BatchRejected
    | WeightsPublished
    | PublicationFailed
    | VersionPinned
    | VersionUnpinned
    | StepLimitRaised
    | TimerFired
)
