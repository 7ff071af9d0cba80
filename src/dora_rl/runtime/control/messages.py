"""What the driver and the workers of a run say to each other.

The same objects in one process and, through `encode` and `decode`, between several. Commands and
events of the core travel as the journal writes them. Whole trajectories, prefixes, KV and weights
go by `transports`, and are named here by reference. But for the user's own configuration, no
message holds a path, and none a process id. Nothing here is ever unpickled.
"""

from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from dora_rl.core.history.codec import decode_command, decode_event, encode_command, encode_event
from dora_rl.core.protocol.commands import Command
from dora_rl.core.protocol.events import Event
from dora_rl.core.protocol.types import (
    Fence,
    GroupId,
    MigrationId,
    Move,
    Placement,
    Segment,
    TrajectoryId,
    Version,
)
from dora_rl.machine.fast_paths import Trial
from dora_rl.samples import RecordRef, SampleRef, TrajectoryRef


class _Message(msgspec.Struct, frozen=True, tag=True):
    pass


# To any worker


class Setup(_Message, frozen=True, tag=True, kw_only=True):
    """The first message to a process: what it is to be."""

    role: Literal["rollout", "trainer"]
    config: dict[str, Any]
    threads: int
    instance: int = 0
    incarnation: int = 0
    checkpoint: int | None = None
    """The step whose checkpoint a trainer begins with."""
    evaluation: bool = False
    elastic: bool = False
    """Whether a rollout instance is on the trainer's devices, and joins asleep."""


class Shutdown(_Message, frozen=True, tag=True):
    """End the process."""


# To a rollout instance


class Perform(_Message, frozen=True, tag=True):
    """A command of the core that needs nothing else."""

    encoded: list[Any]

    @classmethod
    def of(cls, command: Command) -> "Perform":
        return cls(encode_command(command))

    def is_a(self, kind: type[Command]) -> bool:
        """Whether its command is of this kind; known before it was on the wire, too."""
        return bool(self.encoded[0] == kind.__name__)

    @property
    def command(self) -> Command:
        """For whoever receives it: only then do its fields have the types of the wire."""
        return decode_command(self.encoded)


class Piece(NamedTuple):
    """Tokens `start` … of a running trajectory, and their log-probabilities."""

    start: int
    num_tokens: int
    content: RecordRef

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


class Prefix(msgspec.Struct, frozen=True, kw_only=True):
    """What a trajectory of one turn has written, in pieces.

    A piece counts up to where the next one starts: it may have been written by a placement that
    was superseded.
    """

    trajectory: TrajectoryId
    fence: Fence
    pieces: tuple[Piece, ...]
    segments: tuple[Segment, ...]
    """From the very first token on."""

    @property
    def num_tokens(self) -> int:
        """With all that was written before the first piece."""
        return self.pieces[-1].end

    def after(self, before: "Prefix") -> "Prefix":
        """This, with what was saved before it."""
        start = self.pieces[0].start
        assert start <= before.num_tokens, "a piece is missing"
        kept = tuple(piece for piece in before.pieces if piece.start < start)
        return msgspec.structs.replace(self, pieces=kept + self.pieces)

    def cut(self, tokens: int) -> "Prefix":
        """The first tokens of a whole prefix."""
        assert self.pieces[0].start == 0 and tokens <= self.num_tokens, "a piece is missing"
        segments: list[Segment] = []
        left = tokens
        for segment in self.segments:
            if left:
                segments.append(segment._replace(tokens=min(left, segment.tokens)))
                left -= segments[-1].tokens
        return msgspec.structs.replace(
            self,
            pieces=tuple(
                piece._replace(num_tokens=min(piece.num_tokens, tokens - piece.start))
                for piece in self.pieces
                if piece.start < tokens
            ),
            segments=tuple(segments),
        )


class Begin(_Message, frozen=True, tag=True):
    """Generate a trajectory; in an episode, stop after each turn and wait for `Continue`."""

    trajectory: TrajectoryId
    fence: Fence
    group: GroupId
    version: Version
    prompt: tuple[int, ...]
    episode: bool = False
    prefix: Prefix | None = None


class Continue(_Message, frozen=True, tag=True):
    """The environment has answered turn `turn`: continue after these tokens."""

    trajectory: TrajectoryId
    fence: Fence
    turn: int
    tokens: tuple[int, ...]


class Conclude(_Message, frozen=True, tag=True):
    """The episode is over: the trajectory is whole as it is."""

    trajectory: TrajectoryId
    fence: Fence
    truncated: bool = False
    """It was cut off: what the environment said last had no room."""


class HandOver(_Message, frozen=True, tag=True):
    """Migration, at the source: put these into the transport, and keep them until `Release`."""

    migration: MigrationId
    moves: tuple[Move, ...]


class TakeOver(_Message, frozen=True, tag=True):
    """Migration, at the target: take what the source has put, and continue it."""

    migration: MigrationId


class SavePrefixes(_Message, frozen=True, tag=True):
    """Report what every trajectory here has written since it was last asked."""


# From a rollout instance


