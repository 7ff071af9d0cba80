"""Of the contract of engines: whatever is asked in whatever order, nothing is lost or changed."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from dora_rl.core.types import TrajectoryId
from dora_rl.engines.base import Request
from dora_rl.engines.errors import ImportRefused, RequestRefused, VersionRefused
from tests.engines.driving import (
    MID,
    NEW,
    OLD,
    Drive,
    Harness,
    ask,
    assert_same,
    budget,
    read_whole,
    start,
)


class Storm:
    """A random script over two engines; each trajectory must end once, as if nothing had been."""

    def __init__(self, harness: Harness, seed: int) -> None:
        self.harness = harness
        self.rng = random.Random(seed)
        self.requests: dict[TrajectoryId, Request] = {}
        self.cancelled: set[TrajectoryId] = set()
        self.read_again: set[TrajectoryId] = set()  # after a crash
        self.sides = [self.engine(0), self.engine(1)]

    def engine(self, side: int) -> Drive:
        settings = [{"slots": 3, "kv_budget_tokens": budget(self.harness)}, {"slots": 2}][side]
        return start(self.harness, OLD, MID, NEW, **settings)

    def run(self, calls: int) -> None:
        share_records(self.sides)
        acts = {
            self.step: 12.0,
            self.submit: 5.0,
            self.extend: 4.0,
            self.move: 3.0,
            self.resume: 3.0,
            self.park: 2.0,
            self.undo_a_move: 1.0,
            self.cancel: 1.0,
            self.be_refused: 1.0,
            self.crash: 0.5,
        }
        for _ in range(calls):
            side = self.rng.randrange(2)
            act = self.rng.choices(list(acts), list(acts.values()))[0]
            act(side)
        for drive in self.sides:
            for trajectory in sorted(drive.asked):
                drive.resume(trajectory)
            drive.run()
            for trajectory in sorted(drive.held):
                drive.cancel(trajectory)  # the environment has no more to say
        self.judge()

    def judge(self) -> None:
        records = self.sides[0].records
        assert records.keys() == self.requests.keys()
        assert not any(drive.live for drive in self.sides)
        for trajectory, record in records.items():
            request = self.requests[trajectory]
            quiet = read_whole(self.harness, request, record.said)
            if trajectory in self.cancelled:
                assert record.finish is None or request.hold
                assert record.tokens == quiet.tokens[: len(record.tokens)]
            else:
                anew = trajectory in self.read_again
                assert_same(self.harness, record, quiet, anew=anew)

    def pick(self, side: int) -> TrajectoryId | None:
        here = list(self.sides[side].live)
        return self.rng.choice(here) if here else None

    def submit(self, side: int) -> None:
        rng, n = self.rng, len(self.requests)
        hold = rng.random() < 0.5
        stops = tuple(range(0, self.harness.vocab_size, 2)) if hold else ()
        request = ask(
            self.harness,
            n,
            rng.choice((OLD, MID, NEW)),
            length=rng.randint(1, 12),
            seed=rng.getrandbits(64),
            temperature=rng.choice((0.0, 0.6, 1.0)),
            top_k=rng.choice((0, 0, 4)),
            max_tokens=rng.randint(1, 20 if hold else 12),
            stop_token_ids=stops,
            hold=hold,
            ignore_eos=rng.random() < 0.5,
            raw_logprobs=rng.random() < 0.5,
        )
        self.requests[n] = request
        self.sides[side].submit(request)

    def step(self, side: int) -> None:
        self.sides[side].step(self.rng.randint(1, 3))

    def extend(self, side: int) -> None:
        drive = self.sides[side]
        if drive.held:
            trajectory = self.rng.choice(sorted(drive.held))
            tokens = self.answer(trajectory)
            if tokens:
                drive.extend(trajectory, tokens)
                return
            most = self.requests[trajectory].sampling.max_tokens
            with pytest.raises(RequestRefused, match=rf"\b{most}\b"):
                drive.engine.extend(trajectory, (1,) * most)
            drive.check()

    def answer(self, trajectory: TrajectoryId) -> tuple[int, ...]:
        """What the environment says, if there is room for it."""
        so_far = len(self.sides[0].records[trajectory].tokens)
        room = self.requests[trajectory].sampling.max_tokens - so_far - 1
        if room < 1:
            return ()
        length = self.rng.randint(1, min(room, 5))
        return tuple(self.rng.randrange(self.harness.vocab_size) for _ in range(length))

    def park(self, side: int) -> None:
        if (trajectory := self.pick(side)) is not None:
            self.sides[side].park(trajectory)

    def resume(self, side: int) -> None:
        if (trajectory := self.pick(side)) is not None:
            self.sides[side].resume(trajectory)

    def cancel(self, side: int) -> None:
        if (trajectory := self.pick(side)) is not None:
            self.sides[side].cancel(trajectory)
            self.cancelled.add(trajectory)

    def move(self, side: int) -> None:
        if (trajectory := self.pick(side)) is not None:
            self.sides[side].move(trajectory, self.sides[1 - side])

    def undo_a_move(self, side: int) -> None:
        if (trajectory := self.pick(side)) is not None:
            data = self.sides[side].export(trajectory)
            with pytest.raises(ImportRefused):
                self.sides[1 - side].engine.import_trajectory(data[:-1])
            self.sides[side].resume(trajectory)

    def be_refused(self, side: int) -> None:
        drive = self.sides[side]
        with pytest.raises(RequestRefused):
            drive.engine.submit(replace(ask(self.harness, 10**6), prompt=(-1,)))
        with pytest.raises(VersionRefused):
            drive.engine.install(NEW, self.harness.weights(0))
        if (trajectory := self.pick(side)) is not None:
            with pytest.raises(VersionRefused):
                drive.engine.retire(drive.live[trajectory].version)
            with pytest.raises(RequestRefused):
                drive.engine.submit(drive.live[trajectory])
            if trajectory not in drive.held:
                with pytest.raises(RequestRefused):
                    drive.engine.extend(trajectory, (1,))
        drive.check()

    def crash(self, side: int) -> None:
        """All that it held is lost; what it had reported is known, and goes in again."""
        lost = self.sides[side]
        self.harness.close(lost.engine)
        fresh = self.sides[side] = self.engine(side)
        share_records(self.sides)
        for trajectory, request in lost.live.items():
            self.read_again.add(trajectory)
            record = fresh.records[trajectory]
            if trajectory in lost.held:
                if not (tokens := self.answer(trajectory)):
                    continue  # its last turn was all there was room for
                record.observe(tokens, request)
            so_far = tuple(record.tokens)
            fresh.submit(replace(request, prefix=so_far, turn_start=record.turn_start))


def share_records(drives: Sequence[Drive]) -> None:
    records = {t: record for drive in drives for t, record in drive.records.items()}
    for drive in drives:
        drive.records = records


class StormTests:
    @pytest.mark.parametrize("seed", range(8))
    def test_nothing_is_lost_in_a_storm(self, harness: Harness, seed: int) -> None:
        Storm(harness, seed).run(60)
