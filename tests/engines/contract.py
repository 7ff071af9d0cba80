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

Tests of an ability are skipped for engines without it, by `Engine.capabilities` (`driving.needs`);
`most_versions` of the harness says for how many versions an engine can be made.

`StopStringContract` and `FailureContract` hold what needs more of a harness: a tokenizer, or ways
to break a trajectory and a load. The tests call methods of the contract alone, and few steps of
each.
"""

from dataclasses import replace

import pytest

from dora_rl.engines.base import FinishReason, Request
from dora_rl.engines.errors import VersionRefused
from tests.engines.driving import (
    MID,
    OLD,
    TOKENS,
    Harness,
    alone,
    ask,
    assert_as_alone,
    assert_same,
    paced,
    read_whole,
    start,
)
from tests.engines.moving import CarryTests, MoveTests, ParkingTests, RoomTests
from tests.engines.serving import NoiseTests, RequestTests, VersionTests
from tests.engines.storms import StormTests
from tests.engines.turns import TurnMoveTests, TurnRoomTests, TurnTests

__all__ = ["EngineContract", "FailureContract", "Harness", "StopStringContract"]


class EngineContract(
    VersionTests,
    RequestTests,
    NoiseTests,
    ParkingTests,
    RoomTests,
    MoveTests,
    CarryTests,
    TurnTests,
    TurnRoomTests,
    TurnMoveTests,
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
        paced(harness)
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

    @pytest.mark.parametrize("pause", ["nothing", "move", "crash"])
    @pytest.mark.parametrize("where", ["said", "across", "sampled"])
    def test_a_stop_string_is_sampled_in_one_turn(
        self, harness: Harness, where: str, pause: str
    ) -> None:
        """What was said neither is one nor begins one."""
        if pause == "crash":
            paced(harness)  # it must not have ended by then
        request, said, turn = self.two_turns(harness)
        stop = harness.decode(
            {"said": said[1:], "across": (*said[2:], turn[0]), "sampled": turn[2:4]}[where]
        )
        cut = next((n for n in range(1, len(turn)) if stop in harness.decode(turn[:n])), None)
        assert (cut is not None) == (where == "sampled")
        sampling = replace(request.sampling, stop=(stop,))
        request = replace(request, sampling=sampling)
        drive, target = start(harness, prefill_chunk=2), start(harness)
        target.records = drive.records
        drive.submit(request)
        drive.until_held(request.trajectory)
        drive.extend(request.trajectory, said)
        drive.until(request.trajectory, 1 + len(said) + 1)
        so_far = tuple(drive.records[request.trajectory].tokens)
        if pause == "move":
            drive.move(request.trajectory, target)
        if pause == "crash":
            target.submit(replace(request, prefix=so_far, turn_start=1 + len(said)))
        (drive if pause == "nothing" else target).until_held(request.trajectory)
        record = drive.records[request.trajectory]
        assert record.tokens[1 + len(said) :] == turn[:cut]
        assert (record.finish is FinishReason.STOP_STRING) == (where == "sampled")

    def two_turns(self, harness: Harness) -> tuple[Request, tuple[int, ...], list[int]]:
        """An episode, what is said in it, and a second turn of several tokens."""
        said = harness.prompt(77, 5)
        for trajectory in range(100):
            free = ask(harness, trajectory, max_tokens=16, hold=True)
            first = alone(harness, [replace(free, hold=False)])[trajectory].tokens[0]
            request = replace(free, sampling=replace(free.sampling, stop_token_ids=(first,)))
            record = read_whole(harness, request, [said])
            turn = record.tokens[record.turn_start :]
            if len(set(turn)) > 5:
                return request, said, turn
        raise AssertionError("no second turn of six different tokens")


class FailureContract:
    """For engines whose trajectories and loads can be broken."""

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

    @pytest.mark.parametrize("spare", [False, True])
    def test_a_load_that_fails_is_refused(self, harness: Harness, spare: bool) -> None:
        """The evicted version is gone, where one had to go; the engine serves on."""
        drive = start(harness, version_slots=1 + spare)
        old, new = ask(harness, 1), ask(harness, 2, MID)
        if spare:
            drive.submit(old)
            drive.until(1, 2)
        harness.fail_load(drive.engine)
        with pytest.raises(VersionRefused, match=rf"\b{MID}\b"):
            drive.engine.install(MID, harness.weights(1), evict=OLD)
        if not spare:
            del drive.digests[OLD]
        drive.check()
        with pytest.raises(VersionRefused, match=rf"\b{MID}\b"):
            drive.engine.submit(new)
        drive.install(MID, harness.weights(1), evict=OLD)
        drive.submit(new)
        drive.run()
        assert_as_alone(harness, drive, [old, new] if spare else [new])
