"""One instance whose work is carried to every new version, under messages in any order.

Whatever fails in between, each trajectory ends once, and every piece of it is what the version of
that piece gives after all that was written before.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_rl.core.protocol import commands as cm
from dora_rl.core.protocol import events as ev
from dora_rl.core.protocol.types import Placement, TrajectoryId, Version
from dora_rl.runtime.control import messages as ms
from dora_rl.samples import Trajectory
from tests.runtime.instances import Part, alone, answer, begin, digest, events, prefix_of, store

NAMES = range(5)  # of which the odd ones are episodes
MAX_TOKENS = 24
LAST = 4  # the newest version


class World:
    """Asks for what a core would that carries running work from version to version."""

    def __init__(self, root: Path, version_slots: int, kv_export: bool) -> None:
        self.part = Part(
            root, max_tokens=MAX_TOKENS, version_slots=version_slots, kv_export=kv_export
        )
        self.version: Version = 0  # as the core has it: a failed install does not change it
        self.begun: set[TrajectoryId] = set()
        self.parked: set[TrajectoryId] = set()
        self.turns: dict[TrajectoryId, ms.TurnEnded] = {}

    def hear(self, said: list[ms.FromRollout]) -> None:
        for message in said:
            if isinstance(message, ms.TurnEnded):
                self.turns[message.trajectory] = message
        for event in events(said):
            assert not isinstance(event, ev.TrajectoryFailed | ev.TrajectoryRefused), event
            if isinstance(event, ev.TrajectoryResumed):
                self.turns.pop(event.trajectory, None)

    def start(self, name: TrajectoryId) -> None:
        if name not in self.begun:
            self.begun.add(name)
            fresh = begin(name, 10 + name, version=self.version, episode=name % 2 == 1)
            self.hear(self.part.tell(fresh))

    def step(self, name: TrajectoryId) -> None:
        self.hear(self.part.step())

    def reply(self, name: TrajectoryId) -> None:
        if name in self.turns and name not in self.parked:
            self.hear(self.part.tell(answer(self.turns[name])))

    def park(self, name: TrajectoryId) -> None:
        if self.here(name):
            self.hear(self.part.do(cm.Park(0, 0, (Placement(name, 10 + name),))))
            self.parked.add(name)

    def unpark(self, name: TrajectoryId) -> None:
        # While no version is here the core unparks nothing.
        if name in self.parked and self.version in self.part.engine.load().versions:
            self.hear(self.part.do(cm.Unpark(0, 0, (Placement(name, 10 + name),))))
            self.parked.discard(name)

    def here(self, name: TrajectoryId) -> bool:
        """Begun and not finished, and its version is installed."""
        whole = (name, 10 + name) in self.part.finished
        return name in self.begun and not whole and self.version in self.part.engine.load().versions

    def carry(self, name: TrajectoryId) -> None:
        if self.version < LAST:
            new = self.version + 1
            said = self.part.do(cm.Install(0, 0, new, evict=self.version, carry=True))
            assert ev.VersionInstalled(0, 0, new, digest(new)) in events(said)
            self.version = new
            self.hear(said)

    def fail_to_carry(self, name: TrajectoryId) -> None:
        if self.version < LAST:
            self.part.engine.fail_next_load()
            new = self.version + 1
            said = self.part.do(cm.Install(0, 0, new, evict=self.version, carry=True))
            assert isinstance(events(said)[-1], ev.InstallFailed)
            self.hear(said)

    def end(self) -> None:
        """Let all that was started come to its end, on the newest version."""
        while self.version < LAST:
            self.carry(0)
        for name in NAMES:
            self.start(name)
        for _ in range(400):
            for name in NAMES:
                self.unpark(name)
                self.reply(name)
            if len(self.part.finished) == len(NAMES):
                return
            self.step(0)
        raise AssertionError(f"never finished: {sorted(self.part.finished)}")


OPERATIONS: list[Callable[[World, TrajectoryId], None]] = [
    World.start,
    World.step,
    World.step,
    World.step,
    World.reply,
    World.park,
    World.unpark,
    World.carry,
    World.fail_to_carry,
]


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp())
    yield store(path / "versions", range(LAST + 1))
    shutil.rmtree(path)


def check(root: Path, whole: Trajectory) -> None:
    versions = [segment.version for segment in whole.segments]
    assert versions == sorted(versions)
    assert all(segment.digest == digest(segment.version) for segment in whole.segments)
    assert whole.num_sampled == sum(segment.tokens for segment in whole.segments)
    assert len(whole.tokens) == len(whole.logprobs) <= MAX_TOKENS
    if whole.observed:
        return  # a prefix is of one turn
    start = 0
    for at, segment in enumerate(whole.segments):
        end = start + segment.tokens
        prefix = prefix_of(whole, start, fence=1, segments=whole.segments[:at])
        name = whole.id
        piece = begin(name, 1, version=segment.version, prefix=prefix if start else None)
        quiet = alone(root, piece, MAX_TOKENS)
        assert whole.tokens[start:end] == quiet.tokens[start:end]
        assert whole.logprobs[start:end] == quiet.logprobs[start:end]
        start = end
    assert start == len(whole.tokens)


@given(
    story=st.lists(st.tuples(st.sampled_from(OPERATIONS), st.sampled_from(NAMES)), max_size=50),
    version_slots=st.integers(1, 2),
    kv_export=st.booleans(),
)
def test_whatever_is_carried_ends_once_and_says_of_which_versions_it_is(
    story: list[tuple[Callable[[World, TrajectoryId], None], TrajectoryId]],
    version_slots: int,
    kv_export: bool,
    root: Path,
) -> None:
    world = World(root, version_slots, kv_export)
    for operation, name in story:
        operation(world, name)
    world.end()
    assert {name for name, _ in world.part.finished} == set(NAMES)
    for whole in world.part.finished.values():
        check(root, whole)
    assert set(world.part.engine.load().versions) == {LAST}
    assert world.part.engine.idle
