"""An engine with one version slot: a new version takes the place of the old, whatever fails."""

import shutil
from pathlib import Path

import pytest

from dora_rl.core.protocol import commands as cm
from dora_rl.core.protocol import events as ev
from dora_rl.core.protocol.events import InstanceJoined, TrajectoryFinished, VersionInstalled
from dora_rl.core.protocol.settings import ParadigmName
from dora_rl.runtime.control import messages as ms
from tests.runtime.harness import assert_sound, records, run
from tests.runtime.instances import (
    SAID,
    Part,
    alone,
    answer,
    begin,
    digest,
    events,
    held,
    long_episode,
    prefix_of,
    store,
)

NEXT = cm.Install(0, 0, 1, evict=0)
CARRY = cm.Install(0, 0, 1, evict=0, carry=True)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return store(tmp_path / "versions", range(4))


def one_slot(root: Path, **more: int) -> Part:
    return Part(root, version_slots=1, **more)


def test_a_new_version_takes_the_place_of_the_old(root: Path) -> None:
    part = one_slot(root)
    part.tell(begin(1, 10))
    part.run()
    assert events(part.do(NEXT)) == [ev.VersionInstalled(0, 0, 1, digest(1))]
    assert set(part.engine.load().versions) == {1}
    assert events(part.do(NEXT)) == [ev.VersionInstalled(0, 0, 1, digest(1))]  # a duplicate
    part.tell(begin(2, 11, version=1))
    part.run()
    assert part.one(2) == alone(root, begin(2, 11, version=1))


def test_a_version_with_work_stays(root: Path) -> None:
    part = one_slot(root)
    part.tell(begin(1, 10))
    part.step(2)
    (said,) = events(part.do(NEXT))
    assert isinstance(said, ev.InstallFailed)
    part.run()
    assert part.one(1) == alone(root, begin(1, 10))


def test_what_is_parked_waits_for_its_version_to_come_back(root: Path) -> None:
    part = one_slot(root)
    part.tell(begin(1, 10))
    part.step(3)
    part.do(cm.Park(0, 0, ((1, 10),)), NEXT)  # type: ignore[arg-type]
    part.do(cm.Install(0, 0, 0, evict=1), cm.Unpark(0, 0, ((1, 10),)))  # type: ignore[arg-type]
    part.run()
    assert part.one(1) == alone(root, begin(1, 10))


def test_a_load_that_fails_is_told_and_tried_again(root: Path) -> None:
    """The old version is gone by then, and the instance knows."""
    part = one_slot(root)
    part.engine.fail_next_load()
    (said,) = events(part.do(NEXT))
    assert isinstance(said, ev.InstallFailed)
    assert not part.engine.load().versions
    (said,) = events(part.tell(begin(1, 10)))
    assert isinstance(said, ev.TrajectoryFailed), "a version that is not here serves nothing"
    assert events(part.do(NEXT)) == [ev.VersionInstalled(0, 0, 1, digest(1))]
    part.tell(begin(2, 11, version=1))
    part.run()
    assert part.one(2) == alone(root, begin(2, 11, version=1))


# The paradigms that carry running work over


def assert_carried(root: Path, part: Part, message: ms.Begin, cut: int) -> None:
    """The first tokens are of version 0, the others what version 1 gives after them."""
    whole = part.one(message.trajectory)
    assert [(s.version, s.digest, s.tokens) for s in whole.segments] == [
        (0, digest(0), cut),
        (1, digest(1), len(whole.tokens) - cut),
    ]
    prefix = prefix_of(whole, cut, fence=message.fence, segments=whole.segments[:1])
    name, fence = message.trajectory, message.fence
    quiet = alone(root, begin(name, fence, version=1, prefix=prefix))
    assert (whole.tokens, whole.logprobs) == (quiet.tokens, quiet.logprobs)