class Reported(_Message, frozen=True, tag=True):
    """An event for the core."""

    encoded: list[Any]

    @classmethod
    def of(cls, event: Event) -> "Reported":
        return cls(encode_event(event))

    @property
    def event(self) -> Event:
        return decode_event(self.encoded)


def reports(message: Any, kind: type[Event]) -> bool:
    """Whether it is an event of this kind, without decoding it."""
    return isinstance(message, Reported) and bool(message.encoded[0] == kind.__name__)


class Finished(_Message, frozen=True, tag=True):
    """A trajectory is whole, and in the transport."""

    fence: Fence
    trajectory: TrajectoryRef


class TurnEnded(_Message, frozen=True, tag=True):
    """A turn of an episode is whole: these tokens are for the environment."""

    trajectory: TrajectoryId
    fence: Fence
    turn: int
    tokens: tuple[int, ...]
    room: int
    """Tokens that the trajectory may still have; with fewer than 2 it can only be concluded."""


class HandedOver(_Message, frozen=True, tag=True):
    """Answers `HandOver`: what is in the transport; or why nothing is."""

    migration: MigrationId
    moved: tuple[Placement, ...] = ()
    failure: str | None = None


class Prefixes(_Message, frozen=True, tag=True):
    """Answers `SavePrefixes`, and is said now and then; the event tells the core the same."""

    prefixes: tuple[Prefix, ...]
    encoded: list[Any]
    asked: bool = False

    @property
    def event(self) -> Event:
        return decode_event(self.encoded)


class Used(_Message, frozen=True, tag=True):
    """Counters of an instance since it started; each only grows."""

    slots_s: float
    busy_s: float
    tokens: int
    steps: int
    reread_tokens: int
    running: int
    """Trajectories that generate at this moment: not a counter."""
    weights_sent_bytes: int = 0
    weights_whole_bytes: int = 0
    """What the versions that it was sent take, each sent whole."""
    proposed_tokens: int = 0
    accepted_tokens: int = 0
    """By its engine's speculation: see `engines.base.Load`."""


# To the trainer


class TrainOn(_Message, frozen=True, tag=True):
    step: int
    groups: tuple[GroupId, ...]
    samples: tuple[SampleRef, ...]


class Redo(_Message, frozen=True, tag=True):
    """Take a step again that was taken before a crash, to get to where the trainer was."""

    step: int
    groups: tuple[GroupId, ...]
    samples: tuple[SampleRef, ...]


class PublishVersion(_Message, frozen=True, tag=True):
    version: Version


class Save(_Message, frozen=True, tag=True):
    """Write the checkpoint of a step, which is not there yet."""

    step: int


class LendThreads(_Message, frozen=True, tag=True):
    """Use so many threads for the rest of the step that is being taken, if one is."""

    threads: int


# From the trainer


class Progressed(_Message, frozen=True, tag=True):
    """The trainer works: it is not hung."""


class TrainerReady(_Message, frozen=True, tag=True):
    """The model is loaded."""


class Trained(_Message, frozen=True, tag=True):
    step: int
    tokens: int
    seconds: float
    metrics: dict[str, float]


class Rejected(_Message, frozen=True, tag=True):
    """The batch gave no finite loss or gradient; the weights are as before."""

    step: int
    groups: tuple[GroupId, ...]
    reason: str
    trajectories: tuple[TrajectoryId, ...]


class TrainingFailed(_Message, frozen=True, tag=True):
    step: int
    reason: str


class Redone(_Message, frozen=True, tag=True):
    """Answers `Redo`."""

    step: int
    failure: str | None = None


class Published(_Message, frozen=True, tag=True):
    version: Version
    digest: str
    seconds: float


class NotPublished(_Message, frozen=True, tag=True):
    version: Version
    reason: str


class Saved(_Message, frozen=True, tag=True):
    step: int
    failure: str | None = None


class Tried(_Message, frozen=True, tag=True):
    """Fast paths that a worker has tried since it last said so, and how each trial ended."""

    trials: dict[str, Trial]


class ToldToGo(_Message, frozen=True, tag=True):
    """A worker was sent SIGTERM: it has to end soon, and goes on until it is told to."""


class Broken(_Message, frozen=True, tag=True):
    """A worker cannot continue, and says why before it ends; `user` if the input is at fault."""

    reason: str
    user: bool


ToRollout: TypeAlias = (
    Perform | Begin | Continue | Conclude | HandOver | TakeOver | SavePrefixes | Shutdown
)
FromRollout: TypeAlias = (
    Reported | Finished | TurnEnded | HandedOver | Prefixes | Used | Tried | ToldToGo | Broken
)
ToTrainer: TypeAlias = TrainOn | Redo | PublishVersion | Save | LendThreads | Shutdown
FromTrainer: TypeAlias = (
    TrainerReady
    | Progressed
    | Trained
    | Rejected
    | TrainingFailed
    | Redone
    | Published
    | NotPublished
    | Saved
    | Tried
    | ToldToGo
    | Broken
)
Message: TypeAlias = Setup | ToRollout | FromRollout | ToTrainer | FromTrainer

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Message).decode
