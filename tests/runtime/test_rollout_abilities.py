"""Instances of engines that cannot hand KV over: what was generated moves, and is read anew."""

from pathlib import Path
from typing import Any

import pytest

from dora_rl.core.protocol import commands as cm
from dora_rl.core.protocol import events as ev
from dora_rl.core.protocol.types import Move, Placement
from dora_rl.runtime.control import messages as ms
from tests.runtime.instances import (
    TURNS,
    Journey,
    Part,
    alone,
    answer,
    begin,
    events,
    held,
    long_episode,
    store,
    used,
)

ABLE: dict[str, Any] = {"kv_export": True}
UNABLE: dict[str, Any] = {"kv_export": False}
PAIRS = [(UNABLE, UNABLE), (ABLE, UNABLE), (UNABLE, ABLE), (ABLE, {"kernels": "others"})]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return store(tmp_path / "versions", range(4))


def moved(journey: Journey) -> None:
    assert isinstance(journey.reserve()[0], ev.MigrationReserved)
    assert journey.hand_over().failure is None
    assert isinstance(journey.take_over(), ev.MigrationCompleted)
    journey.release()


@pytest.mark.parametrize(("there", "here"), PAIRS)
@pytest.mark.parametrize("steps", [0, 1, 4])
def test_a_move_reads_anew_on_the_same_version(
    root: Path, there: dict[str, Any], here: dict[str, Any], steps: int
) -> None:
    source, target = Part(root, **there), Part(root, 1, **here)
    source.tell(begin(1, 10))
    source.step(steps)
    moved(Journey(7, source, target, (Move(1, 10, 20),)))
    assert not source.instance.busy
    target.run()
    assert target.one(1) == alone(root, begin(1, 10))
    assert used(target).reread_tokens == 3 + steps


@pytest.mark.parametrize(("there", "here"), PAIRS)
def test_a_paused_episode_moves_with_its_turn(
    root: Path, there: dict[str, Any], here: dict[str, Any]
) -> None:
    message = long_episode(root)
    source, target = Part(root, max_tokens=60, **there), Part(root, 1, max_tokens=60, **here)
    source.tell(message)
    ended = held(source)
    moved(Journey(7, source, target, (Move(message.trajectory, message.fence, 20),)))
    target.tell(answer(ended, 20))
    for _ in range(TURNS - 1):
        target.tell(answer(held(target)))
    assert target.one(message.trajectory) == alone(root, message, 60)


def test_other_weights_do_not_read_it_anew(root: Path, tmp_path: Path) -> None:
    others = store(tmp_path / "others", [9])
    (others / "9").rename(others / "0")
    source, target = Part(root, **UNABLE), Part(others, 1, exchange=root, **UNABLE)
    source.tell(begin(1, 10))
    source.step(3)
    journey = Journey(7, source, target, (Move(1, 10, 20),))
    journey.reserve()
    journey.hand_over()
    said = journey.take_over()
    assert isinstance(said, ev.MigrationFailed) and "digest-9" in said.reason
    assert not target.instance.busy
    journey.abort()
    source.run()
    assert source.one(1) == alone(root, begin(1, 10))


@pytest.mark.parametrize("ability", [ABLE, UNABLE])
@pytest.mark.parametrize("parked", [False, True])
def test_an_abort_leaves_it_where_it_was(root: Path, ability: dict[str, Any], parked: bool) -> None:
    source, target = Part(root, **ability), Part(root, 1, **ability)
    source.tell(begin(1, 10))
    source.step(3)
    place = (Placement(1, 10),)
    if parked:
        source.do(cm.Park(0, 0, place))
    journey = Journey(7, source, target, (Move(1, 10, 20),))
    journey.reserve()
    journey.hand_over()
    journey.abort()
    assert source.instance.busy is not parked
    source.do(cm.Unpark(0, 0, place))
    source.run()
    assert source.one(1) == alone(root, begin(1, 10))


def test_a_failed_export_leaves_all_where_they_were(root: Path) -> None:
    source, target = Part(root), Part(root, 1)
    source.tell(begin(1, 10), begin(2, 11), begin(3, 12))
    source.step(3)
    source.engine.fail_exports(2)
    journey = Journey(7, source, target, (Move(1, 10, 20), Move(2, 11, 21), Move(3, 12, 22)))
    journey.reserve()
    said = journey.hand_over()
    assert said.failure is not None and "not to export" in said.failure
    assert not journey.file.exists()
    target.do(cm.AbortMigration(7))
    source.run()  # at once: nobody has to tell it
    for name, fence in ((1, 10), (2, 11), (3, 12)):
        assert source.one(name) == alone(root, begin(name, fence))


def test_what_cannot_be_parked_goes_on(root: Path) -> None:
    part = Part(root)
    part.tell(begin(1, 10), begin(2, 11))
    part.step(2)
    part.engine.fail_exports(1)
    (said,) = events(part.do(cm.Park(0, 0, (Placement(1, 10), Placement(2, 11)))))
    assert said == ev.TrajectoriesParked(0, 0, (Placement(2, 11),))
    part.run()
    assert part.one(1) == alone(root, begin(1, 10))


def test_parking_without_kv_reads_anew(root: Path) -> None:
    """Also on an engine with one version slot, whose version left and came back."""
    part = Part(root, version_slots=1, **UNABLE)
    part.tell(begin(1, 10))
    part.step(3)
    place = (Placement(1, 10),)
    part.do(cm.Park(0, 0, place), cm.Install(0, 0, 1, evict=0))
    part.do(cm.Install(0, 0, 0, evict=1), cm.Unpark(0, 0, place))
    assert not [e for e in part.events if isinstance(e, ev.InstallFailed)]
    part.run()
    assert part.one(1) == alone(root, begin(1, 10))
    assert used(part).reread_tokens == 3 + 3
    assert isinstance(part.said[-1], ms.Used)
