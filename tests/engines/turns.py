"""Of the contract of engines: episodes of several turns. Between turns a trajectory is held, and
what comes of it is what an engine gives that reads all of it at once."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from dora_rl.core.protocol.types import TrajectoryId, Version
from dora_rl.engines.base import FinishReason, Request
from dora_rl.engines.errors import RequestRefused, UnknownTrajectory, VersionRefused
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
    needs,
    paced,
    read_whole,
    start,
)

Replies = dict[TrajectoryId, list[tuple[int, ...]]]
LONG = 30  # tokens of an episode


def talk(
    harness: Harness, trajectory: TrajectoryId, version: Version = OLD, **wishes: Any
) -> Request:
    """An episode whose turns end by themselves: every second token ends its turn."""
    stops = tuple(range(0, harness.vocab_size, 2))
    wishes = {"max_tokens": LONG, "stop_token_ids": stops, "hold": True, **wishes}
    return ask(harness, trajectory, version, **wishes)


def brief(harness: Harness, trajectory: TrajectoryId, **wishes: Any) -> Request:
    """An episode whose turns are one token each."""
    return talk(harness, trajectory, stop_token_ids=tuple(range(harness.vocab_size)), **wishes)


def replies_to(harness: Harness, requests: Sequence[Request], turns: int = 2) -> Replies:
    return {
        r.trajectory: [harness.prompt(100 * r.trajectory + n, 2 * n + 1) for n in range(turns)]
        for r in requests
    }


def has_room(drive: Drive, trajectory: TrajectoryId, replies: Replies) -> bool:
    """Whether there is an answer to give, and room for it."""
    most = drive.live[trajectory].sampling.max_tokens
    so_far = len(drive.records[trajectory].tokens)
    return any(so_far + len(said) < most for said in replies.get(trajectory, [])[:1])


def converse(drive: Drive, replies: Replies) -> None:
    """Answer whoever is held, after a step of the others, while there are answers and room."""
    left = {trajectory: list(said) for trajectory, said in replies.items()}
    for _ in range(MAX_STEPS):
        waiting = [t for t in sorted(drive.held) if has_room(drive, t, left)]
        if not waiting and drive.engine.idle:
            return
        drive.step()
        for trajectory in waiting:
            drive.extend(trajectory, left[trajectory].pop(0))
    raise AssertionError(f"no end of the episodes in {MAX_STEPS} steps")


def assert_as_read(
    harness: Harness, drive: Drive, requests: Sequence[Request], *, anew: bool = False
) -> None:
    for request in requests:
        record = drive.records[request.trajectory]
        assert_same(harness, record, read_whole(harness, request, record.said), anew=anew)


# What is wrong with an extension of a held trajectory, and what the refusal must name.
BAD_EXTENSIONS: dict[str, tuple[Callable[[Harness], Any], Callable[[Harness], str]]] = {
    "nothing": (lambda h: (), lambda h: "empty"),
    "no tuple": (lambda h: [1, 2], lambda h: "[1, 2]"),
    "no number": (lambda h: (1, "2"), lambda h: "'2'"),
    "a truth value": (lambda h: (True,), lambda h: "True"),
    "below the vocabulary": (lambda h: (1, -1), lambda h: "-1"),
    "above the vocabulary": (lambda h: (1, h.vocab_size), lambda h: str(h.vocab_size)),
    "no room for an answer": (lambda h: (1,) * (LONG - 1), lambda h: str(LONG)),
    "more than max_tokens": (lambda h: (1,) * LONG, lambda h: str(LONG)),
}


class TurnTests:
    """An episode is one trajectory: of one version, with one line of noise and one KV."""

    @pytest.mark.parametrize("settings", [{"slots": 2}, {"slots": 6, "prefill_chunk": 2}], ids=str)
    def test_turns_are_what_comes_of_reading_it_all(
        self, harness: Harness, settings: dict[str, int]
    ) -> None:
        """Of several versions, with siblings that share a prompt and mates of one turn."""
        prompt = harness.prompt(0, 9)
        requests = [
            talk(harness, 1, raw_logprobs=True),
            talk(harness, 2, MID, temperature=0.7, top_k=9),
            talk(harness, 5, NEW, temperature=0.0, length=1),
            *(replace(talk(harness, 10 + i), prompt=prompt) for i in range(3)),
        ]
        mates = [replace(ask(harness, 20), prompt=prompt), ask(harness, 21, MID)]
        drive = start(harness, OLD, MID, NEW, **settings)
        drive.submit(*requests, *mates)
        replies = replies_to(harness, requests, turns=3)
        converse(drive, replies)
        assert_as_read(harness, drive, requests)
        assert_as_alone(harness, drive, mates)
        assert sum(len(drive.records[r.trajectory].said) for r in requests) > 2 * len(requests)
        assert drive.held == drive.live.keys() == {r.trajectory for r in requests}

    def test_every_token_of_an_episode_names_its_version(self, harness: Harness) -> None:
        drive = start(harness, OLD, MID)
        drive.submit(talk(harness, 1), talk(harness, 2, MID))
        replies = replies_to(harness, list(drive.live.values()))
        converse(drive, replies)
        for trajectory, version in ((1, OLD), (2, MID)):
            labels = drive.records[trajectory].labels
            said = sum(map(len, drive.records[trajectory].said))
            assert said
            assert labels.count((version, "observed")) == said
            assert labels.count((version, drive.digests[version])) == len(labels) - said > 0

    def test_only_what_was_said_is_read_and_nobody_waits_for_it(self, harness: Harness) -> None:
        """A long episode with a small chunk: reading it all would take a dozen steps."""
        paced(harness)
        drive = start(harness, prefill_chunk=2)
        needs(drive.engine, parking=True)
        request, mate = brief(harness, 1, length=20), ask(harness, 2, max_tokens=40)
        drive.submit(request, mate)
        drive.until_held(1)
        drive.until(2, 1)
        drive.extend(1, harness.prompt(9, 6))
        before, steps = len(drive.records[2].tokens), 0
        while not drive.held:
            drive.step()
            steps += 1
        assert 3 <= steps <= 4  # six tokens, and maybe the last of the turn before
        assert len(drive.records[2].tokens) == before + steps

    def test_a_held_trajectory_has_no_slot_and_keeps_its_version(self, harness: Harness) -> None:
        drive = start(harness, OLD, MID, slots=1)
        drive.submit(talk(harness, 1))
        drive.until_held(1)
        load = drive.engine.load()
        assert (load.versions[OLD].held, load.versions[MID].held) == (1, 0)
        assert (load.running, load.waiting, load.versions[OLD].parked) == (0, 0, 0)
        if drive.engine.capabilities.parking:  # else what was read may be read anew
            assert load.kv_used_tokens >= PROMPT
        assert drive.engine.idle
        assert drive.step(2) == []
        with pytest.raises(VersionRefused, match=rf"\b{OLD}\b"):
            drive.engine.evict(OLD)
        drive.submit(ask(harness, 2))  # has the slot
        drive.run()
        assert_as_alone(harness, drive, [ask(harness, 2)])
        drive.cancel(1)
        assert drive.engine.load().kv_used_tokens == 0
        drive.evict(OLD)

    def test_without_hold_the_end_is_the_end(self, harness: Harness) -> None:
        drive = start(harness)
        drive.submit(talk(harness, 1, hold=False))
        drive.run()
        with pytest.raises(UnknownTrajectory, match=r"\b1\b"):
            drive.engine.extend(1, (1,))
        assert drive.engine.load().kv_used_tokens == 0

    @pytest.mark.parametrize("name", BAD_EXTENSIONS)
    def test_a_bad_extension_is_refused_and_changes_nothing(
        self, harness: Harness, name: str
    ) -> None:
        make, named = BAD_EXTENSIONS[name]
        drive = start(harness)
        request = brief(harness, 1)
        drive.submit(request)
        drive.until_held(1)
        with pytest.raises(RequestRefused) as refusal:
            drive.engine.extend(1, make(harness))
        assert named(harness) in str(refusal.value)
        drive.check()
        drive.extend(1, (1, 2))
        drive.until_held(1)
        assert_as_read(harness, drive, [request])

    @pytest.mark.parametrize("state", ["waiting", "running", "parked", "extended"])
    def test_only_what_is_held_is_extended(self, harness: Harness, state: str) -> None:
        request = talk(harness, 1, stop_token_ids=())
        if state == "extended":
            request = brief(harness, 1)
        drive = start(harness)
        drive.submit(request)
        if state in ("running", "parked"):
            drive.until(1, 2)
        if state == "parked":
            drive.park(1)
        if state == "extended":
            drive.until_held(1)
            drive.extend(1, (3,))
        with pytest.raises(RequestRefused, match=r"`1` is not held"):
            drive.engine.extend(1, (1,))
        with pytest.raises(UnknownTrajectory, match=r"\b2\b"):
            drive.engine.extend(2, (1,))
        drive.check()
        drive.resume(1)
        drive.run()
        assert_as_read(harness, drive, [request])

    def test_max_tokens_counts_what_was_said(self, harness: Harness) -> None:
        """The longest extension leaves room for one token."""
        drive = start(harness)
        request, said = brief(harness, 1, max_tokens=TOKENS), harness.prompt(3, TOKENS - 2)
        drive.submit(request)
        drive.until_held(1)
        with pytest.raises(RequestRefused, match=rf"\b{TOKENS}\b"):
            drive.engine.extend(1, (*said, 1))
        drive.extend(1, said)
        drive.until_held(1)
        assert_as_read(harness, drive, [request])
        assert len(drive.records[1].tokens) == TOKENS

    @pytest.mark.parametrize("end", [FinishReason.MAX_TOKENS, FinishReason.CONTEXT])
    def test_one_without_room_is_held_all_the_same(
        self, harness: Harness, end: FinishReason
    ) -> None:
        """Whoever drives it need not know why a turn ended; also after a move."""
        most = {"max_tokens": 3 if end is FinishReason.MAX_TOKENS else harness.context}
        drive, target = start(harness), start(harness, slots=1)
        drive.submit(talk(harness, 1, length=harness.context - 6, stop_token_ids=(), **most))
        drive.until_held(1)
        assert drive.records[1].finish is end
        target.records = drive.records
        for one in (drive, target):
            with pytest.raises(RequestRefused, match=rf"\b{most['max_tokens']}\b"):
                one.engine.extend(1, (1,))
            one.check()
            if one is drive:
                drive.move(1, target)
        assert target.cancel(1)

    def test_the_context_counts_what_was_said(self, harness: Harness) -> None:
        drive = start(harness)
        context = harness.context
        assert drive.engine.context == context
        request = brief(harness, 1, length=context - 6, max_tokens=context)
        drive.submit(request)
        drive.until_held(1)
        with pytest.raises(RequestRefused, match=rf"\b{context}\b"):
            drive.engine.extend(1, (1,) * 5)
        drive.extend(1, (1,) * 4)
        drive.until_held(1)
        assert_as_read(harness, drive, [request])
        assert len(drive.records[1].tokens) == 6

    def test_an_extended_trajectory_has_the_place_of_its_age(self, harness: Harness) -> None:
        drive = start(harness, slots=1)
        requests = [brief(harness, 1), ask(harness, 2), ask(harness, 3)]
        drive.submit(*requests)
        drive.until(2, 2)
        drive.extend(1, (1, 2))
        drive.until(3, 1)
        assert len(drive.records[1].tokens) == 4
        drive.run()
        assert_as_read(harness, drive, requests[:1])
        assert_as_alone(harness, drive, requests[1:])

    @pytest.mark.parametrize("parked", [False, True])
    def test_a_held_trajectory_can_be_cancelled(self, harness: Harness, parked: bool) -> None:
        request = talk(harness, 1)
        drive = start(harness)
        drive.submit(request)
        drive.until_held(1)
        if parked:
            drive.park(1)
        first = drive.records.pop(1)
        assert drive.cancel(1) is True
        assert drive.cancel(1) is False
        drive.submit(request)
        drive.until_held(1)
        if drive.engine.capabilities.exact_noise:
            assert_same(harness, drive.records[1], first)

    def test_an_episode_goes_on_from_its_prefix(self, harness: Harness) -> None:
        """After a crash in any turn, at any token."""
        request = talk(harness, 1, raw_logprobs=True)
        replies = replies_to(harness, [request], turns=3)[1]
        whole = read_whole(harness, request, replies)
        drive = start(harness)
        for turn in range(len(replies) + 1):
            so_far = read_whole(harness, request, replies[:turn])
            for cut in range(so_far.turn_start, len(so_far.tokens)):
                drive.records.clear()
                prefix = tuple(whole.tokens[:cut])
                drive.submit(replace(request, prefix=prefix, turn_start=so_far.turn_start))
                converse(drive, {1: replies[turn:]})
                assert_same(harness, drive.records[1], whole.after(cut), anew=True)
                drive.cancel(1)


class TurnRoomTests:
    """What is held gives way before what runs, and loses nothing by it."""

    @pytest.mark.parametrize("extended", [False, True])
    @pytest.mark.parametrize("units", [(1, 3), (3, 2)])
    def test_what_is_held_gives_way_first(
        self, harness: Harness, units: tuple[int, int], extended: bool
    ) -> None:
        """Its KV and that of the other are more than there is room for."""
        unit = max(4, harness.kv_unit)
        length, tokens = (unit * n for n in units)
        held = brief(harness, 1, length=unit, max_tokens=5 * unit)
        other = ask(harness, 2, length=length, max_tokens=tokens)
        drive = start(harness, slots=1, kv_budget_tokens=6 * unit, prefill_chunk=2)
        needs(drive.engine, parking=True)
        drive.submit(held)
        drive.until_held(1)
        drive.extend(1, harness.prompt(3, 2 * unit))
        drive.until_held(1)
        so_far = len(drive.records[1].tokens)
        assert drive.engine.load().kv_used_tokens >= 3 * unit
        drive.submit(other)
        drive.until(2, 1)
        if extended:
            drive.extend(1, (1, 2))
        drive.until(2, tokens)
        assert drive.parks == 0
        assert len(drive.records[1].tokens) == so_far + 2 * extended
        if not extended:
            drive.extend(1, (1, 2))
        drive.step(2)  # it is read again in no fewer than six steps
        assert drive.held == {1}
        assert_as_read(harness, drive, [held])
        assert_as_alone(harness, drive, [other])

    def test_a_crowd_of_episodes(self, harness: Harness) -> None:
        """Of two versions, in a third of the memory that they need, with siblings among them."""
        unit = max(4, harness.kv_unit)
        prompt = harness.prompt(0, unit)
        requests = [
            replace(talk(harness, i, (OLD, MID)[i % 2], max_tokens=5 * unit), prompt=prompt)
            if i < 4
            else talk(harness, i, (OLD, MID)[i % 2], length=2 * unit, max_tokens=5 * unit)
            for i in range(8)
        ]
        drive = start(harness, OLD, MID, slots=4, kv_budget_tokens=9 * unit, prefill_chunk=3)
        drive.submit(*requests)
        replies = replies_to(harness, requests)
        converse(drive, replies)
        assert_as_read(harness, drive, requests, anew=True)


class TurnMoveTests:
    """Parking, moving and carrying between turns, and while an answer is being read."""

    def test_parked_and_held(self, harness: Harness) -> None:
        request = brief(harness, 1, length=20)
        drive = start(harness, slots=1, prefill_chunk=2)
        drive.submit(request)
        for turn in range(3):
            drive.until_held(1)
            drive.park(1)
            drive.resume(1)
            assert drive.engine.idle
            drive.park(1)
            drive.extend(1, (turn, 2))
            assert drive.engine.idle  # until it is resumed
            assert drive.engine.load().versions[OLD].parked == 1
            drive.resume(1)
            drive.step(2)
        assert_as_read(harness, drive, [request])

    def test_a_move_at_any_step_of_an_episode_does_not_matter(self, harness: Harness) -> None:
        """Between the turns of some, and while others read what was said."""
        prompt = harness.prompt(0, 9)
        requests = [talk(harness, 1), talk(harness, 2, raw_logprobs=True, length=2)]
        requests += [replace(talk(harness, 10 + i), prompt=prompt) for i in range(2)]
        replies = replies_to(harness, requests)
        for steps in (0, 1, 2, 3, 5, 8):
            source, target = start(harness, slots=2), start(harness, OLD, MID, slots=3)
            target.records = source.records
            source.submit(*requests)
            target.submit(ask(harness, 30, MID))
            left = {trajectory: list(said) for trajectory, said in replies.items()}
            for _ in range(steps):
                source.step()
                for trajectory in sorted(source.held):
                    if has_room(source, trajectory, left):
                        source.extend(trajectory, left[trajectory].pop(0))
            for trajectory in list(source.live):
                source.move(trajectory, target)
            assert not source.held
            converse(target, left)
            assert_as_read(harness, target, requests)

    def test_a_move_between_turns_takes_the_kv_along(self, harness: Harness) -> None:
        request = brief(harness, 1, length=20)
        source = start(harness)
        needs(source.engine, kv_export=True)
        source.submit(request)
        source.until_held(1)
        for turn in range(3):
            target = start(harness, slots=1, prefill_chunk=2)
            target.records = source.records
            source.move(1, target)
            assert target.held == {1}
            target.extend(1, (turn, 3))
            target.step(2)
            assert target.held == {1}
            source = target
        assert_as_read(harness, source, [request])

    def test_a_move_that_is_undone(self, harness: Harness) -> None:
        request = talk(harness, 1)
        drive = start(harness)
        drive.submit(request)
        drive.until_held(1)
        data = drive.export(1)
        with pytest.raises(ValueError, match=r"\b1\b"):
            drive.engine.import_trajectory(data)
        drive.resume(1)
        drive.extend(1, (4, 4))
        drive.run()
        assert_as_read(harness, drive, [request])

    def test_a_held_trajectory_is_carried(self, harness: Harness) -> None:
        """What was said first is then read under the target, with all before it."""
        drive = start(harness, OLD, MID)
        requests = [talk(harness, 1), talk(harness, 2, length=12)]
        drive.submit(*requests)
        drive.until_held(1, 2)
        drive.carry(OLD, MID)
        drive.evict(OLD)
        assert drive.held == {1, 2}
        assert drive.engine.load().kv_used_tokens == 0
        other = start(harness, MID)
        other.records = drive.records
        drive.move(2, other)
        for one, trajectory in ((drive, 1), (other, 2)):
            one.extend(trajectory, (5, 6))
            one.run()
            record = one.records[trajectory]
            again = replace(
                requests[trajectory - 1],
                version=MID,
                hold=False,
                prefix=tuple(record.tokens[: record.turn_start]),
                turn_start=record.turn_start,
            )
            quiet = alone(harness, [again])[trajectory]
            assert_same(harness, record.after(record.turn_start), quiet, anew=True)
