"""Rollout instances on fake engines, and a witness of what they say."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dora_rl.core.protocol import commands as cm
from dora_rl.core.protocol import events as ev
from dora_rl.core.protocol.types import Fence, MigrationId, Move, TrajectoryId, Version
from dora_rl.engines.base import Sampling
from dora_rl.engines.fake import FakeEngine
from dora_rl.runtime.control import messages as ms
from dora_rl.runtime.workers.rollout import RolloutInstance
from dora_rl.samples import Trajectory, pack_tokens, unpack
from dora_rl.transports.kv.shared_directory import KvDirectory
from dora_rl.transports.samples.memory import SampleMemory
from dora_rl.transports.weights import Traffic

TOKENS = 12
SEED = 17  # trajectories 1 to 5 have 7 tokens and more, of different lengths
SAID = (5, 6)  # what the environment of these tests answers
TURNS = 3
MAX_STEPS = 500
RECORDS = SampleMemory()  # of all parts


def digest(version: Version) -> str:
    return f"digest-{version}"


def store(root: Path, versions: Sequence[Version]) -> Path:
    """Directories of versions, of which a fake engine wants the digest alone."""
    for version in versions:
        directory = root / str(version)
        directory.mkdir(parents=True)
        (directory / "manifest.json").write_text(json.dumps({"digest": digest(version)}))
    return root


class Versions:
    """A receiver of nothing: an engine without weights is given a name."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.traffic = Traffic()
        self.released: list[Version] = []

    def receive(self, version: Version) -> Path:
        self.traffic.sent_bytes += 10
        self.traffic.whole_bytes += 100
        return self.root / str(version)

    def release(self, version: Version) -> None:
        self.released.append(version)

    def close(self) -> None:
        pass


@dataclass
class Time:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class Part:
    """One instance; all that it says is kept, and what comes twice is an error."""

    def __init__(
        self,
        root: Path,
        name: int = 0,
        *,
        slots: int = 4,
        versions: Sequence[Version] = (0,),
        max_tokens: int = TOKENS,
        exchange: Path | None = None,
        **engine: Any,
    ) -> None:
        """`exchange` is where what moves is found; `root` has the weights."""
        self.root = exchange = exchange or root
        self.time = Time()
        self.engine = FakeEngine(
            **{"slots": slots, "version_slots": 3, "clock": self.time} | engine
        )
        self.weights = Versions(root)
        self.instance = RolloutInstance(
            name,
            0,
            self.engine,
            self.weights,
            RECORDS,
            RECORDS,
            KvDirectory(exchange),
            Sampling(max_tokens=max_tokens),
            seed=SEED,
            clock=self.time,
        )
        self.said: list[ms.FromRollout] = []
        self.finished: dict[tuple[TrajectoryId, Fence], Trajectory] = {}
        for version in versions:
            self.do(cm.Install(name, 0, version))

    def tell(self, *messages: ms.ToRollout) -> list[ms.FromRollout]:
        """What is said in answer, after a journey each way."""
        for message in messages:
            arrived = ms.decode(ms.encode(message))
            self.instance.handle(arrived)  # type: ignore[arg-type]
        return self.collect()

    def do(self, *commands: cm.Command) -> list[ms.FromRollout]:
        return self.tell(*(ms.Perform.of(command) for command in commands))

    def collect(self) -> list[ms.FromRollout]:
        new = [ms.decode(ms.encode(message)) for message in self.instance.outbox]
        self.instance.outbox.clear()
        for message in new:
            if isinstance(message, ms.Finished):
                whole = unpack(RECORDS.get(message.trajectory.content))
                assert whole.by_reference(message.trajectory.content) == message.trajectory
                key = whole.id, message.fence
                assert key not in self.finished
                self.finished[key] = whole
        self.said += new  # type: ignore[arg-type]
        return new  # type: ignore[return-value]

    def step(self, times: int = 1) -> list[ms.FromRollout]:
        new = []
        for _ in range(times):
            if self.instance.busy:
                self.instance.step()
                self.time.now += 1.0
            new += self.collect()
        return new

    def run(self) -> None:
        """Steps until there is nothing to do."""
        for _ in range(MAX_STEPS):
            if not self.instance.busy:
                return
            self.step()
        raise AssertionError("still busy")

    @property
    def events(self) -> list[ev.Event]:
        return [message.event for message in self.said if isinstance(message, ms.Reported)]

    def one(self, trajectory: TrajectoryId) -> Trajectory:
        """The only whole trajectory of this name."""
        (found,) = [whole for (name, _), whole in self.finished.items() if name == trajectory]
        return found


