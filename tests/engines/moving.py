"""Of the contract of engines: parking, room for KV, moves between engines, and carrying on under
another version."""

from dataclasses import replace

import pytest

from dora_rl.engines.base import FinishReason, Request, Resumed, Sampled
from dora_rl.engines.errors import ImportRefused, RequestRefused, UnknownTrajectory, Unsupported
from tests.engines.driving import (
    MAX_STEPS,
    MID,
    NEW,
    OLD,
    PROMPT,
    TOKENS,
    Drive,
    Harness,
    alone,
    ask,
    assert_as_alone,
    assert_same,
    budget,
    mixed,
    needs,
    paced,
    start,
)


class ParkingTests:
    """What is parked stays whole; what is cancelled is gone."""

    def test_parking_at_any_step_does_not_matter(self, harness: Harness) -> None:
        request = ask(harness, 1, length=6, raw_logprobs=True)
        mate = ask(harness, 2, max_tokens=2)
        quiet = alone(harness, [request])[1]
        drive = start(harness, slots=1, prefill_chunk=4)
        for steps in range(TOKENS + 1):
            drive.records.clear()
            drive.submit(request)
            drive.step(steps)
            drive.park(1)
            assert drive.engine.idle
            so_far = len(drive.records[1].tokens)
            drive.submit(mate)  # takes its slot, and writes where its KV was
            drive.run()
            assert len(drive.records[1].tokens) == so_far
            assert drive.records[2].finish is FinishReason.MAX_TOKENS
            drive.resume(1)
            assert_same(harness, drive.run()[1], quiet, anew=True)  # read in smaller chunks

    def test_parking_computes_nothing_anew(self, harness: Harness) -> None:
        """To the bit, where the engine is exact."""
        requests = mixed(harness)
        drive = start(harness, slots=3)
        drive.submit(*requests)
        for request in requests * 2:
            drive.step()
            if request.trajectory in drive.live:
                drive.park(request.trajectory)
                drive.step()
                drive.resume(request.trajectory)
        drive.run()
        assert_as_alone(harness, drive, requests)

    def test_only_what_is_parked_resumes(self, harness: Harness) -> None:
        requests = [ask(harness, 1), ask(harness, 2)]
        drive = start(harness, slots=1)
        drive.submit(*requests)
        drive.step(2)
        drive.resume(1)  # runs
        drive.resume(2)  # waits
        load = drive.engine.load()
        assert (load.running, load.waiting) == (1, 1)
        drive.park(1)
        drive.park(1)
        drive.resume(1)
        drive.resume(1)
        drive.run()
        assert_as_alone(harness, drive, requests)

    def test_what_is_not_here_cannot_be_exported_or_resumed(self, harness: Harness) -> None:
        drive = start(harness)
        needs(drive.engine, kv_export=True)
        drive.submit(ask(harness, 1))
        drive.run()
        for trajectory in (1, 2):
            with pytest.raises(UnknownTrajectory, match=rf"\b{trajectory}\b"):
                drive.engine.resume(trajectory)
            with pytest.raises(UnknownTrajectory, match=rf"\b{trajectory}\b"):
                drive.engine.export_trajectory(trajectory)

    def test_what_an_engine_cannot_it_refuses_by_name(self, harness: Harness) -> None:
        drive = start(harness)
        needs(drive.engine, kv_export=False)
        request = ask(harness, 1)
        drive.submit(request)
        drive.step(2)
        for act in (drive.engine.export_trajectory, drive.engine.resume):
            with pytest.raises(Unsupported, match="kv_export"):
                act(1)
        with pytest.raises(Unsupported, match="kv_export"):
            drive.engine.import_trajectory(b"")
        drive.run()
        assert_as_alone(harness, drive, [request])

    def test_idle_means_that_nothing_can_run(self, harness: Harness) -> None:
        """`Drive` compares `idle` after every call; here, that both answers occur."""
        drive = start(harness)
        assert drive.engine.idle
        assert drive.step() == []
        drive.submit(ask(harness, 1))
        assert not drive.engine.idle
        drive.park(1)
        assert drive.engine.idle
        assert drive.step(3) == []
        drive.resume(1)
        assert not drive.engine.idle
        drive.run()
        assert drive.records[1].finish

    @pytest.mark.parametrize("state", ["waiting", "running", "parked"])
    def test_cancelling_forgets(self, harness: Harness, state: str) -> None:
        drive = start(harness, slots=1)
        drive.submit(ask(harness, 1), ask(harness, 2))
        drive.until(1, 2)
        gone = 2 if state == "waiting" else 1
        if state == "parked":
            drive.park(1)
        assert drive.cancel(gone) is True
        assert drive.cancel(gone) is False
        assert drive.cancel(55) is False
        before = len(drive.records[gone].tokens)
        drive.run()  # that nothing is heard of it, `Drive` sees to
        assert len(drive.records[gone].tokens) == before
        assert drive.records[3 - gone].finish is FinishReason.MAX_TOKENS

    def test_a_slot_is_used_again(self, harness: Harness) -> None:
        drive = start(harness, slots=1)
        drive.submit(ask(harness, 1), ask(harness, 2))
        drive.until(1, 1)
        load = drive.engine.load()
        assert (load.running, load.waiting) == (1, 1)
        drive.cancel(1)
        drive.step()
        load = drive.engine.load()
        assert (load.running, load.waiting) == (1, 0)
        drive.run()
        assert_as_alone(harness, drive, [ask(harness, 2)])


