"""What the core asks the world to do.

Commands to one instance are performed in the order given. Each is safe to repeat: the core
repeats what was not answered in time, and the world answers again without doing it twice.
"""

from typing import TypeAlias

from dora_rl.core.protocol.message import message
from dora_rl.core.protocol.types import (
    BatchGroup,
    Fence,
    GroupId,
    InstanceId,
    MigrationId,
    Move,
    Placement,
    TrajectoryId,
    Version,
)


@message
class FetchPrompts:
    """Read prompts `first` … `first + count - 1`; answer with `PromptsAvailable`."""

    first: GroupId
    count: int


@message
class Start:
    """Generate a trajectory with this version, after its first `prefix_tokens` saved tokens."""

    trajectory: TrajectoryId
    fence: Fence
    instance: InstanceId
    version: Version
    prefix_tokens: int = 0


@message
class Cancel:
    """Forget this placement of a trajectory. No answer."""

    trajectory: TrajectoryId
    fence: Fence
    instance: InstanceId


@message
class Install:
    """Load a version, dropping `evict` first; answer with `VersionInstalled` or `InstallFailed`.

    With `carry`, running trajectories of the evicted version continue under the new one.
    """

    instance: InstanceId
    incarnation: int
    version: Version
    evict: Version | None = None
    carry: bool = False


@message
class Evict:
    """Drop a version that nothing here runs on; answer with `VersionEvicted`."""

    instance: InstanceId
    incarnation: int
    version: Version


@message
class Reserve:
    """Migration, phase one: the target makes room and takes the metadata.

    Answer with `MigrationReserved` or `MigrationFailed`. The source runs on meanwhile.
    """

    migration: MigrationId
    source: InstanceId
    target: InstanceId
    version: Version
    moves: tuple[Move, ...]


@message
class Transfer:
    """Migration, phase two: the KV moves, the target continues with the new fences.

    Answer with `MigrationCompleted` or `MigrationFailed`.
    """

    migration: MigrationId


@message
class Release:
    """The migration is committed: the source frees its copies. No answer."""

    migration: MigrationId


@message
class AbortMigration:
    """Undo: the target forgets the new fences, the source continues with the old. No answer."""

    migration: MigrationId


@message
class Park:
    """Move the KV of these to host memory and stop them; answer with `TrajectoriesParked`."""

    instance: InstanceId
    incarnation: int
    placements: tuple[Placement, ...]


@message
class Unpark:
    """Bring these back from host memory and continue. No answer: they progress, or time out."""

    instance: InstanceId
    incarnation: int
    placements: tuple[Placement, ...]


@message
class Score:
    """Score a whole trajectory; answer with `TrajectoryScored` or `TrajectoryFailed`."""

    trajectory: TrajectoryId
    fence: Fence


@message
class Judge:
    """Decide whether a complete group is worth training on; answer with `GroupJudged`."""

    group: GroupId
    trajectories: tuple[TrajectoryId, ...]


@message
class Fail:
    """The trajectory is terminal, `failed(reason)`: record it, free what is kept. No answer."""

    trajectory: TrajectoryId
    reason: str


@message
class Train:
    """Take optimizer step `step` on these groups.

    Answer with `BatchTrained`, `BatchFailed` or `BatchRejected`.
    """

    step: int
    groups: tuple[BatchGroup, ...]


@message
class Publish:
    """Write the trainer's weights as `version`, all or nothing.

    Answer with `WeightsPublished` or `PublicationFailed`.
    """

    version: Version


@message
class Delete:
    """The last lease of a version is gone: free its storage. No answer."""

    version: Version


@message
class Suspend:
    """Stop generating everywhere (colocated training begins); running work stays. No answer."""


@message
class Resume:
    """Continue generating everywhere. No answer."""


@message
class Sleep:
    """Drop every version and give the devices to training; answer with `InstanceSlept`.

    Nothing runs on the instance. What is parked there stays, in host memory.
    """

    instance: InstanceId
    incarnation: int


@message
class Wake:
    """Take the devices back from training; answer with `InstanceWoke`. No version is there yet."""

    instance: InstanceId
    incarnation: int


@message
class Expel:
    """The core no longer knows this incarnation: kill it; it may join again as a higher one."""

    instance: InstanceId
    incarnation: int
    reason: str


@message
class Dismiss:
    """The instance asked to leave and is empty now: it may go."""

    instance: InstanceId
    incarnation: int


@message
class SetTimer:
    """Fire one `TimerFired` at this time; replaces the time set before."""

    at: float


@message
class Halt:
    """The run is over: done, or beyond what the core can mend. Nothing follows."""

    ok: bool
    reason: str


Command: TypeAlias = (
    FetchPrompts
    | Start
    | Cancel
    | Install
    | Evict
    | Reserve
    | Transfer
    | Release
    | AbortMigration
    | Park
    | Unpark
    | Score
    | Judge
    | Fail
    | Train
    | Publish
    | Delete
    | Suspend
    | Resume
    | Sleep
    | Wake
    | Expel
    | Dismiss
    | SetTimer
    | Halt
)
