"""What a run's records add up, also when an instance or the trainer says something again."""

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dora_rl.core.commands import Train
from dora_rl.core.events import BatchTrained, InstanceJoined
from dora_rl.core.orchestrator import Orchestrator
from dora_rl.core.settings import ParadigmName, Settings
from dora_rl.runtime import messages as ms
from dora_rl.runtime.recording import Recorder, StepRecord

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
