"""The contract of engines as a suite: one test a promise of `dora_rl.engines.base`.

To add an implementation, describe it by a `Harness` and inherit the tests:

    class MyHarness(Harness):
        vocab_size, context, eos = 128, 64, 2
        def _make(self, **settings): return MyEngine(model, **settings)
        def weights(self, n): return store.path(n)

    class TestMyEngine(EngineContract):
        @pytest.fixture
        def harness(self):
            with MyHarness() as harness:
                yield harness

`StopStringContract` and `FailureContract` hold what needs more of a harness: a tokenizer, or a
way to break a trajectory. The tests call methods of the contract alone, and few steps of each.
"""

from dora_rl.engines.base import FinishReason
from tests.engines.driving import (
    TOKENS,
    Harness,
    alone,
    ask,
    assert_as_alone,
    assert_same,
    start,
)
from tests.engines.moving import CarryTests, MoveTests, ParkingTests, RoomTests
from tests.engines.serving import NoiseTests, RequestTests, VersionTests
from tests.engines.storms import StormTests

__all__ = ["EngineContract", "FailureContract", "Harness", "StopStringContract"]


class EngineContract(
    VersionTests,
    RequestTests,
    NoiseTests,
    ParkingTests,
    RoomTests,
    MoveTests,
    CarryTests,
    StormTests,
):
    """Every promise of an engine. Needs a fixture `harness`."""


class StopStringContract:
    """For engines with a tokenizer."""

    def test_a_stop_string_ends_after_its_last_token(self, harness: Harness) -> None:
        free = alone(harness, [ask(harness, 1)])[1].tokens
        stop = harness.decode(free[2:5])
        cut = next(n for n in range(1, TOKENS) if stop in harness.decode(free[:n]))
        drive = start(harness)
        drive.submit(ask(harness, 1, stop=("\x00 never", stop)), ask(harness, 2))
        record = drive.run()[1]
        assert record.tokens == free[:cut]
        assert record.finish is FinishReason.STOP_STRING
        assert_as_alone(harness, drive, [ask(harness, 2)])

    def test_a_stop_string_may_begin_before_a_move(self, harness: Harness) -> None:
        free = alone(harness, [ask(harness, 1)])[1].tokens
        stop = harness.decode(free[2:5])
        request = ask(harness, 1, stop=(stop,))
        quiet = alone(harness, [request])[1]
        assert quiet.finish is FinishReason.STOP_STRING
        source, target = start(harness), start(harness)
        target.records = source.records
        source.submit(request)
        source.until(1, min(4, len(quiet.tokens) - 1))
        source.move(1, target)
        assert_same(harness, target.run()[1], quiet)


class FailureContract:
    """For engines whose trajectories can be broken."""

    def test_a_failure_is_one_trajectorys_own(self, harness: Harness) -> None:
        requests = [ask(harness, i) for i in (1, 2, 3)]
        drive = start(harness)
        drive.submit(*requests)
        drive.until(2, 3)
        harness.fail(drive.engine, 2)
        drive.run()
        broken = drive.records[2]
        assert broken.failure
        assert broken.finish is None
        assert drive.cancel(2) is False
        assert_as_alone(harness, drive, [requests[0], requests[2]])
