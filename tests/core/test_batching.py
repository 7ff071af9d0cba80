"""The earliest-deadline batch: the best there is, and the steps it leads to."""

import random
from collections.abc import Iterator
from itertools import product

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dora_rl.core.policy.admission import schedulable
from dora_rl.core.policy.batching import overdue, take_earliest
from tests.core.test_admission import admitted, fits


def batches(ready: dict[int, int], size: int) -> Iterator[dict[int, int]]:
    """Every batch of `size` ready groups, by number per version."""
    versions = sorted(ready)
    for counts in product(*(range(ready[v] + 1) for v in versions)):
        if sum(counts) == size:
            yield dict(zip(versions, counts, strict=True))


def left(outstanding: dict[int, int], taken: dict[int, int]) -> dict[int, int]:
    rest = {v: n - taken.get(v, 0) for v, n in outstanding.items()}
    return {v: n for v, n in rest.items() if n}


@given(admitted(), st.data())
def test_if_the_earliest_batch_fails_every_other_does(
    situation: tuple[dict[int, int], int, int, int], data: st.DataObject
) -> None:
    outstanding, step, per_step, staleness = situation
    assert fits(outstanding, step, per_step, staleness)
    assume(sum(outstanding.values()) >= per_step)
    ready = {v: data.draw(st.integers(0, n)) for v, n in outstanding.items()}
    assume(sum(ready.values()) >= per_step)
    taken = take_earliest(ready, per_step)
    late = overdue(outstanding, taken, step, per_step, staleness)
    some = any(
        fits(left(outstanding, batch), step + 1, per_step, staleness)
        for batch in batches(ready, per_step)
    )
    assert (late is None) == some
    if late is not None:
        # What it waits for is unfinished, and due no later than the version that is named.
        assert any(outstanding[v] > ready[v] for v in outstanding if v <= late)


@given(
    st.dictionaries(st.integers(0, 4), st.integers(0, 4), max_size=4),
    st.integers(1, 6),
)
def test_the_earliest_batch_takes_the_most_of_every_deadline_at_once(
    ready: dict[int, int], size: int
) -> None:
    taken = take_earliest(ready, size)
    assert sum(taken.values()) == min(size, sum(ready.values()))
    assert all(0 < count <= ready[v] for v, count in taken.items())
    for batch in batches(ready, size):
        for version in ready:
            mine = sum(n for v, n in taken.items() if v <= version)
            assert mine >= sum(n for v, n in batch.items() if v <= version)


@pytest.mark.parametrize("per_step", [1, 2, 5])
def test_holding_what_is_due_now_is_not_enough(per_step: int) -> None:
    """K = 3, step 2: 2B unfinished groups due at step 3, B ready ones due at step 5."""
    step, staleness = 2, 3
    outstanding = {0: 2 * per_step, 2: per_step}
    assert fits(outstanding, step, per_step, staleness)
    batch = take_earliest({2: per_step}, per_step)
    assert batch == {2: per_step}
    # Nothing is due now, so that the batch holds all that is; yet it would leave 2B for one step.
    assert not fits(left(outstanding, batch), step + 1, per_step, staleness)
    assert overdue(outstanding, batch, step, per_step, staleness) == 0
    # Once B of the early ones are ready, the batch is they.
    batch = take_earliest({0: per_step, 2: per_step}, per_step)
    assert overdue(outstanding, batch, step, per_step, staleness) is None


def test_a_group_that_is_due_now_is_waited_for() -> None:
    assert overdue({0: 1, 3: 4}, {3: 4}, 3, 4, 3) == 0
    assert overdue({0: 1, 3: 4}, {0: 1, 3: 3}, 3, 4, 3) is None


def test_synchronous_batches_take_all_there_is() -> None:
    assert overdue({5: 4}, {5: 4}, 5, 4, 0) is None
    assert overdue({5: 5}, {5: 4}, 5, 4, 0) == 5


class Walk:
    """Groups as mere counts, moved by the two pure functions in any order chance gives."""

    def __init__(self, rng: random.Random, per_step: int, staleness: int) -> None:
        self.rng = rng
        self.per_step = per_step
        self.staleness = staleness
        self.step = 0
        self.newest = 0
        self.open: dict[int, int] = {}
        self.ready: dict[int, int] = {}
        self.batch: dict[int, int] = {}

    def outstanding(self) -> dict[int, int]:
        """All that is not in the batch being trained."""
        both = {*self.open, *self.ready}
        return {v: self.open.get(v, 0) + self.ready.get(v, 0) for v in both}

    def next_step(self) -> int:
        return self.step + bool(self.batch)

    def admit(self) -> None:
        version = self.rng.randint(max(0, self.newest - self.staleness), self.newest)
        room = schedulable(
            self.outstanding(), version, self.next_step(), self.per_step, self.staleness
        )
        if room:
            add(self.open, version, self.rng.randint(1, room))

    def supplement(self) -> None:
        missing = self.per_step - sum(self.outstanding().values())
        if missing > 0:
            room = schedulable(
                self.outstanding(), self.newest, self.next_step(), self.per_step, self.staleness
            )
            add(self.open, self.newest, min(missing, room))

    def end(self) -> None:
        """A group is completed; one in five is filtered, or fails."""
        if self.open:
            version = self.rng.choice(sorted(self.open))
            add(self.open, version, -1)
            if self.rng.random() < 0.8:
                add(self.ready, version, 1)

    def take(self) -> None:
        idle = not self.batch and self.newest == self.step
        if not idle or sum(self.ready.values()) < self.per_step:
            return
        taken = take_earliest(self.ready, self.per_step)
        late = overdue(self.outstanding(), taken, self.step, self.per_step, self.staleness)
        if late is None:
            for version, count in taken.items():
                add(self.ready, version, -count)
                assert self.step - version <= self.staleness
            self.batch = taken

    def trained(self) -> None:
        if self.batch:
            self.batch = {}
            self.step += 1

    def publish(self) -> None:
        self.newest = self.step

    def check(self) -> None:
        outstanding = self.outstanding()
        assert all(v + self.staleness >= self.next_step() for v in outstanding)
        assert fits(outstanding, self.next_step(), self.per_step, self.staleness)


def add(counts: dict[int, int], version: int, change: int) -> None:
    counts[version] = counts.get(version, 0) + change
    if not counts[version]:
        del counts[version]


@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(0, 4))
def test_no_walk_leaves_a_group_behind_its_deadline_or_gets_stuck(
    seed: int, per_step: int, staleness: int
) -> None:
    walk = Walk(random.Random(seed), per_step, staleness)
    moves = [walk.admit, walk.end, walk.end, walk.end, walk.take, walk.trained, walk.publish]
    for _ in range(150):
        walk.rng.choice(moves)()
        walk.check()
    # No deadlock: once all that runs has ended, and missing groups have been supplemented,
    # the next batch can be taken.
    walk.trained()
    walk.publish()
    before = walk.step
    while not walk.batch:
        walk.supplement()
        while walk.open:
            walk.end()
        walk.take()
        walk.check()
    walk.trained()
    assert walk.step == before + 1
