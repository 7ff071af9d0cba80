"""How the suite of engines drives one: a description of the implementation, and a witness.

`Harness` is what an implementation says of itself. `Drive` passes calls to an engine and checks
after each of them what must always hold; its records are what the tests compare.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from dora_rl.core.protocol.types import TrajectoryId, Version
from dora_rl.engines.base import (
    Engine,
    Failed,
    FinishReason,
    Output,
    Parked,
    ParkReason,
    Request,
    Resumed,
    Sampled,
    Sampling,
)

OLD, MID, NEW = 3, 4, 7  # the versions of the tests, and which weights they are
WEIGHTS = {OLD: 0, MID: 1, NEW: 2}
PROMPT = 5  # tokens
TOKENS = 8
MAX_STEPS = 2000


class Harness:
    """What the suite must know of an implementation, and how to make one."""

    vocab_size: int
    context: int  # at least 48 tokens, and 12 times `kv_unit`
    eos: int  # not so rare: the suite samples up to 4096 tokens to meet one
    exact: bool = True  # the same trajectory gives the same bits; else within `tolerance`
    tolerance: float = 0.0  # of a log-probability whose KV was computed anew
    kv_unit: int = 1  # KV is given out in pieces of so many tokens
    most_versions: int = 1000  # that an engine can be made for
    one_token_a_step: bool = True  # else some tests of what is when are skipped: see `paced`

    def __init__(self) -> None:
        self._made: list[Engine] = []
        self.quiet: dict[Request, Record] = {}  # see `alone`

    def __enter__(self) -> "Harness":
        return self

    def __exit__(self, *_: object) -> None:
        for engine in list(self._made):
            self.close(engine)

    def _make(self, **settings: Any) -> Engine:
        """An engine. Only what a test asks for is in `settings`: see `make`."""
        raise NotImplementedError

    def weights(self, n: int) -> Path:
        """The directory of the n-th set of weights; 0, 1, 2 and 3 differ."""
        raise NotImplementedError

    def make(
        self,
        *,
        slots: int = 4,
        version_slots: int | None = None,  # else 3, or as many as the engine can have
        deterministic: bool = True,
        **settings: int,  # kv_budget_tokens, prefill_chunk
    ) -> Engine:
        settings |= {"slots": slots, "version_slots": version_slots or min(3, self.most_versions)}
        if settings["version_slots"] > self.most_versions:
            pytest.skip(f"the engine holds {self.most_versions} versions at once")
        engine = self._make(deterministic=deterministic, **settings)
        self._made.append(engine)
        return engine

    def close(self, engine: Engine) -> None:
        self._made.remove(engine)
        engine.close()

    def prompt(self, n: int, length: int) -> tuple[int, ...]:
        rng = random.Random(n)
        return tuple(rng.randrange(self.vocab_size) for _ in range(length))

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of these tokens, as the engine has it: for `StopStringContract`."""
        raise NotImplementedError

    def fail(self, engine: Engine, trajectory: TrajectoryId) -> None:
        """Make the next step of this trajectory fail: for `FailureContract`."""
        raise NotImplementedError

    def fail_load(self, engine: Engine) -> None:
        """Make the next install fail while it loads, after it has evicted: `FailureContract`."""
        raise NotImplementedError