class RoomTests:
    """KV is bounded, and who finds no room waits or is parked; nothing is lost or redone."""

    def crowd(self, harness: Harness) -> tuple[list[Request], int]:
        """Each needs three units and there are five: no two can finish side by side."""
        unit = max(4, harness.kv_unit)
        requests = [ask(harness, i, length=unit, max_tokens=2 * unit) for i in range(4)]
        return requests, 5 * unit

    def test_the_budget_holds_and_nothing_is_lost(self, harness: Harness) -> None:
        requests, tokens = self.crowd(harness)
        drive = start(harness, slots=4, kv_budget_tokens=tokens)
        assert drive.engine.load().kv_budget_tokens <= tokens
        drive.submit(*requests)
        drive.run()
        assert not drive.no_room
        assert bool(drive.parks) == drive.engine.capabilities.parking
        assert_as_alone(harness, drive, requests)

    def test_nothing_is_computed_twice_to_make_room(self, harness: Harness) -> None:
        """Who comes back continues in the same step: reading again would take several."""
        paced(harness)
        requests, tokens = self.crowd(harness)
        drive = start(harness, slots=4, kv_budget_tokens=tokens, prefill_chunk=2)
        drive.submit(*requests)
        came_back = 0
        while not drive.engine.idle:
            begun = {trajectory for trajectory, record in drive.records.items() if record.tokens}
            outputs = drive.step()
            sampled = {one.trajectory for one in outputs if isinstance(one, Sampled)}
            resumed = {one.trajectory for one in outputs if isinstance(one, Resumed)}
            assert resumed & begun <= sampled
            came_back += len(resumed & begun)
        assert bool(came_back) == drive.engine.capabilities.parking

    @pytest.mark.parametrize("act", ["cancel", "park", "move"])
    def test_one_that_found_no_room_obeys(self, harness: Harness, act: str) -> None:
        requests, tokens = self.crowd(harness)
        drive, other = start(harness, slots=4, kv_budget_tokens=tokens), start(harness)
        other.records = drive.records
        drive.submit(*requests)
        for _ in range(MAX_STEPS):
            if drive.engine.idle or drive.no_room:
                break
            drive.step()
        assert bool(drive.no_room) == drive.engine.capabilities.parking
        away = sorted(drive.no_room)
        for trajectory in away:
            if act == "move":
                drive.move(trajectory, other)
            else:
                getattr(drive, act)(trajectory)
        drive.run()
        other.run()
        assert sorted(drive.live) == (away if act == "park" else [])
        for trajectory in sorted(drive.asked):
            drive.resume(trajectory)
        drive.run()
        gone = away if act == "cancel" else []
        assert_as_alone(harness, drive, [r for r in requests if r.trajectory not in gone])

    def test_the_load_says_what_is_done(self, harness: Harness) -> None:
        paced(harness)
        drive = start(harness, OLD, MID, slots=2, version_slots=3)
        empty = drive.engine.load()
        assert (empty.slots, empty.version_slots) == (2, 3)
        assert (empty.running, empty.waiting) == (0, 0)
        assert [one.tokens_per_s for one in empty.versions.values()] == [0.0, 0.0]
        drive.submit(*(ask(harness, i) for i in range(4)))
        assert drive.engine.load().waiting == 4
        drive.until(1, 2)
        drive.park(0)
        drive.step()
        load = drive.engine.load()
        assert (load.running, load.waiting, load.versions[OLD].parked) == (2, 1, 1)
        assert load.kv_used_tokens >= 2 * PROMPT
        assert load.versions[OLD].tokens_per_s > 0
        assert load.versions[MID].tokens_per_s == 0
        assert (load.versions[MID].running, load.versions[MID].waiting) == (0, 0)


