"""The inequality, against brute force and against an actual assignment of groups to steps."""

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from dora_rl.core.audit.invariants import check
from dora_rl.core.policy.admission import schedulable
from dora_rl.core.protocol import commands as cm
from dora_rl.core.protocol import events as ev
from dora_rl.core.protocol.settings import Settings
from dora_rl.core.protocol.types import Segment
from tests.core.adversary import Adversary, digest

Counts = Mapping[int, int]


def fits(outstanding: Counts, step: int, per_step: int, staleness: int) -> bool:
    """The inequality, for every step up to the last deadline, one by one."""
    last = max(outstanding, default=0) + staleness
    return all(
        sum(n for v, n in outstanding.items() if v + staleness <= d)
        <= max(0, d - step + 1) * per_step
        for d in range(last + 1)
    )


def deadlines(outstanding: Counts, staleness: int) -> list[int]:
    return sorted(v + staleness for v, n in outstanding.items() for _ in range(n))


def edf_meets_deadlines(due: list[int], step: int, per_step: int) -> bool:
    """The i-th group by deadline goes to step + i // B."""
    return all(step + place // per_step <= d for place, d in enumerate(sorted(due)))


def some_assignment_exists(due: list[int], step: int, per_step: int) -> bool:
    """Try every step for every group."""
    room: dict[int, int] = {}

    def assign(rest: list[int]) -> bool:
        if not rest:
            return True
        for s in range(step, rest[0] + 1):
            if room.get(s, 0) < per_step:
                room[s] = room.get(s, 0) + 1
                if assign(rest[1:]):
                    return True
                room[s] -= 1
        return False

    return assign(due)


@st.composite
def situations(draw: st.DrawFn, most: int = 4) -> tuple[dict[int, int], int, int, int]:
    """Outstanding groups per version, the next step, B and K; not always schedulable."""
    staleness = draw(st.integers(0, 3))
    step = draw(st.integers(0, 4))
    per_step = draw(st.integers(1, 3))
    versions = st.integers(max(0, step - staleness - 1), step)
    outstanding = draw(st.dictionaries(versions, st.integers(1, most), max_size=4))
    return outstanding, step, per_step, staleness


@st.composite
def admitted(draw: st.DrawFn) -> tuple[dict[int, int], int, int, int]:
    """A situation as admission leaves it: schedulable, in whatever order groups came."""
    staleness = draw(st.integers(0, 3))
    step = draw(st.integers(0, 4))
    per_step = draw(st.integers(1, 3))
    outstanding: dict[int, int] = {}
    for version in draw(st.permutations(range(max(0, step - staleness), step + 1))):
        room = schedulable(outstanding, version, step, per_step, staleness)
        if count := draw(st.integers(0, room)):
            outstanding[version] = count
    return outstanding, step, per_step, staleness


@given(st.one_of(situations(), admitted()), st.data())
def test_room_is_the_largest_number_that_keeps_the_inequality(
    situation: tuple[dict[int, int], int, int, int], data: st.DataObject
) -> None:
    outstanding, step, per_step, staleness = situation
    version = data.draw(st.integers(max(0, step - staleness - 1), step))
    room = schedulable(outstanding, version, step, per_step, staleness)
    if not fits(outstanding, step, per_step, staleness):
        return

    def after(more: int) -> bool:
        grown = {**outstanding, version: outstanding.get(version, 0) + more}
        return fits(grown, step, per_step, staleness)

    assert all(after(more) for more in range(room + 1))
    assert not after(room + 1)


@given(situations(most=2))
def test_the_inequality_holds_iff_every_deadline_can_be_met(
    situation: tuple[dict[int, int], int, int, int],
) -> None:
    outstanding, step, per_step, staleness = situation
    due = deadlines(outstanding, staleness)
    expected = some_assignment_exists(due, step, per_step)
    assert fits(outstanding, step, per_step, staleness) == expected
    assert edf_meets_deadlines(due, step, per_step) == expected


@given(situations())
def test_no_room_on_a_version_whose_deadline_is_past(
    situation: tuple[dict[int, int], int, int, int],
) -> None:
    outstanding, step, per_step, staleness = situation
    if step > staleness:
        assert schedulable(outstanding, step - staleness - 1, step, per_step, staleness) == 0


def test_the_newest_version_has_k_plus_one_batches() -> None:
    assert schedulable({}, 5, 5, 8, 3) == 4 * 8
    assert schedulable({3: 4, 5: 8}, 5, 5, 8, 3) == 4 * 8 - 12


def test_synchronous_training_admits_one_batch() -> None:
    assert schedulable({}, 2, 2, 4, 0) == 4
    assert schedulable({2: 4}, 2, 2, 4, 0) == 0
    assert schedulable({}, 2, 3, 4, 0) == 0  # step 2 is trained, version 3 not yet published


def test_an_older_version_is_bound_by_its_own_deadline_and_by_later_ones() -> None:
    assert schedulable({}, 3, 5, 4, 3) == 2 * 4
    assert schedulable({5: 15}, 3, 5, 4, 3) == 1  # the newest leave little of the last deadline


def test_a_batch_in_training_lends_no_room_to_versions_before_its_own() -> None:
    """K = 3, B = 2, step 1: counted with its batch {1: 2}, version 0 seems to have room."""
    assert schedulable({0: 4, 1: 2}, 0, 1, 2, 3) == 2
    assert schedulable({0: 4}, 0, 2, 2, 3) == 0  # what there is once the batch is set aside


class Scripted(Adversary):
    """Delivers what the script lets through: never prompts, and a trained batch when told."""

    def settle(self, *held: type) -> None:
        while found := [e for e in self.pool if not isinstance(e, (ev.PromptsAvailable, *held))]:
            self.pool.remove(found[0])
            self.send(found[0])

    def give_prompts(self, count: int) -> None:
        self.send(ev.PromptsAvailable(self.core.state.work.prompts, count))
        self.settle(ev.BatchTrained)

    def finish(self, version: int, count: int) -> None:
        runs = [
            (name, t, run)
            for name, engine in sorted(self.engines.items())
            for t, run in sorted(engine.running.items())
            if run.version == version
        ]
        for name, t, run in runs[:count]:
            del self.engines[name].running[t]
            whole = (Segment(version, digest(version), 1),)
            self.pool.append(ev.TrajectoryFinished(t, run.fence, 1, whole))

    def wait(self, *held: type) -> None:
        for _ in range(4):
            self.advance(5.0)
            self.settle(*held)


def test_filling_an_older_version_while_a_batch_trains_keeps_the_rest_schedulable() -> None:
    world = Scripted(
        Settings(
            groups_per_step=2,
            group_size=1,
            max_staleness=3,
            pipeline_depth=6,
            rebalance_period_s=5.0,
            fill_older=True,
        )
    )
    for name in range(2):
        world.join(name, slots=8)
    world.settle()
    world.give_prompts(6)
    world.settle()
    world.finish(0, 2)
    world.settle()  # step 0 is trained, version 1 published, 2B groups of version 0 run on
    world.wait()
    world.give_prompts(2)
    world.finish(1, 2)
    world.settle(ev.BatchTrained)  # step 1 trains on version 1
    world.give_prompts(20)
    world.wait(ev.BatchTrained)  # and version 0, whose slots idle, may be filled
    world.settle()
    check(world.core.state)
    for _ in range(4):
        for version in range(world.core.state.versions.newest + 1):
            world.finish(version, 99)
        world.settle()
        world.wait()
    assert [c.step for c in world.trained if isinstance(c, cm.Train)][-1] > 1
