"""Two instances under messages in any order: nothing is lost, finished twice, or changed."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from enum import Enum, auto
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_rl.core.protocol import commands as cm
from dora_rl.core.protocol import events as ev
from dora_rl.core.protocol.types import Fence, Move, Placement, TrajectoryId
from dora_rl.runtime.control import messages as ms
from dora_rl.samples import Trajectory
from tests.runtime.instances import Journey, Part, alone, answer, begin, store

NAMES = range(6)  # of which the odd ones are episodes
MAX_TOKENS = 30


class Phase(Enum):
    RESERVED = auto()
    HANDED = auto()
    UNHEARD = auto()  # the target has it; the answer was lost
    DONE = auto()  # but not released


class World:
    """Keeps the books that the core and the driver would, and asks for what it is told to."""

    def __init__(self, root: Path, kv_export: tuple[bool, bool] = (True, True)) -> None:
        self.parts = [
            Part(root, number, slots=3, max_tokens=MAX_TOKENS, kv_export=kv_export[number])
            for number in (0, 1)
        ]
        self.places: dict[TrajectoryId, tuple[int, Fence]] = {}
        self.parked: set[TrajectoryId] = set()
        self.turns: dict[TrajectoryId, ms.TurnEnded] = {}  # without an answer
        self.whole: dict[TrajectoryId, Trajectory] = {}
        self.journeys: dict[int, tuple[Journey, Phase]] = {}
        self.handed: dict[int, ms.HandedOver] = {}  # the answers of the source
        self.ended: list[Journey] = []
        self.moving: dict[TrajectoryId, int] = {}
        self.others: list[int | None] = [None, None]  # a version beside that of the work
        self.last = 0

    def fence(self) -> Fence:
        self.last += 1
        return self.last

    def tell(self, part: int, *messages: ms.ToRollout) -> None:
        self.hear(part, self.parts[part].tell(*messages))

    def hear(self, part: int, messages: list[ms.FromRollout]) -> None:
        for message in messages:
            match message:
                case ms.Finished():
                    name = message.trajectory.id
                    if self.places.get(name) == (part, message.fence):
                        assert name not in self.whole
                        self.whole[name] = self.parts[part].finished[name, message.fence]
                        del self.places[name]
                case ms.TurnEnded():
                    if self.places.get(message.trajectory) == (part, message.fence):
                        self.turns[message.trajectory] = message
                case ms.Reported():
                    event = message.event
                    assert not isinstance(event, ev.TrajectoryFailed), event
                    if isinstance(event, ev.TrajectoryResumed):
                        self.turns.pop(event.trajectory, None)

    # What may be asked; each does nothing where it would make no sense

    def start(self, name: TrajectoryId, part: int) -> None:
        if name not in self.whole and name not in self.places:
            self.places[name] = part, self.fence()
            self.say_again(name, part)

    def say_again(self, name: TrajectoryId, part: int) -> None:
        if name in self.places:
            where, fence = self.places[name]
            self.tell(where, begin(name, fence, episode=name % 2 == 1))

    def step(self, name: TrajectoryId, part: int) -> None:
        self.hear(part, self.parts[part].step())

    def reply(self, name: TrajectoryId, part: int) -> None:
        if name in self.turns and name in self.places:
            where, fence = self.places[name]
            self.tell(where, answer(self.turns[name], fence))

    def park(self, name: TrajectoryId, part: int) -> None:
        if name in self.places and name not in self.moving:
            where, fence = self.places[name]
            self.tell(where, ms.Perform.of(cm.Park(where, 0, (Placement(name, fence),))))
            self.parked.add(name)

    def unpark(self, name: TrajectoryId, part: int) -> None:
        if name in self.parked and name in self.places and name not in self.moving:
            where, fence = self.places[name]
            self.tell(where, ms.Perform.of(cm.Unpark(where, 0, (Placement(name, fence),))))
            self.parked.discard(name)

    def lose(self, name: TrajectoryId, part: int) -> None:
        """Give a placement up; an episode begins anew, the rest goes on from its prefix."""
        if name not in self.places or name in self.moving:
            return
        where, fence = self.places[name]
        *_, saved = self.parts[where].tell(ms.SavePrefixes())
        assert isinstance(saved, ms.Prefixes)
        prefix = next((p for p in saved.prefixes if p.trajectory == name), None)
        self.tell(where, ms.Perform.of(cm.Cancel(name, fence, where)))
        self.turns.pop(name, None)
        self.parked.discard(name)
        self.places[name] = part, self.fence()
        fence = self.places[name][1]
        self.tell(part, begin(name, fence, episode=name % 2 == 1, prefix=prefix))

    def reserve(self, name: TrajectoryId, part: int) -> None:
        movable = [n for n, (w, _) in self.places.items() if w != part and n not in self.moving]
        if name not in movable:
            return
        moves = tuple(
            Move(n, self.places[n][1], self.fence()) for n in movable if n in (name, name + 1)
        )
        journey = Journey(self.fence(), self.parts[1 - part], self.parts[part], moves)
        if journey.reserve() == [ev.MigrationReserved(journey.name)]:
            self.journeys[journey.name] = journey, Phase.RESERVED
            self.moving |= {move.trajectory: journey.name for move in moves}

    def hand_over(self, name: TrajectoryId, part: int) -> None:
        for key, (journey, phase) in self.journeys.items():
            if phase is Phase.RESERVED:
                self.handed[key] = journey.hand_over()
                self.journeys[key] = journey, Phase.HANDED

    def hand_over_again(self, name: TrajectoryId, part: int) -> None:
        """A duplicate: the answer is the same, and nothing else moves."""
        for key, (journey, phase) in self.journeys.items():
            if phase is not Phase.RESERVED:
                assert journey.hand_over() == self.handed[key]
                assert journey.file.exists() == (phase is Phase.HANDED)

    def take_over_again(self, name: TrajectoryId, part: int) -> None:
        for journey, phase in self.journeys.values():
            if phase in (Phase.UNHEARD, Phase.DONE):
                assert journey.target.tell(ms.TakeOver(journey.name)) == []

    def hand_over_late(self, name: TrajectoryId, part: int) -> None:
        """A duplicate that comes when the migration has ended moves nothing."""
        for journey in self.ended:
            assert journey.hand_over().failure is not None
            assert not journey.file.exists()

    def change_version(self, name: TrajectoryId, part: int) -> None:
        """Another version comes, gives way to the next, or goes; the work is not of it."""
        one, here = self.parts[part], self.others[part]
        if here is None:
            one.do(cm.Install(part, 0, 1))
            self.others[part] = 1
        elif here == 1:
            one.do(cm.Install(part, 0, 2, evict=1))
            self.others[part] = 2
        else:
            one.do(cm.Evict(part, 0, 2))
            self.others[part] = None
        found = {0} if self.others[part] is None else {0, self.others[part]}
        assert set(one.engine.load().versions) == found

    def fail_to_install(self, name: TrajectoryId, part: int) -> None:
        one = self.parts[part]
        before = set(one.engine.load().versions)
        one.engine.fail_next_load()
        one.do(cm.Install(part, 0, 3, evict=self.others[part]))
        assert set(one.engine.load().versions) == before, "a slot was free"

    def take_over(self, name: TrajectoryId, part: int) -> None:
        for key, (journey, phase) in self.journeys.items():
            if phase is Phase.HANDED:
                self.journeys[key] = journey, Phase.DONE
                done = journey.take_over()
                assert isinstance(done, ev.MigrationCompleted), done
                fences = {(move.trajectory, move.fence): move.new_fence for move in journey.moves}
                target = self.parts.index(journey.target)
                for placement in done.moved:
                    assert self.places[placement.trajectory][1] == placement.fence
                    self.places[placement.trajectory] = target, fences[placement]
                    self.parked.discard(placement.trajectory)

    def take_over_unheard(self, name: TrajectoryId, part: int) -> None:
        for key, (journey, phase) in self.journeys.items():
            if phase is Phase.HANDED:
                self.journeys[key] = journey, Phase.UNHEARD
                journey.take_over()

    def release(self, name: TrajectoryId, part: int) -> None:
        for key, (journey, phase) in list(self.journeys.items()):
            if phase is Phase.DONE:
                journey.release()
                self._forget(key)

    def abort(self, name: TrajectoryId, part: int) -> None:
        for key, (journey, phase) in list(self.journeys.items()):
            if phase is not Phase.DONE:
                journey.abort()
                self._forget(key)

    def _forget(self, key: int) -> None:
        self.ended.append(self.journeys.pop(key)[0])
        self.moving = {name: at for name, at in self.moving.items() if at != key}

    def end(self) -> None:
        """Let all that was started come to its end."""
        for name in NAMES:
            self.start(name, name % 2)
        for _ in range(400):
            self.release(0, 0)
            self.abort(0, 0)
            for name in NAMES:
                self.unpark(name, 0)
                self.reply(name, 0)
            if len(self.whole) == len(NAMES):
                return
            self.step(0, 0)
            self.step(0, 1)
        raise AssertionError(f"never finished: {self.places}")


OPERATIONS: list[Callable[[World, TrajectoryId, int], None]] = [
    World.start,
    World.say_again,
    World.step,
    World.step,
    World.reply,
    World.park,
    World.unpark,
    World.lose,
    World.reserve,
    World.hand_over,
    World.hand_over_again,
    World.hand_over_late,
    World.take_over,
    World.take_over_again,
    World.take_over_unheard,
    World.release,
    World.abort,
    World.change_version,
    World.fail_to_install,
]


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp())
    yield store(path / "versions", range(4))
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def undisturbed(root: Path) -> dict[TrajectoryId, Trajectory]:
    return {name: alone(root, begin(name, 1, episode=name % 2 == 1), MAX_TOKENS) for name in NAMES}


Stories = st.lists(
    st.tuples(st.sampled_from(OPERATIONS), st.sampled_from(NAMES), st.integers(0, 1)), max_size=60
)


@given(story=Stories, kv_export=st.tuples(st.booleans(), st.booleans()))
def test_nothing_is_lost_finished_twice_or_changed(
    story: list[tuple[Callable[[World, TrajectoryId, int], None], TrajectoryId, int]],
    kv_export: tuple[bool, bool],
    root: Path,
    undisturbed: dict[TrajectoryId, Trajectory],
) -> None:
    world = World(root, kv_export)
    for name in NAMES[:4]:
        world.start(name, name % 2)
    for operation, name, part in story:
        operation(world, name, part)
    world.end()
    assert world.whole == undisturbed
    for part in world.parts:
        part.run()
        assert not part.engine.load().versions[0].running
    assert not list(root.glob("migration-*"))
