"""Of the contract of engines: whatever is asked in whatever order, nothing is lost or changed.

Versions come and go meanwhile. Each trajectory stays on its own, but for those that are carried.
"""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from dora_rl.core.protocol.types import TrajectoryId, Version
from dora_rl.engines.base import Request
from dora_rl.engines.errors import ImportRefused, RequestRefused, VersionRefused
from tests.engines.driving import (
    MID,
    NEW,
    OLD,
    WEIGHTS,
    Drive,
    Harness,
    Record,
    alone,
    ask,
    assert_ended,
    assert_same,
    budget,
    read_whole,
    start,
)

SPARE = 9  # a version that nobody asks for; its weights are the fourth


class Storm:
    """A random script over two engines; each trajectory must end once, as if nothing had been."""

    def __init__(self, harness: Harness, seed: int) -> None:
        self.harness = harness
        self.rng = random.Random(seed)
        self.requests: dict[TrajectoryId, Request] = {}
        self.cancelled: set[TrajectoryId] = set()
        self.read_again: set[TrajectoryId] = set()  # after a crash
        self.carried: set[TrajectoryId] = set()  # from one version to another
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
            self.evict: 1.0,
            self.install: 1.0,
            self.carry: 0.5,
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
            if record.finish:
                assert_ended(self.harness, record, request)
            if not self.sides[0].engine.capabilities.exact_noise:
                assert record.finish or trajectory in self.cancelled or request.hold
                continue
            if trajectory in self.carried:
                assert record.finish or trajectory in self.cancelled or request.hold
                self.judge_carried(record, request)
                continue
            quiet = read_whole(self.harness, request, record.said)
            if trajectory in self.cancelled:
                assert record.finish is None or request.hold
                assert record.tokens == quiet.tokens[: len(record.tokens)]
            else:
                anew = trajectory in self.read_again
                assert_same(self.harness, record, quiet, anew=anew)

    def judge_carried(self, record: Record, request: Request) -> None:
        """Every piece is what its version gives after all that was before it."""
        start = 0
        while start < len(record.tokens):
            version, label = record.labels[start]
            end = start + 1
            while end < len(record.labels) and record.labels[end] == (version, label):
                end += 1
            if label != "observed":
                before = tuple(record.tokens[:start])
                piece = replace(request, version=version, hold=False, prefix=before)
                quiet = alone(self.harness, [piece])[request.trajectory]
                assert record.tokens[start:end] == quiet.tokens[: end - start]
            start = end

    def pick(self, side: int) -> TrajectoryId | None:
        here = list(self.sides[side].live)
        return self.rng.choice(here) if here else None

    def submit(self, side: int) -> None:
        rng, n = self.rng, len(self.requests)
        hold = rng.random() < 0.5
        stops = tuple(range(0, self.harness.vocab_size, 2)) if hold else ()
        version = rng.choice((OLD, MID, NEW))
        self.require(side, version)
        request = ask(
            self.harness,
            n,
            version,
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

    @property
    def can_export(self) -> bool:
        return self.sides[0].engine.capabilities.kv_export

    def park(self, side: int) -> None:
        if self.can_export and (trajectory := self.pick(side)) is not None:
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
            self.require(1 - side, self.sides[side].live[trajectory].version)
            self.sides[side].move(trajectory, self.sides[1 - side])

    def undo_a_move(self, side: int) -> None:
        if self.can_export and (trajectory := self.pick(side)) is not None:
            data = self.sides[side].export(trajectory)
            with pytest.raises(ImportRefused):
                self.sides[1 - side].engine.import_trajectory(data[:-1])
            self.sides[side].resume(trajectory)

    def be_refused(self, side: int) -> None:
        drive = self.sides[side]
        with pytest.raises(RequestRefused):
            drive.engine.submit(replace(ask(self.harness, 10**6), prompt=(-1,)))
        if drive.digests:
            version = self.rng.choice(sorted(drive.digests))
            other = self.harness.weights((WEIGHTS.get(version, 3) + 1) % 4)
            with pytest.raises(VersionRefused):
                drive.engine.install(version, other)
        if (trajectory := self.pick(side)) is not None:
            with pytest.raises(VersionRefused):
                drive.engine.evict(drive.live[trajectory].version)
            with pytest.raises(RequestRefused):
                drive.engine.submit(drive.live[trajectory])
            if trajectory not in drive.held:
                with pytest.raises(RequestRefused):
                    drive.engine.extend(trajectory, (1,))
        drive.check()

    def require(self, side: int, version: Version) -> None:
        """Bring a version back that was evicted."""
        drive = self.sides[side]
        if version not in drive.digests:
            evict = SPARE if SPARE in drive.digests else None
            drive.install(version, self.harness.weights(WEIGHTS[version]), evict)

    def unused(self, side: int) -> list[Version]:
        drive = self.sides[side]
        return sorted(drive.digests.keys() - {one.version for one in drive.live.values()})

    def evict(self, side: int) -> None:
        if free := self.unused(side):
            self.sides[side].evict(self.rng.choice(free))

    def install(self, side: int) -> None:
        """In a free slot, or in the place of a version without work; else it is refused."""
        drive, weights = self.sides[side], self.harness.weights(3)
        if SPARE in drive.digests or len(drive.digests) < drive.engine.load().version_slots:
            drive.install(SPARE, weights)
        elif free := self.unused(side):
            drive.install(SPARE, weights, self.rng.choice(free))
        else:
            with pytest.raises(VersionRefused):
                drive.engine.install(SPARE, weights, self.rng.choice(sorted(drive.digests)))
            drive.check()

    def carry(self, side: int) -> None:
        """All of one version here continue under another."""
        drive = self.sides[side]
        if (trajectory := self.pick(side)) is None:
            return
        source = drive.live[trajectory].version
        target = self.rng.choice([v for v in (OLD, MID, NEW) if v != source])
        self.require(side, target)
        self.carried |= {t for t, one in drive.live.items() if one.version == source}
        drive.carry(source, target)

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
            begun = record.turn_start
            fresh.submit(replace(request, prefix=so_far, turn_start=begun, held=False))


def share_records(drives: Sequence[Drive]) -> None:
    records = {t: record for drive in drives for t, record in drive.records.items()}
    for drive in drives:
        drive.records = records


class StormTests:
    @pytest.mark.parametrize("seed", range(8))
    def test_nothing_is_lost_in_a_storm(self, harness: Harness, seed: int) -> None:
        Storm(harness, seed).run(60)
