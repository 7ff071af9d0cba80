"""What a run's records add up, also when an instance or the trainer says something again."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_rl.core.orchestrator import Orchestrator
from dora_rl.core.protocol.commands import AbortMigration, Fail, Release, Reserve, Train
from dora_rl.core.protocol.events import BatchTrained, InstanceJoined, TimerFired
from dora_rl.core.protocol.reasons import MOST_REASONS, OTHER_REASONS
from dora_rl.core.protocol.settings import ParadigmName, Settings
from dora_rl.core.protocol.types import Move
from dora_rl.observe.placements import Placements
from dora_rl.runtime.control import messages as ms
from dora_rl.runtime.records.step_metrics import Recorder, StepRecord, read_records

Growth = tuple[int, int, int, int, int, int]
growths = st.tuples(*[st.integers(min_value=0, max_value=3)] * 6)
lives_of_an_instance = st.lists(st.lists(growths, max_size=6), min_size=1, max_size=4)


def joined(incarnation: int) -> InstanceJoined:
    return InstanceJoined(0, incarnation, 4, 1000)


def reports(growth: Sequence[Growth]) -> list[ms.Used]:
    """Counters that only grow, and how many run."""
    found, sums = [], [0] * 5
    for *more, running in growth:
        sums = [old + new for old, new in zip(sums, more, strict=True)]
        found.append(ms.Used(*sums, running))
    return found


def tell(recorder: Recorder, said: Any) -> None:
    if isinstance(said, ms.Used):
        recorder.used(0.0, 0, said)
    else:
        recorder.observed(0.0, said, [])


def recorder_of(paradigm: ParadigmName = ParadigmName.MULTI_VERSION) -> Recorder:
    return Recorder(Orchestrator(Settings(paradigm=paradigm)))


def record(recorder: Recorder) -> StepRecord:
    recorder.trained(1.0, ms.Trained(0, 0, 1.0, {}), [])
    assert recorder.last is not None
    return recorder.last


@given(lives_of_an_instance, st.data())
def test_what_an_instance_says_again_is_not_added_again(
    lives: list[list[Growth]], data: st.DataObject
) -> None:
    once, twice = recorder_of(), recorder_of()
    for incarnation, growth in enumerate(lives):
        heard: list[Any] = []
        for said in (joined(incarnation), *reports(growth)):
            heard.append(said)
            for recorder in (once, twice):
                tell(recorder, said)
            tell(twice, data.draw(st.sampled_from(heard)))
    last = [reports(growth)[-1] for growth in lives if growth]
    found = twice.reading()
    assert found == once.reading()
    assert found.busy_s == sum(used.busy_s for used in last)
    assert found.slots_s == max(found.busy_s, sum(used.slots_s for used in last))
    assert found.reprefilled_tokens == sum(used.reread_tokens for used in last)
    assert record(twice) == record(once)


def test_a_move_that_is_given_up_is_forgotten() -> None:
    recorder = recorder_of()
    move = Move(0, 1, 2)
    recorder.observed(
        0.0, TimerFired(), [Reserve(0, 0, 1, 0, (move,)), Reserve(1, 0, 1, 0, (move,))]
    )
    recorder.observed(0.0, TimerFired(), [AbortMigration(0)])
    recorder.observed(0.0, TimerFired(), [Release(1)])
    assert not recorder._moves
    assert recorder.reading().migrated == 1


def test_so_many_reasons_are_told_apart() -> None:
    recorder = recorder_of()
    for number in range(MOST_REASONS + 50):
        recorder.observed(0.0, TimerFired(), [Fail(number, f"reason {number}")])
    assert len(recorder.failures) == MOST_REASONS + 1
    assert recorder.failures["reason 7"] == 1
    assert recorder.failures[OTHER_REASONS] == 50


def test_a_line_that_is_no_record_is_named_unless_a_kill_cut_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = msgspec.json.encode(record(recorder_of())) + b"\n"
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(one + one[: len(one) // 2])
    assert len(read_records(file)) == 1
    assert not caplog.messages
    file.write_bytes(one + b"\0" * 9 + b"\n" + one)
    assert len(read_records(file)) == 2
    (said,) = caplog.messages
    assert f"`{file}` line 2 is left out" in said


def test_a_step_is_counted_from_its_event() -> None:
    """Which a resume replays; the report before it, a moment earlier, it does not hear of."""
    live, replayed = recorder_of(), recorder_of()
    live.trained(1.0, ms.Trained(0, 0, 1.0, {}), [])
    for recorder in (live, replayed):
        recorder.observed(1.001, BatchTrained(0), [])
        recorder.trained(3.0, ms.Trained(1, 0, 1.0, {}), [])
    assert live.last == replayed.last
    assert live.last is not None and live.last.step_s == 3.0 - 1.001


def test_devices_are_taken_until_the_step_is_that_is_under_way() -> None:
    """Not until an earlier one is told of again."""
    recorder = recorder_of(ParadigmName.SYNC)
    tell(recorder, joined(0))
    tell(recorder, ms.Used(100.0, 10.0, 0, 0, 0, 0))
    recorder.observed(10.0, BatchTrained(0), [Train(1, ())])
    recorder.observed(12.0, BatchTrained(0), [])
    recorder.observed(15.0, BatchTrained(1), [])
    recorder.observed(17.0, BatchTrained(1), [])
    assert recorder.reading().slots_s == 100.0 - 5.0 * 4


def test_slot_time_that_an_earlier_process_lost_is_not_taken_from_this_one() -> None:
    recorder = recorder_of(ParadigmName.SYNC)
    tell(recorder, joined(0))
    recorder.observed(10.0, BatchTrained(0), [Train(1, ())])
    recorder.observed(15.0, BatchTrained(1), [])
    recorder.resumed([], recorder._state, Placements())
    tell(recorder, joined(1))
    tell(recorder, ms.Used(8.0, 2.0, 0, 0, 0, 0))
    recorder.trained(20.0, ms.Trained(2, 0, 1.0, {}), [])
    assert recorder.last is not None
    assert recorder.last.bubble_share == 1 - 2.0 / 8.0
    assert recorder.last.step_s == 5.0


def test_what_was_counted_is_that_since_the_step_before() -> None:
    """Also of an instance that was replaced meanwhile; a duplicate counts once."""
    recorder = recorder_of()
    tell(recorder, joined(0))
    found = []
    for step, sent in enumerate([(100, 100), (110, 200), (110, 200), (40, 100)]):
        if step == 3:
            tell(recorder, joined(1))
        for _ in range(2):
            drafted = (10 * sent[0], sent[0])
            tell(recorder, ms.Used(float(step), 0.0, 0, 0, 0, 0, *sent, *drafted))
        recorder.trained(1.0 + step, ms.Trained(step, 0, 1.0, {}), [])
        assert recorder.last is not None
        found.append((recorder.last.weights_sent_bytes, recorder.last.weights_sent_share))
        assert recorder.last.proposed_tokens == 10 * recorder.last.weights_sent_bytes
        assert recorder.last.accepted_tokens == recorder.last.weights_sent_bytes
    assert found == [(100, 1.0), (10, 0.1), (0, None), (40, 0.4)]