def damaged(data: bytes) -> list[bytes]:
    """Cut, lengthened, altered, or something else."""
    cuts = [data[:at] for at in (0, 1, len(data) // 2, len(data) - 1)]
    flipped = [data[:-1] + bytes([data[-1] ^ 1]), bytes([data[0] ^ 1]) + data[1:]]
    return [*cuts, *flipped, data + b"\0", b"\x80\x04N.", bytes(range(256))]


class MoveTests:
    """A trajectory continues elsewhere as if it had never moved, or stays where it was."""

    def test_a_move_at_any_step_does_not_matter(self, harness: Harness) -> None:
        requests = mixed(harness)
        quiet = alone(harness, requests)
        source, target = start(harness, slots=2), start(harness, OLD, MID, slots=4)
        for steps in range(TOKENS + 1):
            source.records.clear()
            target.records = source.records
            source.submit(*requests)
            target.submit(ask(harness, 1, MID), ask(harness, 2))
            source.step(steps)
            for trajectory in list(source.live):
                source.move(trajectory, target)
                target.step()
            target.run()
            for request in requests:
                assert_same(harness, source.records[request.trajectory], quiet[request.trajectory])

    def test_a_prompt_half_read_can_move(self, harness: Harness) -> None:
        request = ask(harness, 1, length=20)
        quiet = alone(harness, [request])[1]
        for steps in range(5):
            source, target = start(harness, prefill_chunk=4), start(harness, slots=1)
            source.submit(request)
            source.step(steps)
            target.records = source.records
            source.move(1, target)
            assert_same(harness, target.run()[1], quiet, anew=True)

    def test_a_trajectory_can_move_often(self, harness: Harness) -> None:
        request = replace(ask(harness, 1), prefix=(1, 2))
        engines = [start(harness, slots=1), start(harness, slots=2)]
        engines[1].records = engines[0].records
        engines[0].submit(request)
        here = 0
        while engines[here].live:
            engines[here].step()
            if engines[here].live:
                engines[here].move(1, engines[1 - here])
                here = 1 - here
        assert_same(harness, engines[0].records[1], alone(harness, [request])[1])

    def test_out_and_back_in_again(self, harness: Harness) -> None:
        request = ask(harness, 1)
        drive = start(harness)
        drive.submit(request)
        drive.until(1, 3)
        data = drive.export(1)
        with pytest.raises((ImportRefused, RequestRefused), match=r"\b1\b"):
            drive.engine.import_trajectory(data)
        drive.check()
        drive.cancel(1)
        drive.take(data, request)
        drive.run()
        assert_as_alone(harness, drive, [request])

    def test_one_that_is_there_already_is_not_taken(self, harness: Harness) -> None:
        source, target = start(harness), start(harness)
        request, other = (ask(harness, 1, seed=seed, max_tokens=30) for seed in (11, 5))
        source.submit(request)
        source.step(2)
        target.submit(other)
        target.step(2)
        with pytest.raises((ImportRefused, RequestRefused), match=r"\b1\b"):
            target.engine.import_trajectory(source.export(1))
        target.run()
        assert_as_alone(harness, target, [other])
        source.resume(1)
        source.run()
        assert_as_alone(harness, source, [request])

    @pytest.mark.parametrize("there", ["other weights", "other version", "nothing"])
    def test_other_weights_do_not_go_on_with_it(self, harness: Harness, there: str) -> None:
        source, target = start(harness), Drive(harness.make())
        if there == "other weights":
            target.install(OLD, harness.weights(1))
        if there == "other version":
            target.install(MID, harness.weights(0))
        request = ask(harness, 1)
        source.submit(request)
        source.until(1, 3)
        with pytest.raises(ImportRefused, match=rf"\b{OLD}\b"):
            target.engine.import_trajectory(source.export(1))
        target.check()
        source.resume(1)
        source.run()
        assert_as_alone(harness, source, [request])

    def test_damage_is_refused(self, harness: Harness) -> None:
        source, target = start(harness), start(harness)
        request = ask(harness, 1)
        source.submit(request)
        source.until(1, 3)
        data = source.export(1)
        for wrong in damaged(data):
            with pytest.raises(ImportRefused):
                target.engine.import_trajectory(wrong)
            target.check()
        target.records = source.records
        target.take(data, request)
        source.cancel(1)
        target.run()
        assert_as_alone(harness, target, [request])

    def test_what_cannot_fit_is_not_taken(self, harness: Harness) -> None:
        request = ask(harness, 1, max_tokens=harness.context)
        source = start(harness)
        target = start(harness, kv_budget_tokens=budget(harness))
        source.submit(request)
        source.until(1, 2)
        with pytest.raises((ImportRefused, RequestRefused), match=rf"\b{budget(harness)}\b"):
            target.engine.import_trajectory(source.export(1))
        target.check()
        source.resume(1)
        source.run()
        assert_as_alone(harness, source, [request])


class CarryTests:
    """For the paradigms that mix versions: what was generated continues under another version.

    Cancelled and submitted again with its tokens; the switch is complete, and every token says so.
    """

    def test_what_is_carried_goes_on_under_the_target(self, harness: Harness) -> None:
        drive = start(harness, OLD, MID, NEW, slots=2)
        carried = [ask(harness, i) for i in (1, 2, 3)]  # one runs, one is parked, one waits
        bystander = ask(harness, 9, NEW)
        drive.submit(*carried, bystander)
        drive.until(2, 2)
        drive.park(2)
        cuts = {r.trajectory: len(drive.records[r.trajectory].tokens) for r in carried}
        drive.carry(OLD, MID)
        drive.evict(OLD)
        drive.run()
        assert_as_alone(harness, drive, [bystander])
        for request in carried:
            record, cut = drive.records[request.trajectory], cuts[request.trajectory]
            assert [version for version, _ in record.labels] == [OLD] * cut + [MID] * (TOKENS - cut)
            again = replace(request, version=MID, prefix=tuple(record.tokens[:cut]))
            quiet = alone(harness, [again])[request.trajectory]
            assert_same(harness, record.after(cut), quiet, anew=True)

    def test_a_carried_trajectory_can_move(self, harness: Harness) -> None:
        source, target = start(harness, OLD, MID), start(harness, MID)
        source.submit(ask(harness, 1))
        source.until(1, 3)
        carried = len(source.records[1].tokens)
        source.carry(OLD, MID)
        target.records = source.records
        source.move(1, target)
        record = target.run()[1]
        again = replace(ask(harness, 1, MID), prefix=tuple(record.tokens[:carried]))
        assert_same(harness, record.after(carried), alone(harness, [again])[1], anew=True)
