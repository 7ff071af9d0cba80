"""What the ledger is told, event by event."""

from unittest.mock import Mock

from dora_rl.core.orchestrator import Orchestrator
from dora_rl.core.protocol.commands import Cancel, Fail, Train
from dora_rl.core.protocol.events import BatchTrained, GroupJudged, InstanceProgressed, TimerFired
from dora_rl.core.protocol.settings import Settings
from dora_rl.core.protocol.types import BatchGroup, Segment
from dora_rl.runtime.control import messages as ms
from dora_rl.runtime.control.trajectory_buffer import BufferedTrajectory
from dora_rl.runtime.records.ledger_writer import LedgerWriter, decode_prefix
from dora_rl.samples import RecordRef, TrajectoryRef
from dora_rl.store.ledger import Position

PROGRESS = InstanceProgressed(0, 0, 5)
NOWHERE = Position(0, 0, 0.0)


def test_a_report_is_committed_soon_if_it_led_to_something() -> None:
    writer = LedgerWriter(Orchestrator(Settings()), Mock())
    writer.observed(0.0, PROGRESS, [])
    assert not writer.dirty
    writer.observed(0.0, PROGRESS, [Cancel(3, 1, 0)])
    assert writer.dirty


def test_trained_trajectories_stay_until_a_checkpoint_has_them() -> None:
    """Also where a judgement of their group is heard again, late."""
    writer = LedgerWriter(Orchestrator(Settings(group_size=2)), Mock())
    late = GroupJudged(4, "all rewards equal")
    writer.observed(0.0, TimerFired(), [Train(0, (BatchGroup(4, 0, (8, 9)),))])
    writer.observed(0.0, BatchTrained(0), [])
    writer.observed(0.0, late, [])
    assert not writer.changes(NOWHERE).dropped_payloads
    writer.checkpointed(1, "step-1")
    assert writer.changes(NOWHERE).dropped_payloads == {8, 9}
    writer.observed(0.0, late, [])
    assert writer.changes(NOWHERE).dropped_payloads == {8, 9}


# What the sample transport has to keep


class Retained:
    """A sample store that counts."""

    def __init__(self) -> None:
        self.refs: list[RecordRef] = []

    def retain(self, ref: RecordRef) -> None:
        self.refs.append(ref)

    def release(self, ref: RecordRef) -> None:
        self.refs.remove(ref)


def record(number: int) -> RecordRef:
    return RecordRef(0, 0, 0, number, 1, 0)


def whole(name: int, reward: float | None = None) -> BufferedTrajectory:
    trajectory = TrajectoryRef(
        id=name,
        group=name // 2,
        version=0,
        num_prompt=1,
        num_tokens=5,
        num_sampled=5,
        segments=(Segment(0, "digest", 5),),
        truncated=False,
        content=record(100 + name),
    )
    return BufferedTrajectory(trajectory, None, reward)


def prefix(start: int, tokens: int, number: int, fence: int = 1) -> ms.Prefix:
    piece = ms.Piece(start, tokens, record(number))
    return ms.Prefix(trajectory=8, fence=fence, pieces=(piece,), segments=())


def test_the_record_of_a_trajectory_is_retained_as_long_as_its_payload() -> None:
    store = Retained()
    writer = LedgerWriter(Orchestrator(Settings(group_size=2)), store)  # type: ignore[arg-type]
    writer.kept(whole(8))
    writer.kept(whole(8, reward=1.0))  # not a second time
    writer.kept(whole(9))
    assert store.refs == [record(108), record(109)]
    writer.observed(0.0, TimerFired(), [Fail(9, "poison")])
    writer.observed(0.0, TimerFired(), [Train(0, (BatchGroup(4, 0, (8,)),))])
    writer.observed(0.0, BatchTrained(0), [])
    assert store.refs == [record(108)]
    writer.checkpointed(1, "step-1")
    assert store.refs == []


def test_pieces_of_a_prefix_are_retained_until_it_is_whole_or_begun_anew() -> None:
    store = Retained()
    writer = LedgerWriter(Orchestrator(Settings(group_size=2)), store)  # type: ignore[arg-type]
    first, second = prefix(0, 4, 1), prefix(4, 3, 2)
    writer.saved(first, first)
    writer.saved(second, second.after(first))
    assert store.refs == [record(1), record(2)]
    assert [row.start for row in writer.changes(NOWHERE).prefixes] == [0, 4]
    # Another placement continues from the fifth token on: the core knew of no more.
    third = prefix(5, 2, 3, fence=2)
    both = third.after(second.after(first))
    writer.saved(third, both)
    assert store.refs == [record(1), record(2), record(3)]
    changes = writer.changes(NOWHERE)
    assert changes.dropped_prefixes == {8}
    rows = [decode_prefix(row.content) for row in changes.prefixes]
    assert rows[2].after(rows[1].after(rows[0])) == both
    fourth = prefix(0, 1, 4, fence=3)  # from the start
    writer.saved(fourth, fourth.after(both))
    assert store.refs == [record(4)]
    writer.kept(whole(8))
    assert store.refs == [record(108)]


def test_nothing_stays_for_a_resume_that_never_comes() -> None:
    store = Retained()
    core = Orchestrator(Settings(group_size=2))
    writer = LedgerWriter(core, store, durable=False)  # type: ignore[arg-type]
    writer.kept(whole(8, reward=1.0))
    writer.observed(0.0, TimerFired(), [Train(0, (BatchGroup(4, 0, (8,)),))])
    writer.observed(0.0, BatchTrained(0), [])
    assert store.refs == []
    writer.observed(0.0, BatchTrained(0), [])  # a duplicate