def events(messages: Sequence[ms.FromRollout]) -> list[ev.Event]:
    return [message.event for message in messages if isinstance(message, ms.Reported)]


def begin(
    trajectory: TrajectoryId,
    fence: Fence,
    *,
    version: Version = 0,
    episode: bool = False,
    prefix: ms.Prefix | None = None,
) -> ms.Begin:
    prompt = (1, 2, 3 + trajectory % 20)
    return ms.Begin(trajectory, fence, trajectory // 2, version, prompt, episode, prefix)


def prefix_of(whole: Trajectory, tokens: int, **fields: Any) -> ms.Prefix:
    """The first tokens of a trajectory, as if they had been saved."""
    content = RECORDS.put(pack_tokens(whole.tokens[:tokens], whole.logprobs[:tokens]))
    return ms.Prefix(trajectory=whole.id, pieces=(ms.Piece(0, tokens, content),), **fields)


def answer(message: ms.TurnEnded, fence: Fence | None = None) -> ms.Continue | ms.Conclude:
    """What the environment makes of a turn: the same whoever asks."""
    fence = message.fence if fence is None else fence
    if message.turn + 1 < TURNS and message.room > len(SAID):
        return ms.Continue(message.trajectory, fence, message.turn, SAID)
    return ms.Conclude(message.trajectory, fence)


def alone(root: Path, message: ms.Begin, max_tokens: int = TOKENS) -> Trajectory:
    """The trajectory as it is when nothing happens to it."""
    part = Part(root, versions=(message.version,), max_tokens=max_tokens)
    new = part.tell(message)
    for _ in range(MAX_STEPS):
        for said in new:
            if isinstance(said, ms.TurnEnded):
                part.tell(answer(said))
        if part.finished:
            return part.one(message.trajectory)
        new = part.step()
    raise AssertionError("never finished")


@dataclass
class Journey:
    """A migration between two parts, phase by phase."""

    name: MigrationId
    source: Part
    target: Part
    moves: tuple[Move, ...]
    version: Version = 0
    file: Path = field(init=False)

    def __post_init__(self) -> None:
        self.file = self.source.root / f"migration-{self.name}"

    def reserve(self) -> list[ev.Event]:
        source, target = (part.instance.instance for part in (self.source, self.target))
        return events(
            self.target.do(cm.Reserve(self.name, source, target, self.version, self.moves))
        )

    def hand_over(self) -> ms.HandedOver:
        new = self.source.tell(ms.HandOver(self.name, self.moves))
        (said,) = [message for message in new if isinstance(message, ms.HandedOver)]
        return said

    def take_over(self) -> ev.Event:
        (said,) = events(self.target.tell(ms.TakeOver(self.name)))
        return said

    def release(self) -> None:
        self.source.do(cm.Release(self.name))

    def abort(self) -> None:
        for part in (self.source, self.target):
            part.do(cm.AbortMigration(self.name))
        self.file.unlink(missing_ok=True)


def held(part: Part) -> ms.TurnEnded:
    """Steps until a turn has ended."""
    for _ in range(100):
        for said in part.step():
            if isinstance(said, ms.TurnEnded):
                return said
    raise AssertionError("no turn has ended")


def long_episode(root: Path, max_tokens: int = 60) -> ms.Begin:
    """One that has all its turns, each of them of several tokens."""
    for name in range(200):
        message = begin(name, 10, episode=True)
        whole = alone(root, message, max_tokens)
        if whole.turns == TURNS and whole.observed[0].start > 3:
            return message
    raise AssertionError("no long episode")


def used(part: Part) -> ms.Used:
    part.instance.report()
    (found,) = [message for message in part.collect() if isinstance(message, ms.Used)]
    return found