@dataclass
class Record:
    """All that was heard of one trajectory, on whatever engine, and what it was told."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    raw: list[float] = field(default_factory=list)
    labels: list[tuple[Version, str]] = field(default_factory=list)  # of each token
    finish: FinishReason | None = None  # of the last turn
    failure: str | None = None
    turn_start: int = 0
    said: list[tuple[int, ...]] = field(default_factory=list)  # by the environment
    before: tuple[int, ...] = ()  # the prefix that it came with

    def observe(self, tokens: tuple[int, ...], request: Request) -> None:
        """What the environment said goes between what was sampled, with nothing to its name."""
        self.tokens += tokens
        self.logprobs += [0.0] * len(tokens)
        self.raw += [0.0] * len(tokens) * request.sampling.raw_logprobs
        self.labels += [(request.version, "observed")] * len(tokens)
        self.turn_start = len(self.tokens)
        self.said.append(tokens)
        self.finish = None

    def append(self, turn: "Record") -> None:
        """A turn that another engine sampled."""
        self.tokens += turn.tokens
        self.logprobs += turn.logprobs
        self.raw += turn.raw
        self.labels += turn.labels
        self.finish, self.failure = turn.finish, turn.failure

    def after(self, cut: int) -> "Record":
        """The same without its first tokens."""
        return replace(
            self,
            tokens=self.tokens[cut:],
            logprobs=self.logprobs[cut:],
            raw=self.raw[cut:],
            labels=self.labels[cut:],
        )


class Drive:
    """One engine, what it was asked, and what it answered; `records` may be shared by several."""

    def __init__(self, engine: Engine, records: dict[TrajectoryId, Record] | None = None) -> None:
        self.engine = engine
        self.records: dict[TrajectoryId, Record] = {} if records is None else records
        self.digests: dict[Version, str] = {}
        self.live: dict[TrajectoryId, Request] = {}
        self.asked: set[TrajectoryId] = set()  # parked by us
        self.no_room: set[TrajectoryId] = set()  # parked by the engine
        self.held: set[TrajectoryId] = set()  # wait for the environment
        self.parks = 0  # by the engine, in all

    def install(self, version: Version, directory: Path, evict: Version | None = None) -> str:
        full = version not in self.digests and len(self.digests) == self.engine.load().version_slots
        digest = self.engine.install(version, directory, evict)
        if full and evict is not None:
            del self.digests[evict]
        self.digests[version] = digest
        self.check()
        return digest

    def evict(self, version: Version) -> None:
        self.engine.evict(version)
        self.digests.pop(version, None)
        self.check()

    def submit(self, *requests: Request) -> None:
        for request in requests:
            self.engine.submit(request)
            if request.held:
                self.held.add(request.trajectory)
            self._enter(request)

    def extend(self, trajectory: TrajectoryId, tokens: tuple[int, ...]) -> None:
        self.engine.extend(trajectory, tokens)
        self.held.discard(trajectory)
        self.records[trajectory].observe(tokens, self.live[trajectory])
        self.check()

    def cancel(self, trajectory: TrajectoryId) -> bool:
        was_here = self.engine.cancel(trajectory)
        assert was_here == (trajectory in self.live)
        self._forget(trajectory)
        self.check()
        return was_here

    def park(self, trajectory: TrajectoryId) -> None:
        """Stopped with its KV kept: what an export does here."""
        self.export(trajectory)

    def resume(self, trajectory: TrajectoryId) -> None:
        if self.engine.capabilities.kv_export:  # else nothing can have been stopped
            self.engine.resume(trajectory)
        self.asked.discard(trajectory)
        self.check()

    def export(self, trajectory: TrajectoryId) -> bytes:
        needs(self.engine, kv_export=True)
        data = self.engine.export_trajectory(trajectory)
        self._ask(trajectory)
        return data

    def take(self, data: bytes, request: Request, *, held: bool = False) -> None:
        assert self.engine.import_trajectory(data) == request.trajectory
        if held:
            self.held.add(request.trajectory)
        self._enter(request)

    def move(self, trajectory: TrajectoryId, target: "Drive") -> None:
        """With its KV where both can, else by its tokens."""
        if not (self.engine.capabilities.kv_export and target.engine.capabilities.kv_export):
            self.move_by_tokens(trajectory, target)
            return
        held = trajectory in self.held
        target.take(self.export(trajectory), self.live[trajectory], held=held)
        self.cancel(trajectory)

    def carry(self, source: Version, target: Version) -> None:
        """All of `source` continue under `target`: what they have is read anew."""
        for request in [one for one in self.live.values() if one.version == source]:
            self.move_by_tokens(request.trajectory, self, target)

    def move_by_tokens(
        self, trajectory: TrajectoryId, target: "Drive", version: Version | None = None
    ) -> None:
        """Without KV: what it has is read anew. With a version, it continues under that."""
        request, held = self.live[trajectory], trajectory in self.held
        record = self.records[trajectory]
        begun = len(record.before) + record.turn_start if record.said else request.turn_start
        self.cancel(trajectory)
        request = replace(
            request,
            version=request.version if version is None else version,
            prefix=record.before + tuple(record.tokens),
            turn_start=begun,
            held=held,
        )
        target.submit(request)

    def step(self, times: int = 1) -> list[Output]:
        """All that `times` steps report."""
        heard: list[Output] = []
        for _ in range(times):
            was_idle = self.engine.idle
            outputs = self.engine.step()
            assert not (was_idle and outputs)
            for output in outputs:
                self._hear(output)
            self.check()
            heard += outputs
        return heard

    def run(self) -> dict[TrajectoryId, Record]:
        """Steps until there is nothing to do."""
        for _ in range(MAX_STEPS):
            if self.engine.idle:
                return self.records
            self.step()
        raise AssertionError(f"not idle after {MAX_STEPS} steps: {self.engine.load()}")

    def until(self, trajectory: TrajectoryId, tokens: int) -> None:
        """Steps until a trajectory has so many tokens."""
        for _ in range(MAX_STEPS):
            if len(self.records[trajectory].tokens) >= tokens:
                return
            self.step()
        raise AssertionError(f"no {tokens} tokens of {trajectory} in {MAX_STEPS} steps")

    def until_held(self, *trajectories: TrajectoryId) -> None:
        """Steps until the turns of all these have ended."""
        for _ in range(MAX_STEPS):
            if self.held.issuperset(trajectories):
                return
            self.step()
        raise AssertionError(f"no end of turn of {trajectories} in {MAX_STEPS} steps")

    def check(self) -> None:
        """What holds at every moment."""
        load = self.engine.load()
        assert {v: one.digest for v, one in load.versions.items()} == self.digests
        assert len(load.versions) <= load.version_slots
        assert load.running <= load.slots
        assert 0 <= load.kv_used_tokens <= load.kv_budget_tokens
        for version, one in load.versions.items():
            here = [t for t, request in self.live.items() if request.version == version]
            assert one.running + one.waiting + one.parked + one.held == len(here)
            assert one.held == len(self.held.intersection(here))
            parked = (self.asked | self.no_room) - self.held
            assert one.parked == len(parked.intersection(here))
            assert 0 <= one.tokens_per_s < math.inf
        if not self.live:
            assert load.kv_used_tokens == 0
        assert self.engine.idle == (self.live.keys() == self.asked | self.held)

    def _enter(self, request: Request) -> None:
        self.live[request.trajectory] = request
        self.records.setdefault(request.trajectory, Record(before=request.prefix))
        self.check()

    def _forget(self, trajectory: TrajectoryId) -> None:
        self.live.pop(trajectory, None)
        self.asked.discard(trajectory)
        self.no_room.discard(trajectory)
        self.held.discard(trajectory)

    def _ask(self, trajectory: TrajectoryId) -> None:
        self.asked.add(trajectory)
        self.no_room.discard(trajectory)
        self.check()

    def _hear(self, output: Output) -> None:
        trajectory = output.trajectory
        assert trajectory in self.live, f"{output} of a trajectory that is not here"
        assert trajectory not in self.held, f"{output} of one that is held"
        record = self.records[trajectory]
        if isinstance(output, Sampled):
            assert trajectory not in self.asked | self.no_room, f"{output} of one that is parked"
            self._hear_tokens(output, record)
        elif isinstance(output, Parked):
            if output.reason is ParkReason.KV_BUDGET:
                assert trajectory not in self.asked | self.no_room, f"{output} for the second time"
                self.no_room.add(trajectory)
                self.parks += 1
        elif isinstance(output, Resumed):
            assert trajectory in self.no_room, f"{output} of one that was not parked for room"
            self.no_room.discard(trajectory)
        else:
            assert isinstance(output, Failed)
            record.failure = output.reason
            self._forget(trajectory)

    def _hear_tokens(self, output: Sampled, record: Record) -> None:
        request = self.live[output.trajectory]
        assert (output.version, output.digest) == (request.version, self.digests[request.version])
        assert len(output.tokens) == len(output.logprobs) > 0
        assert all(math.isfinite(number) and number <= 0 for number in output.logprobs)
        assert (output.raw_logprobs is not None) == request.sampling.raw_logprobs
        record.tokens += output.tokens
        record.logprobs += output.logprobs
        record.labels += [(output.version, output.digest)] * len(output.tokens)
        if output.raw_logprobs is not None:
            assert len(output.raw_logprobs) == len(output.tokens)
            assert all(math.isfinite(number) and number <= 0 for number in output.raw_logprobs)
            record.raw += output.raw_logprobs
        if output.finish:
            assert record.finish is None, f"{output} after its end"
            record.finish = output.finish
            if request.hold:
                self.held.add(output.trajectory)
            else:
                self._forget(output.trajectory)


def needs(engine: Engine, *, version_slots: int = 1, **abilities: bool) -> None:
    """Skip a test of what this engine cannot."""
    able = engine.capabilities
    if able.version_slots < version_slots:
        pytest.skip(f"the engine holds {able.version_slots} of {version_slots} versions at once")
    for ability, wanted in abilities.items():
        if getattr(able, ability) != wanted:
            pytest.skip(f"the engine's {ability} is {not wanted}")


def paced(harness: Harness) -> None:
    """Skip a test that counts steps, where a trajectory may have got further in them."""
    if not harness.one_token_a_step:
        pytest.skip("the engine gives several tokens a step")


def start(harness: Harness, *versions: Version, **settings: int) -> Drive:
    """An engine with these versions (by default, the oldest)."""
    drive = Drive(harness.make(**settings))
    needs(drive.engine, version_slots=len(versions))
    for version in versions or (OLD,):
        drive.install(version, harness.weights(WEIGHTS[version]))
    return drive


def ask(
    harness: Harness,
    trajectory: TrajectoryId,
    version: Version = OLD,
    *,
    length: int = PROMPT,
    seed: int = 11,
    hold: bool = False,
    **sampling: Any,
) -> Request:
    """A request of a few tokens, with a prompt of its own."""
    wishes = Sampling(**{"max_tokens": TOKENS, "ignore_eos": True} | sampling)
    prompt = harness.prompt(trajectory, length)
    return Request(trajectory, version, prompt, wishes, seed=seed, hold=hold)


def mixed(harness: Harness, *versions: Version) -> list[Request]:
    """Requests that differ in all that may differ within a batch."""
    wishes: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0, "length": 2},
        {"temperature": 0.7, "top_k": 5, "seed": 1, "max_tokens": 3},
        {"top_p": 0.8, "raw_logprobs": True, "length": 9},
        {"min_p": 0.1, "top_k": 9, "seed": 2**64 - 1},
        {"temperature": 2.0, "top_p": 0.5, "length": 1},
    ]
    used = versions or (OLD,)
    return [ask(harness, 20 + i, used[i % len(used)], **wish) for i, wish in enumerate(wishes)]


def alone(harness: Harness, requests: Sequence[Request]) -> dict[TrajectoryId, Record]:
    """What each gives with nobody beside it: one slot, one trajectory at a time."""
    needs(harness.make(), exact_noise=True)
    missing = [request for request in requests if request not in harness.quiet]
    if missing:
        for version in dict.fromkeys(one.version for one in missing):
            drive = start(harness, version, slots=1)
            for request in [one for one in missing if one.version == version]:
                drive.records.clear()
                drive.submit(request)
                harness.quiet[request] = drive.run()[request.trajectory]
    return {request.trajectory: harness.quiet[request] for request in requests}


def read_whole(harness: Harness, request: Request, replies: Sequence[tuple[int, ...]]) -> Record:
    """An episode without holding anything: each turn is alone, and reads all before it anew."""
    whole = Record()
    for said in (None, *replies):
        if said:
            whole.observe(said, request)
        so_far = tuple(whole.tokens)
        turn = replace(request, hold=False, prefix=so_far, turn_start=whole.turn_start)
        whole.append(alone(harness, [turn])[request.trajectory])
    return whole


def assert_same(harness: Harness, found: Record, quiet: Record, *, anew: bool = False) -> None:
    """The same trajectory; `anew` where its KV was computed again, so that rounding differs."""
    assert found.tokens == quiet.tokens
    assert found.finish == quiet.finish
    assert found.failure == quiet.failure
    for ours, theirs in ((found.logprobs, quiet.logprobs), (found.raw, quiet.raw)):
        assert ours == (
            theirs if harness.exact and not anew else pytest.approx(theirs, abs=harness.tolerance)
        )


def assert_ended(harness: Harness, record: Record, request: Request) -> None:
    """It ended as it says: not before, not later. What holds of it whatever was sampled."""
    sampling = request.sampling
    turn, response = record.tokens[record.turn_start :], len(record.before) + len(record.tokens)
    ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else (harness.eos,))}
    assert record.failure is None
    assert len(record.tokens) == len(record.logprobs) == len(record.labels)
    assert turn and ends.isdisjoint(turn[:-1])
    assert response <= sampling.max_tokens
    assert len(request.prompt) + response <= harness.context
    match record.finish:
        case FinishReason.STOP_TOKEN:
            assert turn[-1] in ends
        case FinishReason.STOP_STRING:
            assert any(stop in harness.decode(turn) for stop in sampling.stop)
        case FinishReason.MAX_TOKENS:
            assert response == sampling.max_tokens
        case FinishReason.CONTEXT:
            assert len(request.prompt) + response == harness.context
        case _:
            raise AssertionError(f"trajectory {request.trajectory} has not ended")


def assert_as_alone(harness: Harness, drive: Drive, requests: Sequence[Request]) -> None:
    for request in requests:
        assert_ended(harness, drive.records[request.trajectory], request)
    if not drive.engine.capabilities.exact_noise:
        return
    quiet = alone(harness, requests)
    for request in requests:
        assert_same(harness, drive.records[request.trajectory], quiet[request.trajectory])


def budget(harness: Harness) -> int:
    """KV for a few requests, and less than the context."""
    return 10 * max(4, harness.kv_unit)
