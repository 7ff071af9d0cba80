"""One rollout instance: what it is asked, in any order, and what it says."""

import errno
import shutil
from pathlib import Path

import pytest
from msgspec.structs import replace

from dora_rl.core.protocol import commands as cm
from dora_rl.core.protocol import events as ev
from dora_rl.core.protocol.types import Length, Placement, Segment
from dora_rl.runtime.control import messages as ms
from dora_rl.samples import RecordRef
from tests.runtime.instances import (
    RECORDS,
    SAID,
    TOKENS,
    TURNS,
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
    used,
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return store(tmp_path / "versions", range(4))


def test_a_heartbeat_without_news_repeats_what_was_told_last(root: Path) -> None:
    """Also by a report of prefixes: else it would be news to the core each time."""
    part = Part(root)
    part.tell(begin(1, 1))
    part.step(3)
    for tell in (part.instance.report, part.instance.save_prefixes):
        part.step()
        tell()
        told = [m.event for m in part.collect() if isinstance(m, ms.Reported | ms.Prefixes)]
        (progress,) = [event for event in told if isinstance(event, ev.InstanceProgressed)]
        assert progress.kv_tokens > 0
        alive = ms.decode(ms.encode(part.instance.still_alive()))
        assert isinstance(alive, ms.Reported)
        assert alive.event == ev.InstanceProgressed(0, 0, progress.kv_tokens)


# Versions


@pytest.mark.parametrize("version_slots", [1, 3])
def test_it_joins_with_what_its_engine_has(root: Path, version_slots: int) -> None:
    """How many of them are served is the core's setting: see `make_engine`."""
    part = Part(root, versions=(), version_slots=version_slots)
    part.instance.join()
    part.collect()
    assert part.events == [ev.InstanceJoined(0, 0, 4, 2048, version_slots)]


def test_an_install_is_told_with_the_digest_of_what_is_there(root: Path) -> None:
    part = Part(root, versions=(2,))
    assert part.events == [ev.VersionInstalled(0, 0, 2, digest(2))]
    assert events(part.do(cm.Install(0, 0, 2))) == part.events[:1]  # said again, done once


def test_a_new_version_replaces_the_old(root: Path) -> None:
    part = Part(root)
    part.do(cm.Install(0, 0, 1, evict=0))
    assert set(part.engine.load().versions) == {1}
    assert events(part.do(cm.Evict(0, 0, 1))) == [ev.VersionEvicted(0, 0, 1)]
    assert events(part.do(cm.Evict(0, 0, 1))) == [ev.VersionEvicted(0, 0, 1)]
    assert not part.engine.load().versions


def test_what_weights_took_is_reported_and_a_version_that_went_is_released(root: Path) -> None:
    part = Part(root)
    part.do(cm.Install(0, 0, 1, evict=0))
    part.do(cm.Evict(0, 0, 1))
    part.instance.report()
    (used,) = [said for said in part.collect() if isinstance(said, ms.Used)]
    assert (used.weights_sent_bytes, used.weights_whole_bytes) == (20, 200)
    assert part.weights.released == [0, 1]


@pytest.mark.parametrize("evict", [None, 0])
@pytest.mark.parametrize("carry", [False, True])
def test_a_failed_install_changes_nothing(root: Path, evict: int | None, carry: bool) -> None:
    part = Part(root)
    part.tell(begin(1, 10))
    part.step(3)
    shutil.rmtree(root / "1")
    (said,) = events(part.do(cm.Install(0, 0, 1, evict, carry)))
    assert isinstance(said, ev.InstallFailed)
    assert (said.instance, said.incarnation, said.version) == (0, 0, 1)
    assert str(root / "1") in said.reason and "\n" not in said.reason
    part.run()
    assert part.one(1) == alone(root, begin(1, 10))


def test_a_version_with_work_is_not_evicted_by_mistake(root: Path) -> None:
    """The core never asks for it; if it did, the answer says so and the work goes on."""
    part = Part(root)
    part.tell(begin(1, 10))
    (said,) = events(part.do(cm.Install(0, 0, 1, evict=0)))
    assert isinstance(said, ev.InstallFailed)
    part.run()
    assert part.one(1) == alone(root, begin(1, 10))


# Trajectories


def test_a_trajectory_is_told_whole(root: Path) -> None:
    part = Part(root, versions=(0, 3))
    part.tell(begin(4, 10, version=3))
    part.run()
    whole = part.finished[4, 10]
    assert (whole.id, whole.group, whole.version) == (4, 2, 3)
    assert whole.prompt == begin(4, 10).prompt
    assert 0 < len(whole.tokens) == len(whole.logprobs) <= TOKENS
    assert all(logprob < 0 for logprob in whole.logprobs)
    assert whole.segments == (Segment(3, digest(3), len(whole.tokens)),)
    assert whole.truncated == (whole.tokens[-1] != part.engine.eos)
    assert (whole.observed, whole.turns) == ((), 1)
    assert not part.engine.load().versions[3].running


def test_batch_mates_do_not_change_a_trajectory(root: Path) -> None:
    part = Part(root, slots=2)
    part.tell(*(begin(name, 10 + name) for name in range(5)))
    part.run()
    assert {key[0] for key in part.finished} == set(range(5))
    for name in range(5):
        assert part.one(name) == alone(root, begin(name, 10 + name))


def test_begin_is_safe_to_repeat(root: Path) -> None:
    part = Part(root)
    part.tell(begin(1, 10))
    part.step(2)
    assert part.tell(begin(1, 10), begin(1, 9)) == []  # again, and of a superseded placement
    part.run()
    assert list(part.finished) == [(1, 10)]
    assert part.one(1) == alone(root, begin(1, 10))
    assert used(part).tokens == len(part.one(1).tokens)  # none of them twice


def test_a_newer_placement_takes_the_place_of_an_older(root: Path) -> None:
    part = Part(root)
    part.tell(begin(1, 10))
    part.step(2)
    part.tell(begin(1, 11))
    part.run()
    assert list(part.finished) == [(1, 11)]
    assert part.one(1) == alone(root, begin(1, 11))


def test_only_the_placement_that_is_named_is_cancelled(root: Path) -> None:
    part = Part(root)
    part.tell(begin(1, 10), begin(2, 11))
    part.step()
    part.do(cm.Cancel(1, 9, 0), cm.Cancel(3, 12, 0), cm.Cancel(2, 11, 0))
    part.run()
    assert list(part.finished) == [(1, 10)]
    assert part.do(cm.Cancel(1, 10, 0)) == []  # it has ended


def test_a_request_that_can_never_be_served_is_refused(root: Path) -> None:
    """The prompt is longer than the context: the core must not try it again."""
    part = Part(root)
    (said,) = events(part.tell(replace(begin(2, 11), prompt=(1,) * 10_000)))
    assert isinstance(said, ev.TrajectoryRefused)
    assert (said.trajectory, said.fence) == (2, 11)


def test_a_request_for_a_version_that_is_not_here_fails_alone(root: Path) -> None:
    part = Part(root)
    part.tell(begin(1, 10))
    (said,) = events(part.tell(begin(2, 11, version=1)))
    assert isinstance(said, ev.TrajectoryFailed)
    assert (said.trajectory, said.fence) == (2, 11)
    assert "`1`" in said.reason
    part.run()
    assert list(part.finished) == [(1, 10)]


def test_a_failure_of_the_engine_is_one_trajectorys(root: Path) -> None:
    part = Part(root)
    part.tell(begin(1, 10), begin(2, 11))
    part.step()
    part.engine.fail_next(1)
    part.run()
    failed = [event for event in part.events if isinstance(event, ev.TrajectoryFailed)]
    assert [(event.trajectory, event.fence) for event in failed] == [(1, 10)]
    assert list(part.finished) == [(2, 11)]


def test_work_that_is_suspended_stands_still(root: Path) -> None:
    part = Part(root)
    part.tell(begin(1, 10))
    part.step()
    part.do(cm.Suspend())
    assert not part.instance.busy
    part.do(cm.Resume())
    part.run()
    assert part.one(1) == alone(root, begin(1, 10))


# Carrying


def test_carried_work_goes_on_under_the_new_version(root: Path) -> None:
    part = Part(root)
    part.tell(begin(1, 10))
    part.step(4)
    part.do(cm.Install(0, 0, 1, evict=0, carry=True))
    part.run()
    whole = part.one(1)
    assert whole.segments == (
        Segment(0, digest(0), 4),
        Segment(1, digest(1), len(whole.tokens) - 4),
    )
    assert whole.version == 1
    assert whole.tokens[:4] == alone(root, begin(1, 10)).tokens[:4]
    part.instance.report()
    (used,) = [message for message in part.collect() if isinstance(message, ms.Used)]
    assert used.reread_tokens == 3 + 4  # its prompt and what it had written


def test_a_start_that_crosses_a_carry_is_of_the_successor(root: Path) -> None:
    part = Part(root)
    part.do(cm.Install(0, 0, 1, evict=0, carry=True), cm.Install(0, 0, 2, evict=1, carry=True))
    part.tell(begin(1, 10, version=0))
    part.run()
    assert [s.version for s in part.one(1).segments] == [2]


# Parking


def test_what_is_parked_goes_on_where_it_was(root: Path) -> None:
    part = Part(root)
    part.tell(begin(1, 10), begin(2, 11))
    part.step(3)
    park = cm.Park(0, 0, (Placement(1, 10), Placement(2, 9), Placement(5, 1)))
    parked = ev.TrajectoriesParked(0, 0, (Placement(1, 10),))
    assert events(part.do(park)) == [parked]
    assert events(part.do(park)) == [parked]  # said again, done once
    part.run()
    assert list(part.finished) == [(2, 11)]
    unpark = cm.Unpark(0, 0, (Placement(1, 10), Placement(2, 11)))
    part.do(unpark, unpark)
    part.run()
    assert part.one(1) == alone(root, begin(1, 10))


def test_what_is_parked_can_wait_for_its_version(root: Path) -> None:
    """The version may go and come back in between."""
    part = Part(root)
    part.tell(begin(1, 10))
    part.step(3)
    part.do(cm.Park(0, 0, (Placement(1, 10),)))
    part.do(cm.Install(0, 0, 1, evict=0), cm.Install(0, 0, 0, evict=1))
    part.do(cm.Unpark(0, 0, (Placement(1, 10),)))
    part.run()
    assert part.one(1) == alone(root, begin(1, 10))


def test_what_cannot_come_back_fails(root: Path) -> None:
    part = Part(root)
    part.tell(begin(1, 10))
    part.step(3)
    part.do(cm.Park(0, 0, (Placement(1, 10),)), cm.Install(0, 0, 1, evict=0))
    (said,) = events(part.do(cm.Unpark(0, 0, (Placement(1, 10),))))
    assert isinstance(said, ev.TrajectoryFailed)
    assert not part.instance.busy


# Episodes


def test_an_episode_is_one_trajectory(root: Path) -> None:
    message = long_episode(root)
    part = Part(root, max_tokens=60)
    part.tell(message)
    said = held(part)
    name = message.trajectory
    assert part.events[-1] == ev.TrajectoryPaused(name, 10, 1)
    assert (said.trajectory, said.fence, said.turn) == (name, 10, 0)
    assert said.room == 60 - len(said.tokens)
    assert not part.instance.busy
    assert events(part.tell(ms.Continue(name, 10, 0, SAID))) == [ev.TrajectoryResumed(name, 10, 1)]
    assert part.tell(ms.Continue(name, 10, 0, SAID)) == []  # said again
    second = held(part)
    assert second.turn == 1
    assert second.room == 60 - len(said.tokens) - len(SAID) - len(second.tokens)
    part.tell(answer(second))
    part.tell(ms.Conclude(name, held(part).fence))
    whole = part.one(name)
    assert whole == alone(root, message, 60)
    assert whole.turns == TURNS
    for start, end in whole.observed:
        assert whole.tokens[start:end] == SAID
        assert whole.logprobs[start:end] == (0.0,) * len(SAID)
    assert whole.segments == (Segment(0, digest(0), whole.num_sampled),)
    assert whole.tokens[: whole.observed[0].start] == said.tokens
    assert whole.tokens[whole.observed[0].end : whole.observed[1].start] == second.tokens


def test_an_answer_to_another_placement_or_turn_is_not_taken(root: Path) -> None:
    message = long_episode(root)
    part = Part(root, max_tokens=60)
    part.tell(message)
    name, said = message.trajectory, held(part)
    wrong = (
        ms.Continue(name, 9, 0, SAID),
        ms.Continue(name, 10, 1, SAID),
        ms.Conclude(name, 11),
        ms.Conclude(name + 1, 10),
    )
    assert part.tell(*wrong) == []
    part.tell(answer(said))
    assert part.tell(ms.Conclude(name, 10)) == []  # it runs: its turn has not ended


def test_an_episode_without_room_can_only_be_concluded(root: Path) -> None:
    part = Part(root, max_tokens=3)
    message = begin(1, 10, episode=True)
    part.tell(message)
    said = held(part)
    assert said.room == (0 if len(said.tokens) == 3 else 3 - len(said.tokens))
    part.tell(ms.Conclude(1, 10))
    assert part.one(1).truncated == (len(said.tokens) == 3 and said.tokens[-1] != 0)


@pytest.mark.parametrize("context", [30, 256])
def test_room_is_what_an_answer_may_take_and_one_token_more(root: Path, context: int) -> None:
    """Of max_tokens or of the context, whichever ends first: an answer within it is not refused."""
    message = long_episode(root)
    said = []
    for most in (-1, 0):
        part = Part(root, max_tokens=60, context=context)
        part.tell(message)
        turn = held(part)
        assert turn.room == min(60, context - len(message.prompt)) - len(turn.tokens)
        tokens = (5,) * (turn.room + most)
        said += events(part.tell(ms.Continue(message.trajectory, 10, 0, tokens)))
    assert [type(event) for event in said] == [ev.TrajectoryResumed, ev.TrajectoryFailed]


@pytest.mark.parametrize("truncated", [False, True])
def test_a_concluded_episode_is_as_truncated_as_it_is_told(root: Path, truncated: bool) -> None:
    message = long_episode(root)
    part = Part(root, max_tokens=60)
    part.tell(message)
    held(part)  # the policy ended this turn
    part.tell(ms.Conclude(message.trajectory, 10, truncated=truncated))
    assert part.one(message.trajectory).truncated is truncated


def test_an_answer_that_does_not_fit_fails_the_trajectory(root: Path) -> None:
    message = long_episode(root)
    part = Part(root, max_tokens=60)
    part.tell(message)
    held(part)
    (said,) = events(part.tell(ms.Continue(message.trajectory, 10, 0, (1,) * 60)))
    assert isinstance(said, ev.TrajectoryFailed)
    assert part.tell(ms.Conclude(message.trajectory, 10)) == []


@pytest.mark.parametrize("paused", [False, True])
def test_an_episode_is_parked_in_any_moment(root: Path, paused: bool) -> None:
    message = long_episode(root)
    name = message.trajectory
    part = Part(root, max_tokens=60)
    part.tell(message)
    if paused:
        first = held(part)
    else:
        part.step(2)
    part.do(cm.Park(0, 0, (Placement(name, 10),)))
    if paused:
        assert part.tell(answer(first)) == []  # out of reach; it is said again
    part.do(cm.Unpark(0, 0, (Placement(name, 10),)))
    said = first if paused else held(part)
    while not part.finished:
        part.tell(answer(said))
        if not part.finished:
            said = held(part)
    assert part.one(name) == alone(root, message, 60)


# Reports


def test_a_report_names_who_advanced(root: Path) -> None:
    part = Part(root)
    part.tell(begin(1, 10), begin(2, 11))
    part.step(2)
    reports = []
    for _ in range(2):
        part.instance.report()
        reports += [e for e in events(part.collect()) if isinstance(e, ev.InstanceProgressed)]
    assert reports[0].lengths == (Length(1, 10, 2), Length(2, 11, 2))
    assert reports[1].lengths == ()
    assert all(report.kv_tokens > 0 for report in reports)


def test_slot_time_is_busy_or_idle(root: Path) -> None:
    """Four slots, of which 2, then 1, are used; time with none of it is idle too."""
    part = Part(root, slots=4)
    start = used(part)
    part.time.now += 5.0  # nobody is here
    part.tell(begin(1, 10), begin(2, 11))
    part.step(3)
    part.do(cm.Cancel(2, 11, 0))
    part.step(2)
    found = used(part)
    assert found.slots_s - start.slots_s == 4 * 10.0
    assert found.busy_s == 2 * 3.0 + 1 * 2.0
    assert (found.tokens, found.steps, found.running) == (3 * 2 + 2, 5, 1)
    part.do(cm.Suspend())
    part.time.now += 100.0  # is the trainer's
    part.do(cm.Resume())
    assert used(part).slots_s == found.slots_s
    assert used(part).busy_s == found.busy_s


def test_a_slot_that_waits_for_an_environment_is_idle(root: Path) -> None:
    message = long_episode(root)
    part = Part(root, slots=1, max_tokens=60)
    part.tell(message)
    said = held(part)
    busy = used(part).busy_s
    part.time.now += 50.0
    assert used(part).busy_s == busy
    assert used(part).running == 0
    part.tell(answer(said))
    assert used(part).running == 1


def test_more_work_than_slots_is_not_more_than_busy(root: Path) -> None:
    part = Part(root, slots=2)
    start = used(part)
    part.tell(*(begin(name, 10 + name) for name in range(5)))
    part.step(4)
    found = used(part)
    assert found.busy_s == found.slots_s - start.slots_s == 8.0


# No room in the transport


class Full:
    """A sink without room for the next so many records."""

    def __init__(self, failures: int) -> None:
        self.failures = failures

    def put(self, record: bytes) -> RecordRef:
        if self.failures:
            self.failures -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        return RECORDS.put(record)

    def close(self) -> None: ...


def test_what_is_whole_waits_for_room(root: Path) -> None:
    """A full disk is nobody's fault: no trajectory fails of it, and none overtakes another."""
    part = Part(root)
    part.instance.sink = Full(failures=3)
    part.tell(begin(1, 10), begin(2, 11))
    part.run()
    assert not part.finished  # both tried, and the first of them twice
    part.instance.report()
    part.collect()
    assert not part.finished
    part.instance.report()
    part.collect()
    assert {name for name, _ in part.finished} == {1, 2}
    assert part.one(1) == alone(root, begin(1, 10))
    assert not [e for e in part.events if isinstance(e, ev.TrajectoryFailed)]


def test_a_prefix_that_finds_no_room_is_saved_the_next_time(root: Path) -> None:
    part = Part(root)
    part.tell(begin(1, 10), begin(2, 11))
    part.step(3)
    part.instance.sink = Full(failures=1)
    (first,) = part.tell(ms.SavePrefixes())
    assert isinstance(first, ms.Prefixes) and first.prefixes == ()
    (second,) = part.tell(ms.SavePrefixes())
    assert isinstance(second, ms.Prefixes)
    assert [(p.trajectory, p.num_tokens) for p in second.prefixes] == [(1, 3), (2, 3)]


def test_a_prefix_that_is_lost_fails_its_trajectory_alone(root: Path) -> None:
    part = Part(root)
    whole = alone(root, begin(1, 10))
    prefix = prefix_of(whole, 2, fence=9, segments=(Segment(0, digest(0), 2),))
    (piece,) = prefix.pieces
    lost = replace(prefix, pieces=(piece._replace(content=piece.content._replace(offset=10**6)),))
    (said,) = events(part.tell(begin(1, 10, prefix=lost)))
    assert said == ev.TrajectoryFailed(1, 10, "its prefix is lost")
    part.tell(begin(1, 11))
    part.run()
    assert part.one(1).tokens == whole.tokens


# Sleep


def test_an_instance_on_the_trainers_devices_joins_asleep(root: Path) -> None:
    part = Part(root, versions=())
    part.instance.elastic = True
    part.instance.join()
    part.collect()
    assert part.events == [ev.InstanceJoined(0, 0, 4, 2048, 3, elastic=True)]


def test_asleep_it_holds_no_version_and_what_is_parked_continues_when_it_is_awake(
    root: Path,
) -> None:
    part = Part(root)
    part.tell(begin(1, 1))
    part.step(3)
    part.do(cm.Park(0, 0, (Placement(1, 1),)))
    for _ in range(2):  # a repeated command is answered again
        assert events(part.do(cm.Sleep(0, 0))) == [ev.InstanceSlept(0, 0)]
    assert not part.engine.load().versions
    assert not part.instance.busy
    for _ in range(2):
        assert events(part.do(cm.Wake(0, 0))) == [ev.InstanceWoke(0, 0)]
    part.do(cm.Install(0, 0, 0), cm.Unpark(0, 0, (Placement(1, 1),)))
    assert part.instance.busy
    part.run()
    assert part.finished[1, 1].tokens == alone(root, begin(1, 1)).tokens


def test_slots_of_an_instance_that_sleeps_are_not_counted(root: Path) -> None:
    part = Part(root)
    part.do(cm.Sleep(0, 0))
    before = used(part).slots_s
    part.time.now += 100.0
    assert used(part).slots_s == before
    part.do(cm.Wake(0, 0))
    part.time.now += 10.0
    assert used(part).slots_s == before + 10.0 * 4
