"""Every message means the same after a journey."""

from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_rl.core.history.codec import encode_event
from dora_rl.core.protocol import commands as cm
from dora_rl.core.protocol import events as ev
from dora_rl.core.protocol.types import BatchGroup, Length, Move, Placement, Segment
from dora_rl.machine.fast_paths import Trial
from dora_rl.runtime.control import messages as ms
from dora_rl.samples import RecordRef, SampleRef, TrajectoryRef

Ids = st.integers(0, 2**53)
Texts = st.text(max_size=12)
Tokens = st.lists(st.integers(0, 2**31 - 1), max_size=6).map(tuple)
Finite = st.floats(allow_nan=False, allow_infinity=False)


def some(values: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(values, max_size=3).map(tuple)


Segments = some(st.builds(Segment, Ids, Texts, Ids))
Placements = some(st.builds(Placement, Ids, Ids))
Moves = some(st.builds(Move, Ids, Ids, Ids))
Lengths = some(st.builds(Length, Ids, Ids, Ids))
Groups = some(st.builds(BatchGroup, Ids, Ids, some(Ids)))
Records = st.builds(RecordRef, Ids, Ids, Ids, Ids, Ids, st.integers(-(2**63), 2**63 - 1))
Prefixes = st.builds(
    ms.Prefix,
    trajectory=Ids,
    fence=Ids,
    pieces=some(st.builds(ms.Piece, Ids, Ids, Records)),
    segments=Segments,
)
Trajectories = st.builds(
    TrajectoryRef,
    id=Ids,
    group=Ids,
    version=Ids,
    num_prompt=Ids,
    num_tokens=Ids,
    num_sampled=Ids,
    segments=Segments,
    truncated=st.booleans(),
    content=Records,
)
Parts = st.dictionaries(Texts, Finite, max_size=3)
Samples = st.builds(SampleRef, trajectory=Trajectories, reward=Finite, parts=Parts)
Commands = st.one_of(
    st.builds(cm.Cancel, Ids, Ids, Ids),
    st.builds(cm.Install, Ids, Ids, Ids, st.none() | Ids, st.booleans()),
    st.builds(cm.Evict, Ids, Ids, Ids),
    st.builds(cm.Park, Ids, Ids, Placements),
    st.builds(cm.Unpark, Ids, Ids, Placements),
    st.builds(cm.Reserve, Ids, Ids, Ids, Ids, Moves),
    st.builds(cm.Release, Ids),
    st.builds(cm.AbortMigration, Ids),
    st.builds(cm.Suspend),
    st.builds(cm.Resume),
    st.builds(cm.Train, Ids, Groups),
)
Events = st.one_of(
    st.builds(ev.InstanceJoined, Ids, Ids, Ids, Ids, Ids),
    st.builds(ev.InstanceProgressed, Ids, Ids, Ids, Lengths, Lengths),
    st.builds(ev.VersionInstalled, Ids, Ids, Ids, Texts),
    st.builds(ev.InstallFailed, Ids, Ids, Ids, Texts),
    st.builds(ev.TrajectoryPaused, Ids, Ids, Ids),
    st.builds(ev.TrajectoryFailed, Ids, Ids, Texts),
    st.builds(ev.TrajectoryRefused, Ids, Ids, Texts),
    st.builds(ev.TrajectoriesParked, Ids, Ids, Placements),
    st.builds(ev.MigrationCompleted, Ids, Placements),
    st.builds(ev.MigrationFailed, Ids, Texts),
)
Failure = st.none() | Texts
Configs = st.dictionaries(Texts, st.dictionaries(Texts, Ids | Texts | Finite, max_size=2))

BUILDS: dict[type, st.SearchStrategy[Any]] = {
    ms.Setup: st.builds(
        ms.Setup,
        role=st.sampled_from(["rollout", "trainer"]),
        config=Configs,
        threads=Ids,
        instance=Ids,
        incarnation=Ids,
        checkpoint=st.none() | Ids,
        evaluation=st.booleans(),
    ),
    ms.Shutdown: st.builds(ms.Shutdown),
    ms.Perform: Commands.map(ms.Perform.of),
    ms.Begin: st.builds(ms.Begin, Ids, Ids, Ids, Ids, Tokens, st.booleans(), st.none() | Prefixes),
    ms.Continue: st.builds(ms.Continue, Ids, Ids, Ids, Tokens),
    ms.Conclude: st.builds(ms.Conclude, Ids, Ids),
    ms.HandOver: st.builds(ms.HandOver, Ids, Moves),
    ms.TakeOver: st.builds(ms.TakeOver, Ids),
    ms.SavePrefixes: st.builds(ms.SavePrefixes),
    ms.Reported: Events.map(ms.Reported.of),
    ms.Finished: st.builds(ms.Finished, Ids, Trajectories),
    ms.TurnEnded: st.builds(ms.TurnEnded, Ids, Ids, Ids, Tokens, Ids),
    ms.HandedOver: st.builds(ms.HandedOver, Ids, Placements, Failure),
    ms.Prefixes: st.builds(ms.Prefixes, some(Prefixes), Events.map(encode_event)),
    ms.Used: st.builds(ms.Used, Finite, Finite, Ids, Ids, Ids, Ids),
    ms.TrainOn: st.builds(ms.TrainOn, Ids, some(Ids), some(Samples)),
    ms.Redo: st.builds(ms.Redo, Ids, some(Ids), some(Samples)),
    ms.PublishVersion: st.builds(ms.PublishVersion, Ids),
    ms.Save: st.builds(ms.Save, Ids),
    ms.LendThreads: st.builds(ms.LendThreads, Ids),
    ms.TrainerReady: st.builds(ms.TrainerReady),
    ms.Progressed: st.builds(ms.Progressed),
    ms.Trained: st.builds(ms.Trained, Ids, Ids, Finite, Parts),
    ms.Rejected: st.builds(ms.Rejected, Ids, some(Ids), Texts, some(Ids)),
    ms.TrainingFailed: st.builds(ms.TrainingFailed, Ids, Texts),
    ms.Redone: st.builds(ms.Redone, Ids, Failure),
    ms.Published: st.builds(ms.Published, Ids, Texts, Finite),
    ms.NotPublished: st.builds(ms.NotPublished, Ids, Texts),
    ms.Saved: st.builds(ms.Saved, Ids, Failure),
    ms.Tried: st.builds(
        ms.Tried, st.dictionaries(Texts, st.builds(Trial, st.booleans(), Texts, st.integers(0, 99)))
    ),
    ms.ToldToGo: st.just(ms.ToldToGo()),
    ms.Broken: st.builds(ms.Broken, Texts, st.booleans()),
}


def test_no_message_is_forgotten() -> None:
    assert set(BUILDS) == set(get_args(ms.Message))


@given(st.one_of(*BUILDS.values()))
def test_a_message_arrives_as_it_was_sent(message: ms.Message) -> None:
    arrived = ms.decode(ms.encode(message))
    assert type(arrived) is type(message)
    assert ms.encode(arrived) == ms.encode(message)
    # What travels encoded has lists for tuples; the tests below decode it.
    assert arrived == message or isinstance(message, ms.Perform | ms.Reported | ms.Prefixes)


@given(Commands)
def test_a_command_travels_in_a_message(command: cm.Command) -> None:
    arrived = ms.decode(ms.encode(ms.Perform.of(command)))
    assert isinstance(arrived, ms.Perform)
    assert arrived.command == command


@given(Events)
def test_an_event_travels_in_a_message(event: ev.Event) -> None:
    arrived = ms.decode(ms.encode(ms.Reported.of(event)))
    assert isinstance(arrived, ms.Reported)
    assert arrived.event == event


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x04K\x01.",  # a pickle
        msgspec.msgpack.encode({"type": "Eval", "code": "1"}),
        msgspec.msgpack.encode({"type": "Conclude", "trajectory": "one", "fence": 1}),
        msgspec.msgpack.encode({"type": "Conclude", "trajectory": 1}),
        ms.encode(ms.Conclude(1, 2))[:-1],
    ],
)
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        ms.decode(data)
