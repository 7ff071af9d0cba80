"""What was asked for and not answered: all of it, nothing else, and enough to continue from."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from dora_rl.core.actions.unanswered import batch
from dora_rl.core.protocol import commands as cm
from dora_rl.core.protocol import events as ev
from dora_rl.core.protocol.settings import ParadigmName, Settings
from dora_rl.core.state.run import TrainerPhase
from tests.core.adversary import Adversary, digest, stir

seeds = st.integers(0, 2**32)
paradigms = st.sampled_from(list(ParadigmName))


def make_world(paradigm: ParadigmName, seed: int, steps: int, *, faults: bool) -> Adversary:
    """A world after some time."""
    world = Adversary(
        Settings(
            paradigm=paradigm,
            groups_per_step=2,
            group_size=2,
            max_staleness=2,
            version_slots=2,
            max_steps=6,
        )
    )
    world.join(0, version_slots=2)
    world.join(1, version_slots=2)
    stir(world, random.Random(seed), steps, faults=faults)
    return world


class Books:
    """Commands without an answer, kept from the stream alone."""

    def __init__(self) -> None:
        self.fetch: int | None = None
        self.scores: dict[int, int] = {}  # trajectory -> fence
        self.judging: set[int] = set()
        self.train: cm.Train | None = None
        self.publish: int | None = None
        self.suspended = False
        self.timer: float | None = None

    def observe(self, now: float, event: ev.Event, commands: list[cm.Command]) -> None:
        self._answer(event)
        for command in commands:
            self._ask(command)

    def _answer(self, event: ev.Event) -> None:
        match event:
            case ev.PromptsAvailable() if event.first == self.fetch:
                self.fetch = None
            case ev.TrajectoryScored() | ev.TrajectoryFailed():
                if self.scores.get(event.trajectory) == event.fence:
                    del self.scores[event.trajectory]
            case ev.GroupJudged():
                self.judging.discard(event.group)
            case ev.BatchTrained() if self.train is not None and event.step == self.train.step:
                self.train = None
            case ev.WeightsPublished() if event.version == self.publish:
                self.publish = None
            case ev.TimerFired():
                self.timer = None

    def _ask(self, command: cm.Command) -> None:
        match command:
            case cm.FetchPrompts():
                self.fetch = command.first
            case cm.Score():
                self.scores[command.trajectory] = command.fence
            case cm.Start() | cm.Fail():
                self.scores.pop(command.trajectory, None)
            case cm.Judge():
                self.judging.add(command.group)
            case cm.Train():
                self.train = command
            case cm.Publish():
                self.publish = command.version
            case cm.Suspend() | cm.Resume():
                self.suspended = isinstance(command, cm.Suspend)
            case cm.SetTimer():
                self.timer = command.at


@given(paradigms, seeds, st.integers(0, 250), st.booleans())
def test_all_that_was_not_answered_and_nothing_else(
    paradigm: ParadigmName, seed: int, steps: int, faults: bool
) -> None:
    world = make_world(paradigm, seed, steps, faults=faults)
    if world.halted:
        return
    books = Books()
    for entry in world.log:
        books.observe(*entry)
    found = world.core.unanswered()
    of = {kind: [c for c in found if isinstance(c, kind)] for kind in map(type, found)}
    assert sum(map(len, of.values())) == len(found)
    assert [c.first for c in of.get(cm.FetchPrompts, ())] == _maybe(books.fetch)
    assert {c.trajectory: c.fence for c in of.get(cm.Score, ())} == books.scores
    assert {c.group for c in of.get(cm.Judge, ())} == books.judging
    assert of.get(cm.Train, []) == _maybe(books.train)
    assert [c.version for c in of.get(cm.Publish, ())] == _maybe(books.publish)
    assert bool(of.get(cm.Suspend)) == books.suspended
    assert [c.at for c in of.get(cm.SetTimer, ())] == _maybe(books.timer)


def _maybe(value: object) -> list[object]:
    return [] if value is None else [value]


def test_before_the_first_version_nothing_is_asked_of_the_trainer() -> None:
    """Version 0 is whoever starts the run's to publish."""
    world = Adversary(Settings(groups_per_step=1, group_size=1))
    assert world.core.unanswered() == []
    world.send(ev.WeightsPublished(0, digest(0)))
    kinds = {type(command) for command in world.core.unanswered()}
    assert kinds <= {cm.FetchPrompts, cm.SetTimer}


@given(paradigms, seeds, st.integers(0, 250))
def test_asking_changes_nothing(paradigm: ParadigmName, seed: int, steps: int) -> None:
    world = make_world(paradigm, seed, steps, faults=True)
    before = world.core.snapshot()
    assert world.core.unanswered() == world.core.unanswered()
    assert world.core.snapshot() == before


@given(paradigms, seeds, st.integers(0, 250))
def test_the_batch_has_its_true_members(paradigm: ParadigmName, seed: int, steps: int) -> None:
    world = make_world(paradigm, seed, steps, faults=True)
    if world.core.state.trainer.phase is TrainerPhase.TRAINING:
        assert batch(world.core.state) == world.trained[-1]


@settings(max_examples=50)
@given(paradigms, seeds, st.integers(0, 200))
def test_a_new_life_goes_on_without_waiting_for_a_time_out(
    paradigm: ParadigmName, seed: int, steps: int
) -> None:
    """Every instance and every answer under way is lost; only what is outstanding is asked anew."""
    world = make_world(paradigm, seed, steps, faults=False)
    if world.halted:
        return
    world.pool.clear()
    for name in sorted(world.engines):
        world.crash(name)
    world.pool.clear()  # answers to whatever the old incarnation would still have been asked
    if world.core.state.versions.newest < 0:
        world.pool.append(ev.WeightsPublished(0, digest(0)))
    for command in world.core.unanswered():
        getattr(world, f"_on_{type(command).__name__}")(command)
    for name in (0, 1):
        world.join(name, version_slots=2)
    rng = random.Random(seed)
    for _ in range(3000):
        if world.halted:
            break
        if world.pool:
            world.deliver(rng.randrange(1000))
        elif any(engine.running for engine in world.engines.values()):
            world.generate(rng.randrange(1000), rng.choice(("token", "finish")))
        else:
            world.advance(1.0)  # the core may wait a moment; a time-out is minutes
    assert world.halted is not None and world.halted.ok, world.halted
    assert world.now < 60 + steps * 20.0
    trained = [
        t
        for c in {c.step: c for c in world.trained}.values()
        for g in c.groups
        for t in g.trajectories
    ]
    assert len(trained) == len(set(trained))
