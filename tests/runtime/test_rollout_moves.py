"""Trajectories that move between instances, or begin again from what was saved of them."""

import struct
from pathlib import Path

import pytest

from dora_rl.core.protocol import commands as cm
from dora_rl.core.protocol import events as ev
from dora_rl.core.protocol.types import Length, Move, Placement, Segment
from dora_rl.runtime.control import messages as ms
from dora_rl.transports.kv.shared_directory import KvDirectory
from tests.runtime.instances import (
    Journey,
    Part,
    alone,
    answer,
    begin,
    digest,
    events,
    held,
    long_episode,
    store,
    used,
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return store(tmp_path / "versions", range(4))


# Migration


def pair(root: Path, **options: int) -> tuple[Part, Part]:
    return Part(root, 0, **options), Part(root, 1, **options)


def journey(source: Part, target: Part, *moves: Move, name: int = 1) -> Journey:
    return Journey(name, source, target, moves or (Move(1, 10, 20),))


def test_a_trajectory_moves_and_is_the_same(root: Path) -> None:
    source, target = pair(root)
    source.tell(begin(1, 10), begin(2, 11))
    source.step(3)
    moving = journey(source, target, Move(1, 10, 20), Move(2, 11, 21))
    assert moving.reserve() == [ev.MigrationReserved(1)]
    source.step()  # it runs on meanwhile
    assert moving.hand_over() == ms.HandedOver(1, (Placement(1, 10), Placement(2, 11)))
    assert not source.instance.busy
    assert moving.take_over() == ev.MigrationCompleted(1, (Placement(1, 10), Placement(2, 11)))
    assert not moving.file.exists()
    moving.release()
    assert source.engine.load().versions[0].parked == 0
    target.run()
    assert set(target.finished) == {(1, 20), (2, 21)} and not source.finished
    for name in (1, 2):
        assert target.one(name) == alone(root, begin(name, 10))


def test_who_has_ended_at_the_source_does_not_move(root: Path) -> None:
    source, target = pair(root)
    source.tell(begin(1, 10), begin(2, 11))
    source.step(2)
    moving = journey(source, target, Move(1, 10, 20), Move(2, 11, 21))
    moving.reserve()
    source.do(cm.Cancel(2, 11, 0))
    assert moving.hand_over().moved == (Placement(1, 10),)
    assert moving.take_over() == ev.MigrationCompleted(1, (Placement(1, 10),))


@pytest.mark.parametrize("phase", ["reserve", "hand over", "take over", "some steps later"])
def test_an_abort_leaves_everything_where_it_was(root: Path, phase: str) -> None:
    source, target = pair(root)
    source.tell(begin(1, 10))
    source.step(3)
    moving = journey(source, target)
    moving.reserve()
    if phase != "reserve":
        moving.hand_over()
    if phase in ("take over", "some steps later"):
        moving.take_over()
    if phase == "some steps later":
        target.step(2)
    moving.abort()
    moving.abort()  # said again
    target.run()
    assert not target.finished
    assert not target.engine.load().versions[0].waiting
    source.run()
    assert source.one(1) == alone(root, begin(1, 10))
    # The room is free again: all slots of the target can be asked for.
    moves = tuple(Move(name, name, 50 + name) for name in range(30, 34))
    assert journey(source, target, *moves, name=2).reserve() == [ev.MigrationReserved(2)]


@pytest.mark.parametrize("there", [True, False], ids=["file", "no file"])
def test_what_is_taken_over_twice_is_undone_whole(root: Path, there: bool) -> None:
    source, target = pair(root)
    source.tell(begin(1, 10))
    source.step(3)
    moving = journey(source, target)
    moving.reserve()
    moving.hand_over()
    content = moving.file.read_bytes()
    moving.take_over()
    if there:
        moving.file.write_bytes(content)
    assert target.tell(ms.TakeOver(1)) == []
    target.step()
    moving.abort()
    assert target.engine.idle
    source.run()
    assert source.one(1) == alone(root, begin(1, 10))
    moves = tuple(Move(name, name, 50 + name) for name in range(30, 34))
    assert journey(source, target, *moves, name=2).reserve() == [ev.MigrationReserved(2)]


def test_a_target_without_room_or_version_refuses(root: Path) -> None:
    source, target = pair(root, slots=2)
    target.tell(begin(5, 30))
    moving = journey(source, target, Move(1, 10, 20), Move(2, 11, 21))
    assert moving.reserve() == [ev.MigrationFailed(1, "no_room")]
    moving = journey(source, target, name=2)
    assert moving.reserve() == [ev.MigrationReserved(2)]
    again = journey(source, target, Move(3, 12, 22), name=3)
    assert again.reserve() == [ev.MigrationFailed(3, "no_room")]  # reserved is taken
    strange = Journey(4, source, target, (Move(1, 10, 20),), version=3)
    (said,) = strange.reserve()
    assert isinstance(said, ev.MigrationFailed) and "version 3" in said.reason


def test_what_cannot_be_put_into_the_transport_stays_at_the_source(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no space left")

    source, target = pair(root)
    source.tell(begin(1, 10))
    source.step(3)
    moving = journey(source, target)
    moving.reserve()
    with monkeypatch.context() as patch:
        patch.setattr(KvDirectory, "put", fail)
        said = moving.hand_over()
    assert said.failure == "no space left"
    source.run()
    assert source.one(1) == alone(root, begin(1, 10))


@pytest.mark.parametrize("damage", ["missing", "cut", "altered", "not a parcel"])
def test_a_damaged_file_changes_nothing_at_the_target(root: Path, damage: str) -> None:
    source, target = pair(root)
    source.tell(begin(1, 10), begin(2, 11))
    source.step(3)
    moving = journey(source, target, Move(1, 10, 20), Move(2, 11, 21))
    moving.reserve()
    moving.hand_over()
    whole = moving.file.read_bytes()
    match damage:
        case "missing":
            moving.file.unlink()
        case "cut":
            moving.file.write_bytes(whole[:-20])
        case "altered":  # the KV of the second is not that of its tokens
            moving.file.write_bytes(whole[:-2] + bytes([whole[-2] ^ 255, whole[-1]]))
        case "not a parcel":
            moving.file.write_bytes(b"\x80\x04K\x01.")
    said = moving.take_over()
    assert isinstance(said, ev.MigrationFailed), said
    assert "\n" not in said.reason
    assert target.engine.idle
    moving.abort()
    source.run()
    for name in (1, 2):
        assert source.one(name) == alone(root, begin(name, 10))


@pytest.mark.parametrize("kv_export", [True, False])
@pytest.mark.parametrize("what", ["token", "logprob", "digest"])
def test_a_byte_that_was_altered_is_noticed(root: Path, what: str, kv_export: bool) -> None:
    """Also in what no engine reads: a log-probability is trained on as it is."""
    source, target = (Part(root, number, kv_export=kv_export) for number in (0, 1))
    source.tell(begin(1, 10))
    source.step(3)
    moving = journey(source, target)
    moving.reserve()
    moving.hand_over()
    whole, quiet = moving.file.read_bytes(), alone(root, begin(1, 10))
    sought = {
        "token": bytes(quiet.tokens[:3]),  # each below 128: a byte of msgpack
        "logprob": struct.pack(">d", quiet.logprobs[1]),
        "digest": digest(0).encode(),
    }[what]
    last = whole.index(sought) + len(sought) - 1
    moving.file.write_bytes(whole[:last] + bytes([whole[last] ^ 1]) + whole[last + 1 :])
    said = moving.take_over()
    assert isinstance(said, ev.MigrationFailed) and "checksum" in said.reason
    assert target.engine.idle
    moving.abort()
    source.run()
    assert source.one(1) == quiet


@pytest.mark.parametrize("phase", ["handed over", "taken over", "taken over, unheard"])
def test_what_is_asked_for_twice_is_handed_over_once(root: Path, phase: str) -> None:
    source, target = pair(root)
    source.tell(begin(1, 10), begin(2, 11))
    source.step(3)
    moving = journey(source, target, Move(1, 10, 20), Move(2, 11, 21))
    moving.reserve()
    said = moving.hand_over()
    assert len(said.moved) == 2
    if phase == "handed over":
        assert moving.hand_over() == said
    moving.take_over()
    if phase != "handed over":
        assert moving.hand_over() == said
    owner, other = target, source
    if phase == "taken over, unheard":
        owner, other = source, target
        moving.abort()
    else:
        moving.release()
    owner.run()
    assert not other.instance.busy and not other.finished
    for name in (1, 2):
        assert owner.one(name) == alone(root, begin(name, 10))
    assert not moving.file.exists()
    assert not source.engine.load().versions[0].parked


@pytest.mark.parametrize("end", ["released", "aborted", "aborted before"])
def test_a_migration_that_has_ended_takes_nothing_more(root: Path, end: str) -> None:
    """Nobody would release it, and it would stand still for ever."""
    source, target = pair(root)
    source.tell(begin(1, 10))
    source.step(3)
    moving = journey(source, target)
    moving.reserve()
    if end != "aborted before":
        moving.hand_over()
        content = moving.file.read_bytes()
        moving.take_over()
    if end == "released":
        moving.release()
        source.tell(begin(1, 10))
    else:
        moving.abort()
    said = moving.hand_over()
    assert said.failure == "migration 1 has ended here" and not said.moved
    assert not moving.file.exists()
    source.run()
    assert source.one(1) == alone(root, begin(1, 10))
    if end == "aborted":
        moving.file.write_bytes(content)
        assert moving.take_over() == ev.MigrationFailed(1, "migration 1 has ended here")
        assert target.engine.idle and not moving.file.exists()


def test_a_cancel_reaches_both_copies(root: Path) -> None:
    source, target = pair(root)
    source.tell(begin(1, 10))
    source.step(3)
    moving = journey(source, target)
    moving.reserve()
    moving.hand_over()
    moving.take_over()
    source.do(cm.Cancel(1, 10, 0))
    moving.release()
    target.do(cm.Cancel(1, 20, 1))
    for part in (source, target):
        part.run()
        assert not part.finished


def test_what_is_parked_moves_too(root: Path) -> None:
    source, target = pair(root)
    source.tell(begin(1, 10))
    source.step(3)
    source.do(cm.Park(0, 0, (Placement(1, 10),)))
    moving = journey(source, target)
    moving.reserve()
    moving.hand_over()
    moving.abort()
    source.do(cm.Unpark(0, 0, (Placement(1, 10),)))
    source.step()
    source.do(cm.Park(0, 0, (Placement(1, 10),)))
    moving = journey(source, target, name=2)
    moving.reserve()
    moving.hand_over()
    moving.take_over()
    moving.release()
    target.run()
    assert target.one(1) == alone(root, begin(1, 10))


def test_a_paused_episode_goes_on_elsewhere(root: Path) -> None:
    message = long_episode(root)
    name = message.trajectory
    source, target = (Part(root, number, max_tokens=60) for number in (0, 1))
    source.tell(message)
    said = held(source)
    moving = journey(source, target, Move(name, 10, 20))
    moving.reserve()
    moving.hand_over()
    assert source.tell(answer(said)) == []  # it is on its way
    moving.take_over()
    moving.release()
    assert not target.instance.busy  # it waits there as it did here
    while not target.finished:
        target.tell(answer(said, fence=20))
        if not target.finished:
            said = held(target)
    assert target.finished[name, 20] == alone(root, message, 60)


# Prefixes


@pytest.mark.parametrize("after", range(1, 9))
def test_a_restart_from_a_prefix_is_the_same_trajectory(root: Path, after: int) -> None:
    name = next(n for n in range(100) if len(alone(root, begin(n, 10)).tokens) > after)
    part = Part(root)
    part.tell(begin(name, 10))
    part.step(after)
    (prefixes,) = part.tell(ms.SavePrefixes())
    assert isinstance(prefixes, ms.Prefixes)
    saved = (Length(name, 10, after),)
    event = prefixes.event
    assert isinstance(event, ev.InstanceProgressed)
    assert event.saved == event.lengths == saved
    (prefix,) = prefixes.prefixes
    assert prefix.segments == (Segment(0, digest(0), after),)
    other = Part(root, 1)
    other.tell(begin(name, 11, prefix=prefix))
    other.run()
    assert other.one(name) == alone(root, begin(name, 10))


def test_other_weights_do_not_go_on_with_a_prefix(root: Path, tmp_path: Path) -> None:
    """Under the same version: the tokens would be of two policies, and nobody would know."""
    others = store(tmp_path / "others", [9])
    (others / "9").rename(others / "0")
    part, other = Part(root), Part(others, 1)
    part.tell(begin(1, 10))
    part.step(3)
    (prefixes,) = part.tell(ms.SavePrefixes())
    assert isinstance(prefixes, ms.Prefixes)
    (prefix,) = prefixes.prefixes
    (said,) = events(other.tell(begin(1, 11, prefix=prefix)))
    assert isinstance(said, ev.TrajectoryFailed) and "digest-9" in said.reason
    assert not other.instance.busy
    assert other.tell(begin(1, 12)) == []  # from the start, on what is here
    other.run()
    assert [s.digest for s in other.one(1).segments] == ["digest-9"]


def test_what_is_read_again_is_counted(root: Path) -> None:
    part = Part(root)
    part.tell(begin(1, 10))
    part.step(3)
    assert used(part).reread_tokens == 0
    (prefixes,) = part.tell(ms.SavePrefixes())
    assert isinstance(prefixes, ms.Prefixes)
    other = Part(root, 1)
    other.tell(begin(1, 11, prefix=prefixes.prefixes[0]))
    assert used(other).reread_tokens == 3 + 3  # its prompt and what it had written


@pytest.mark.parametrize("pieces", [(1, 1, 1), (2, 3), (1, 4, 2)])
def test_prefixes_come_in_pieces(root: Path, pieces: tuple[int, ...]) -> None:
    total = sum(pieces)
    name = next(n for n in range(100) if len(alone(root, begin(n, 10)).tokens) > total)
    part = Part(root)
    part.tell(begin(name, 10))
    whole: ms.Prefix | None = None
    for piece in pieces:
        part.step(piece)
        (prefixes,) = part.tell(ms.SavePrefixes())
        assert isinstance(prefixes, ms.Prefixes)
        (prefix,) = prefixes.prefixes
        assert [found.num_tokens for found in prefix.pieces] == [piece]
        whole = prefix if whole is None else prefix.after(whole)
    assert whole is not None
    (nothing,) = part.tell(ms.SavePrefixes())
    assert isinstance(nothing, ms.Prefixes) and nothing.prefixes == ()
    for kept in (total, pieces[0]):  # what the core knows of may be less than the driver has
        other = Part(root, 1)
        other.tell(begin(name, 11, prefix=whole.cut(kept)))
        other.run()
        assert other.one(name) == alone(root, begin(name, 10))


def test_only_what_can_be_gone_on_with_is_saved(root: Path) -> None:
    source, target = pair(root)
    source.tell(begin(1, 10), begin(2, 11), begin(3, 12, episode=True), begin(4, 13))
    source.step(2)
    source.tell(begin(5, 14))  # has written nothing
    source.do(cm.Park(0, 0, (Placement(2, 11),)))
    moving = journey(source, target, Move(4, 13, 23))
    moving.reserve()
    moving.hand_over()
    *_, prefixes = source.tell(ms.SavePrefixes())
    assert isinstance(prefixes, ms.Prefixes)
    assert [prefix.trajectory for prefix in prefixes.prefixes] == [1, 2]
