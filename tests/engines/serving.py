"""Of the contract of engines: versions come and go, requests are served or refused, and what a
trajectory says depends on nothing that is not its own."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dora_rl.core.protocol.types import TrajectoryId
from dora_rl.engines.base import FinishReason, Request, Sampled
from dora_rl.engines.errors import RequestRefused, VersionRefused
from tests.engines.driving import (
    MID,
    NEW,
    OLD,
    PROMPT,
    TOKENS,
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


class VersionTests:
    """Weights come, are named by their digest, and go when nobody needs them."""

    def test_the_digest_names_the_weights(self, harness: Harness) -> None:
        drive = start(harness, version_slots=3)
        old = drive.digests[OLD]
        assert old
        assert drive.install(MID, harness.weights(1)) != old
        assert drive.install(NEW, harness.weights(0)) == old
        assert start(harness).digests[OLD] == old

    def test_the_same_weights_again_do_nothing(self, harness: Harness) -> None:
        drive = start(harness, version_slots=1)
        request = ask(harness, 1)
        drive.submit(request)
        drive.until(1, 2)
        before = drive.digests[OLD]
        assert drive.install(OLD, harness.weights(0)) == before
        drive.run()
        assert_as_alone(harness, drive, [request])

    def test_other_weights_under_the_same_version_are_refused(self, harness: Harness) -> None:
        drive = start(harness)
        request = ask(harness, 1)
        drive.submit(request)
        drive.until(1, 2)
        with pytest.raises(VersionRefused, match=rf"\b{OLD}\b"):
            drive.engine.install(OLD, harness.weights(1))
        drive.run()
        assert_as_alone(harness, drive, [request])

    def test_no_more_versions_than_slots(self, harness: Harness) -> None:
        drive = start(harness, OLD, NEW, version_slots=2)
        with pytest.raises(VersionRefused, match=rf"\b{OLD}\b.*\b{NEW}\b"):
            drive.engine.install(MID, harness.weights(1))
        drive.check()
        drive.evict(OLD)
        drive.install(MID, harness.weights(1))
        drive.submit(ask(harness, 1, MID), ask(harness, 2, NEW))
        drive.run()
        assert_as_alone(harness, drive, [ask(harness, 1, MID), ask(harness, 2, NEW)])

    def test_weights_that_are_not_there_are_refused(self, harness: Harness, tmp_path: Path) -> None:
        drive = start(harness, version_slots=2)
        with pytest.raises(ValueError, match="nowhere"):
            drive.engine.install(MID, tmp_path / "nowhere")
        drive.check()
        drive.install(MID, harness.weights(1))

    def test_the_only_slot_changes_its_version(self, harness: Harness) -> None:
        drive = start(harness, version_slots=1)
        drive.submit(ask(harness, 1))
        drive.run()
        assert drive.install(MID, harness.weights(1), evict=OLD) == drive.digests[MID]
        assert set(drive.engine.load().versions) == {MID}
        with pytest.raises(VersionRefused, match=rf"\b{OLD}\b"):
            drive.engine.submit(ask(harness, 2))
        drive.submit(ask(harness, 3, MID))
        drive.run()
        assert_as_alone(harness, drive, [ask(harness, 1), ask(harness, 3, MID)])

    def test_what_need_not_go_stays(self, harness: Harness) -> None:
        drive = start(harness, version_slots=2)
        request = ask(harness, 1)
        drive.submit(request)
        drive.until(1, 2)
        drive.install(MID, harness.weights(1), evict=OLD)  # a slot is free
        drive.install(MID, harness.weights(1), evict=OLD)  # it is here already
        assert set(drive.engine.load().versions) == {OLD, MID}
        drive.run()
        assert_as_alone(harness, drive, [request])

    @pytest.mark.parametrize("state", ["waiting", "running", "held"])
    def test_an_install_does_not_evict_a_version_in_use(self, harness: Harness, state: str) -> None:
        drive = start(harness, version_slots=1)
        request = ask(harness, 1, hold=True)
        drive.submit(request)
        if state == "running":
            drive.until(1, 1)
        if state == "held":
            drive.until_held(1)
        with pytest.raises(VersionRefused, match=rf"\b{OLD}\b"):
            drive.engine.install(MID, harness.weights(1), evict=OLD)
        drive.check()
        drive.run()
        quiet = alone(harness, [replace(request, hold=False)])[1]
        assert_same(harness, drive.records[1], quiet)

    @pytest.mark.parametrize("wrong", ["nothing there", "another version", "nothing to evict"])
    def test_an_install_that_is_refused_evicts_nothing(
        self, harness: Harness, wrong: str, tmp_path: Path
    ) -> None:
        drive = start(harness, version_slots=1)
        directory = tmp_path / "nowhere" if wrong == "nothing there" else harness.weights(1)
        evict = {"another version": NEW, "nothing to evict": None}.get(wrong, OLD)
        with pytest.raises(ValueError):
            drive.engine.install(MID, directory, evict=evict)
        drive.check()
        drive.submit(ask(harness, 1))
        drive.run()
        assert_as_alone(harness, drive, [ask(harness, 1)])

    @pytest.mark.parametrize("state", ["waiting", "running", "parked"])
    def test_a_version_in_use_is_not_evicted(self, harness: Harness, state: str) -> None:
        drive = start(harness, OLD, MID)
        requests = [ask(harness, 1), ask(harness, 2, MID)]
        drive.submit(*requests)
        if state != "waiting":
            drive.until(1, 1)
        if state == "parked":
            drive.park(1)
        with pytest.raises(VersionRefused, match=rf"\b{OLD}\b"):
            drive.engine.evict(OLD)
        drive.check()
        drive.resume(1)
        drive.run()
        assert_as_alone(harness, drive, requests)
        drive.evict(OLD)
        with pytest.raises(VersionRefused, match=rf"\b{OLD}\b"):
            drive.engine.submit(ask(harness, 3))

    def test_a_cancelled_trajectory_holds_no_version(self, harness: Harness) -> None:
        drive = start(harness)
        drive.submit(ask(harness, 1))
        drive.step()
        drive.cancel(1)
        drive.evict(OLD)

    def test_retiring_what_is_not_here_does_nothing(self, harness: Harness) -> None:
        drive = start(harness)
        drive.evict(MID)
        drive.evict(OLD)
        drive.evict(OLD)
        assert drive.engine.load().versions == {}

    def test_a_version_that_is_not_installed_is_not_run(self, harness: Harness) -> None:
        drive = start(harness)
        with pytest.raises(VersionRefused, match=rf"\b{MID}\b"):
            drive.engine.submit(ask(harness, 1, MID))
        drive.check()

    def test_every_token_names_its_weights(self, harness: Harness) -> None:
        """`Drive` compares the labels; here, that they are the versions that were asked for."""
        drive = start(harness, OLD, MID, NEW)
        for i, version in enumerate((NEW, OLD, MID)):
            drive.submit(ask(harness, i, version))
        drive.run()
        for i, version in enumerate((NEW, OLD, MID)):
            label = (version, drive.digests[version])
            assert drive.records[i].labels == [label] * TOKENS
        assert len({label for record in drive.records.values() for label in record.labels}) == 3

    def test_three_versions_at_once_are_three_engines(self, harness: Harness) -> None:
        needs(harness.make(), exact_noise=True)
        prompt = harness.prompt(0, PROMPT)
        requests = [
            replace(ask(harness, i, version), prompt=prompt)
            for i, version in enumerate((OLD, MID, NEW) * 2)
        ]
        drive = start(harness, OLD, MID, NEW, slots=6)
        drive.submit(*requests)
        drive.run()
        for version in (OLD, MID, NEW):
            own = [request for request in requests if request.version == version]
            single = start(harness, version, version_slots=1)
            single.submit(*own)
            for request in own:
                quiet = single.run()[request.trajectory]
                assert_same(harness, drive.records[request.trajectory], quiet)

    def test_weights_matter(self, harness: Harness) -> None:
        drive = start(harness, OLD, MID)
        for version in (OLD, MID):
            for i in range(4):
                request = ask(harness, i, temperature=0.0, raw_logprobs=True)
                drive.submit(replace(request, trajectory=10 * version + i, version=version))
        drive.run()
        old, mid = ([drive.records[10 * v + i].raw for i in range(4)] for v in (OLD, MID))
        assert old != mid


# What is wrong with a request, and what the refusal must name.
BAD_REQUESTS: dict[str, tuple[Callable[[Harness, Request], Request], Callable[[Harness], str]]] = {
    "duplicate id": (lambda h, good: replace(good, trajectory=1), lambda h: "1"),
    "empty prompt": (lambda h, good: replace(good, prompt=()), lambda h: "99"),
    "prompt beyond the context": (
        lambda h, good: replace(good, prompt=h.prompt(0, h.context + 1)),
        lambda h: str(h.context),
    ),
    "prompt that fills the context": (
        lambda h, good: replace(good, prompt=h.prompt(0, h.context)),
        lambda h: str(h.context),
    ),
    "prefix that fills the context": (
        lambda h, good: replace(
            good,
            prefix=h.prompt(0, h.context - PROMPT),
            sampling=replace(good.sampling, max_tokens=h.context),
        ),
        lambda h: str(h.context),
    ),
    "prefix as long as max_tokens": (
        lambda h, good: replace(good, prefix=h.prompt(0, TOKENS)),
        lambda h: str(TOKENS),
    ),
    "token below the vocabulary": (
        lambda h, good: replace(good, prompt=(1, -1)),
        lambda h: "-1",
    ),
    "token above the vocabulary": (
        lambda h, good: replace(good, prompt=(1, h.vocab_size)),
        lambda h: str(h.vocab_size),
    ),
    "token of the prefix above the vocabulary": (
        lambda h, good: replace(good, prefix=(1, h.vocab_size)),
        lambda h: str(h.vocab_size),
    ),
    "stop token above the vocabulary": (
        lambda h, good: ask(h, 99, stop_token_ids=(0, h.vocab_size)),
        lambda h: str(h.vocab_size),
    ),
    "negative temperature": (lambda h, good: ask(h, 99, temperature=-1.0), lambda h: "-1"),
    "endless temperature": (lambda h, good: ask(h, 99, temperature=math.inf), lambda h: "inf"),
    "no top_p": (lambda h, good: ask(h, 99, top_p=0.0), lambda h: "top_p"),
    "more than the KV budget": (
        lambda h, good: ask(h, 99, max_tokens=h.context),
        lambda h: str(budget(h)),
    ),
}


class RequestTests:
    """What is asked for is given; what cannot be given is refused by name, alone."""

    @pytest.mark.parametrize("name", BAD_REQUESTS)
    def test_a_bad_request_is_refused_and_the_others_go_on(
        self, harness: Harness, name: str
    ) -> None:
        change, named = BAD_REQUESTS[name]
        drive = start(harness, kv_budget_tokens=budget(harness))
        good = [ask(harness, i) for i in (1, 2, 3)]
        drive.submit(*good[:2])
        drive.step(2 if harness.one_token_a_step else 1)  # else they may have ended by then
        before = drive.engine.load().versions[OLD]
        with pytest.raises(RequestRefused) as refusal:
            drive.engine.submit(change(harness, ask(harness, 99)))
        assert named(harness) in str(refusal.value)
        after = drive.engine.load().versions[OLD]
        assert replace(after, tokens_per_s=0.0) == replace(before, tokens_per_s=0.0)
        assert drive.engine.cancel(99) is False
        drive.submit(good[2])
        drive.run()
        assert_as_alone(harness, drive, good)

    def test_max_tokens(self, harness: Harness) -> None:
        drive = start(harness)
        for n in (1, 2, TOKENS):
            drive.submit(ask(harness, n, max_tokens=n))
        drive.run()
        for n in (1, 2, TOKENS):
            assert len(drive.records[n].tokens) == n
            assert drive.records[n].finish is FinishReason.MAX_TOKENS

    def test_the_end_of_the_context(self, harness: Harness) -> None:
        drive = start(harness)
        for left in (1, 3):
            drive.submit(
                ask(harness, left, length=harness.context - left, max_tokens=harness.context)
            )
        drive.run()
        for left in (1, 3):
            assert len(drive.records[left].tokens) == left
            assert drive.records[left].finish is FinishReason.CONTEXT

    def test_a_stop_token_is_the_last(self, harness: Harness) -> None:
        free = alone(harness, [ask(harness, 1)])[1].tokens
        stop, unseen = free[4], min(set(range(harness.vocab_size)) - set(free))
        drive = start(harness)
        drive.submit(ask(harness, 1, stop_token_ids=(unseen, stop)))
        record = drive.run()[1]
        assert record.tokens == free[: free.index(stop) + 1]
        assert record.finish is FinishReason.STOP_TOKEN

    def test_the_end_of_text_is_the_last(self, harness: Harness) -> None:
        needs(harness.make(), exact_noise=True)
        free = start(harness, slots=8)
        met: list[Request] = []
        for n in range(0, 512, 8):
            requests = [ask(harness, n + i) for i in range(8)]
            free.submit(*requests)
            free.run()
            met = [r for r in requests if harness.eos in free.records[r.trajectory].tokens]
            if met:
                break
        assert met, "no end of text in 4096 tokens: the test needs weights that give one"
        trajectory = met[0].trajectory
        cut = free.records[trajectory].tokens.index(harness.eos) + 1
        drive = start(harness)
        drive.submit(ask(harness, trajectory, ignore_eos=False))
        record = drive.run()[trajectory]
        assert record.tokens == free.records[trajectory].tokens[:cut]
        assert record.finish is FinishReason.STOP_TOKEN

    def test_one_token_a_step_for_all_that_run(self, harness: Harness) -> None:
        paced(harness)
        drive = start(harness, slots=3)
        drive.submit(*(ask(harness, i) for i in range(3)))
        drive.until(2, 1)
        for _ in range(3):
            outputs = drive.step()
            assert sorted(output.trajectory for output in outputs) == [0, 1, 2]
            assert all(isinstance(one, Sampled) and len(one.tokens) == 1 for one in outputs)

    def test_a_free_slot_is_used_in_the_next_step(self, harness: Harness) -> None:
        paced(harness)
        drive = start(harness, slots=2)
        drive.submit(ask(harness, 1))
        drive.until(1, 2)
        drive.submit(ask(harness, 2), ask(harness, 3))
        drive.step()
        load = drive.engine.load()
        assert (load.running, load.waiting) == (2, 1)
        assert len(drive.records[1].tokens) == 3

    def test_who_waits_starts_in_order_of_submission(self, harness: Harness) -> None:
        for slots in (1, 2):
            drive = start(harness, OLD, MID, slots=slots)
            order = [9, 2, 5, 4, 7, 0]
            for i, trajectory in enumerate(order):
                version = (OLD, MID, MID)[i % 3]
                drive.submit(ask(harness, trajectory, version, max_tokens=1 + i % 3))
            firsts: list[TrajectoryId] = []
            while not drive.engine.idle:
                heard = {output.trajectory for output in drive.step()}
                firsts += [t for t in order if t in heard and t not in firsts]
            assert firsts == order

    def test_an_id_may_return_once_it_is_free(self, harness: Harness) -> None:
        needs(harness.make(), exact_noise=True)
        request = ask(harness, 1)
        drive = start(harness)
        drive.submit(request)
        drive.run()
        first = drive.records.pop(1)
        drive.submit(request)
        assert_same(harness, drive.run()[1], first)

    def test_raw_logprobs_are_those_of_the_model(self, harness: Harness) -> None:
        """Without filters at temperature 1 the two are one; filters only raise the other."""
        drive = start(harness)
        plain, greedy = {"raw_logprobs": True}, {"raw_logprobs": True, "temperature": 0.0}
        drive.submit(ask(harness, 1, **plain), ask(harness, 2, **greedy))
        drive.submit(ask(harness, 3, top_k=3, **plain))
        drive.run()
        plainly, greedily, filtered = (drive.records[i] for i in (1, 2, 3))
        slack = max(harness.tolerance, 1e-6)
        assert plainly.raw == pytest.approx(plainly.logprobs, abs=slack)
        assert greedily.logprobs == [0.0] * TOKENS
        assert max(greedily.raw) < 0
        assert all(
            own > raw - slack for own, raw in zip(filtered.logprobs, filtered.raw, strict=True)
        )
        assert sum(filtered.logprobs) > sum(filtered.raw)

    def test_a_prefix_goes_on_where_it_was(self, harness: Harness) -> None:
        requests = mixed(harness)
        quiet = alone(harness, requests)
        drive = start(harness, slots=3)
        for cut in range(1, TOKENS):
            for request in requests:
                whole = quiet[request.trajectory]
                if cut >= len(whole.tokens):
                    continue
                drive.records.clear()
                drive.submit(replace(request, prefix=tuple(whole.tokens[:cut])))
                rest = drive.run()[request.trajectory]
                assert_same(harness, rest, whole.after(cut), anew=True)


class NoiseTests:
    """A trajectory is a function of weights, prompt, sampling, seed and id: of nothing else."""

    def test_seed_and_id_make_the_noise(self, harness: Harness) -> None:
        prompt = harness.prompt(0, PROMPT)
        drive = start(harness, slots=8)
        drive.submit(*(replace(ask(harness, i), prompt=prompt) for i in range(4)))
        drive.submit(*(replace(ask(harness, 10 + i, seed=5), prompt=prompt) for i in range(4)))
        drive.run()
        by_id = {tuple(drive.records[i].tokens) for i in range(4)}
        assert len(by_id) > 1
        other = start(harness)
        other.submit(*(replace(ask(harness, i, seed=5), prompt=prompt) for i in range(4)))
        other.run()
        assert by_id != {tuple(other.records[i].tokens) for i in range(4)}

    def test_each_position_has_its_own_noise(self, harness: Harness) -> None:
        """The same text before the token, once as its first and once as its second."""
        needs(harness.make(), exact_noise=True)
        first, second = start(harness, slots=8), start(harness, slots=8)
        for i in range(8):
            request = ask(harness, i, max_tokens=2)
            first.submit(replace(request, prompt=(*request.prompt, 1)))
            second.submit(replace(request, prefix=(1,)))
        first.run()
        second.run()
        pairs = [(first.records[i].tokens[0], second.records[i].tokens[0]) for i in range(8)]
        assert any(one != other for one, other in pairs)

    def test_greedy_has_no_noise(self, harness: Harness) -> None:
        """Greedy, and each filter that leaves the most probable token only."""
        wishes: list[dict[str, Any]] = [
            {"temperature": 0.0},
            {"temperature": 0.0, "seed": 77, "top_p": 0.5, "top_k": 3},
            {"top_k": 1},
            {"top_p": 1e-9},
            {"min_p": 1.0},
        ]
        prompt = harness.prompt(0, PROMPT)
        drive = start(harness, slots=5)
        for i, wish in enumerate(wishes):
            drive.submit(replace(ask(harness, i, **wish), prompt=prompt))
        drive.run()
        for i in range(1, len(wishes)):
            assert drive.records[i].tokens == drive.records[0].tokens
            assert drive.records[i].logprobs == pytest.approx([0.0] * TOKENS, abs=1e-6)

    @pytest.mark.parametrize("slots", [1, 2, 4, 8])
    def test_batch_mates_and_slots_do_not_matter(self, harness: Harness, slots: int) -> None:
        requests = mixed(harness, OLD, MID)
        drive = start(harness, OLD, MID, slots=slots)
        drive.submit(*requests)
        drive.run()
        assert_as_alone(harness, drive, requests)

    def test_the_order_and_time_of_submission_do_not_matter(self, harness: Harness) -> None:
        requests = mixed(harness)
        drive = start(harness, slots=3)
        for request in reversed(requests):
            drive.submit(request)
            drive.step()
        drive.run()
        assert_as_alone(harness, drive, requests)

    def test_how_the_prompt_is_read_does_not_matter(self, harness: Harness) -> None:
        requests = [ask(harness, i, length=length) for i, length in enumerate((1, 7, 12, 23))]
        quiet = alone(harness, requests)
        for chunk in (1, 4, 7):
            drive = start(harness, prefill_chunk=chunk)
            drive.submit(*requests)
            for trajectory, record in drive.run().items():
                assert_same(harness, record, quiet[trajectory], anew=True)

    def test_a_cancelled_neighbour_does_not_matter(self, harness: Harness) -> None:
        requests = mixed(harness)
        gone = ask(harness, 1, max_tokens=30)
        for steps in range(4):
            drive = start(harness, slots=4)
            drive.submit(requests[0], gone, *requests[1:])
            drive.step(steps)
            assert drive.cancel(1)
            drive.run()
            assert_as_alone(harness, drive, requests)