@pytest.mark.parametrize("failures", ["none", "evicted", "not there"])
def test_running_work_is_carried(root: Path, failures: str) -> None:
    part = one_slot(root, slots=2)
    part.tell(begin(1, 10), begin(2, 11), begin(3, 12))  # the third waits
    part.step(4)
    cut = 4
    if failures == "evicted":
        part.engine.fail_next_load()
        (said,) = events(part.do(CARRY))
        assert isinstance(said, ev.InstallFailed)
        assert not part.instance.busy, "nothing runs without weights"
    if failures == "not there":
        shutil.move(root / "1", root / "away")
        (said,) = events(part.do(CARRY))
        assert isinstance(said, ev.InstallFailed)
        shutil.move(root / "away", root / "1")
        part.step(1)  # under the version that is still here
        cut = 5
    assert events(part.do(CARRY)) == [ev.VersionInstalled(0, 0, 1, digest(1))]
    part.run()
    for name, fence in ((1, 10), (2, 11)):
        assert_carried(root, part, begin(name, fence), cut)
    assert [s.version for s in part.one(3).segments] == [1]


def test_a_start_between_two_attempts_waits_for_the_version(root: Path) -> None:
    part = one_slot(root)
    part.do(CARRY)
    part.tell(begin(1, 10, version=1))
    part.engine.fail_next_load()
    part.do(cm.Install(0, 0, 2, evict=1, carry=True))
    part.tell(begin(2, 11, version=0), begin(3, 12, version=1))
    assert not part.instance.busy
    part.do(cm.Cancel(3, 12, 0))
    part.do(cm.Install(0, 0, 2, evict=1, carry=True))
    part.run()
    assert [s.version for s in part.one(1).segments] == [2]
    assert [s.version for s in part.one(2).segments] == [2]
    assert (3, 12) not in part.finished


@pytest.mark.parametrize("failures", [1, 2])
def test_a_start_waits_for_the_version_also_if_nothing_was_displaced(
    root: Path, failures: int
) -> None:
    """The core may have placed it before it heard of the eviction."""
    part = one_slot(root)
    for _ in range(failures):
        part.engine.fail_next_load()
        part.do(CARRY)
    assert not part.engine.load().versions
    assert part.tell(begin(1, 10, version=0)) == []
    assert not part.instance.busy
    part.do(CARRY)
    part.run()
    assert [s.version for s in part.one(1).segments] == [1]


@pytest.mark.parametrize("failures", [0, 1])
def test_a_paused_episode_is_carried(root: Path, failures: int) -> None:
    """What the environment said while nothing was installed is not lost."""
    message = long_episode(root)
    part = one_slot(root, max_tokens=60)
    part.tell(message)
    ended = held(part)
    for _ in range(failures):
        part.engine.fail_next_load()
        part.do(CARRY)
        part.tell(answer(ended))
    part.do(CARRY)
    if not failures:
        part.tell(answer(ended))
    for _ in range(2):
        part.tell(answer(held(part)))
    whole = part.one(message.trajectory)
    assert whole.turns == 3 and whole.segments[0].version == 0
    assert {s.version for s in whole.segments[1:]} == {1}
    start = whole.observed[0].start
    assert whole.tokens[start : start + len(SAID)] == SAID


# Whole runs

ONE = {"slots": 4, "max_tokens": 40, "stop": ["a"], "version_slots": 1, "spare_version_slot": False}


@pytest.mark.parametrize("instances", [1, 3])
@pytest.mark.parametrize("paradigm", ["multi_version", "partial", "in_flight"])
def test_one_slot_trains(
    paradigm: ParadigmName, instances: int, model: Path, tmp_path: Path
) -> None:
    ended = run(
        model,
        tmp_path / "run",
        rollout=ONE,
        orchestration={
            "paradigm": paradigm,
            "groups_per_step": 2,
            "group_size": 3,
            "max_staleness": 2,
        },
        runtime={"kind": "inline", "instances": instances},
    )
    assert_sound(ended)
    found = [record.event for record in records(ended.directory)]
    assert {e.version_slots for e in found if isinstance(e, InstanceJoined)} == {1}
    assert len({e.version for e in found if isinstance(e, VersionInstalled)}) > 2
    finished = [e for e in found if isinstance(e, TrajectoryFinished)]
    mixed = [e for e in finished if len({segment.version for segment in e.segments}) > 1]
    assert bool(mixed) == (paradigm != "multi_version")
