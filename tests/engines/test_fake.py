"""The fake engine: the contract of engines, and what only a fake can promise."""

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from dora_rl.core.protocol.types import TrajectoryId
from dora_rl.engines import wire
from dora_rl.engines.base import Engine, Parked, Request, Resumed, Sampled, Sampling
from dora_rl.engines.errors import ImportRefused, RequestRefused, UnknownTrajectory, VersionRefused
from dora_rl.engines.fake import FakeEngine, distribution, draw, logits_after, read_tokens
from tests.engines.contract import EngineContract, FailureContract, Harness, StopStringContract
from tests.engines.driving import OLD, Drive, alone, ask, start
from tests.engines.storms import Storm


def as_text(tokens: Sequence[int]) -> str:
    return "".join(chr(ord("A") + token) for token in tokens)


def write_weights(root: Path, n: int) -> Path:
    directory = root / f"weights-{n}"
    directory.mkdir(exist_ok=True)
    (directory / "manifest.json").write_text(json.dumps({"version": n, "digest": f"digest-{n}"}))
    return directory


class FakeHarness(Harness):
    vocab_size = 32
    context = 64
    eos = 3

    def __init__(self, root: Path, *, most_versions: int = 1000, **abilities: bool) -> None:
        super().__init__()
        self.root = root
        self.most_versions = most_versions
        self.abilities = abilities

    def _make(self, *, deterministic: bool, **settings: Any) -> Engine:
        return FakeEngine(
            **settings,
            **self.abilities,
            vocab_size=self.vocab_size,
            context=self.context,
            eos=self.eos,
            decode=as_text,
        )

    def weights(self, n: int) -> Path:
        return write_weights(self.root, n)

    def decode(self, tokens: Sequence[int]) -> str:
        return as_text(tokens)

    def fail(self, engine: Engine, trajectory: TrajectoryId) -> None:
        assert isinstance(engine, FakeEngine)
        engine.fail_next(trajectory)

    def fail_load(self, engine: Engine) -> None:
        assert isinstance(engine, FakeEngine)
        engine.fail_next_load()


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    with FakeHarness(tmp_path) as made:
        yield made


class TestContract(EngineContract, StopStringContract, FailureContract):
    """The fake keeps every promise of an engine."""


class TestOneVersion(EngineContract, StopStringContract, FailureContract):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> Iterator[Harness]:
        with FakeHarness(tmp_path, most_versions=1) as made:
            yield made


class TestWithoutKvExport(EngineContract, StopStringContract, FailureContract):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> Iterator[Harness]:
        with FakeHarness(tmp_path, kv_export=False) as made:
            yield made


class TestWithoutParking(EngineContract, StopStringContract, FailureContract):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> Iterator[Harness]:
        with FakeHarness(tmp_path, parking=False) as made:
            yield made


class TestWithoutExactNoise(EngineContract, StopStringContract, FailureContract):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> Iterator[Harness]:
        with FakeHarness(tmp_path, exact_noise=False) as made:
            yield made


@pytest.mark.parametrize("seed", range(100, 140))
def test_more_storms(harness: Harness, seed: int) -> None:
    Storm(harness, seed).run(120)


def chi_square(counts: Counter[int], chances: dict[int, float]) -> tuple[float, int]:
    """The statistic, and its degrees of freedom."""
    drawn = sum(counts.values())
    assert set(counts) <= set(chances)
    stat = sum((counts[t] - drawn * p) ** 2 / (drawn * p) for t, p in chances.items())
    return stat, len(chances) - 1


@pytest.mark.parametrize(
    "wishes",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0, "top_k": 7},
        {"top_p": 0.7},
        {"temperature": 2.0, "top_k": 12, "top_p": 0.8, "min_p": 0.05},
    ],
)
def test_tokens_are_drawn_from_the_known_distribution(
    harness: Harness, wishes: dict[str, Any]
) -> None:
    """The first token of many trajectories with one prompt, and its log-probability."""
    drive = start(harness, slots=3000, kv_budget_tokens=10**6)
    sampling = Sampling(max_tokens=1, raw_logprobs=True, **wishes)
    prompt = harness.prompt(0, 5)
    for i in range(3000):
        drive.engine.submit(Request(i, OLD, prompt, sampling))
    outputs = drive.engine.step()
    assert len(outputs) == 3000
    logits = logits_after(read_tokens(drive.digests[OLD], prompt), harness.vocab_size)
    chances = distribution(logits, sampling)
    raw = distribution(logits, Sampling())
    counts: Counter[int] = Counter()
    for output in outputs:
        assert isinstance(output, Sampled)
        (token,) = output.tokens
        counts[token] += 1
        assert output.logprobs == (math.log(chances[token]),)
        assert output.raw_logprobs == (pytest.approx(math.log(raw[token])),)
    stat, freedom = chi_square(counts, chances)
    assert stat < freedom + 4 * math.sqrt(2 * freedom)


def test_distributions_by_hand() -> None:
    logits = [math.log(p) for p in (0.1, 0.4, 0.2, 0.3)]
    approx = pytest.approx
    assert distribution(logits, Sampling()) == approx({1: 0.4, 3: 0.3, 2: 0.2, 0: 0.1})
    assert distribution(logits, Sampling(temperature=0)) == {1: 1.0}
    hot = distribution(logits, Sampling(temperature=2))
    roots = {token: math.sqrt(p) for token, p in {1: 0.4, 3: 0.3, 2: 0.2, 0: 0.1}.items()}
    assert hot == approx({token: root / sum(roots.values()) for token, root in roots.items()})
    assert distribution(logits, Sampling(top_k=2)) == approx({1: 4 / 7, 3: 3 / 7})
    # The token that passes the share is kept; the share is of what top_k left.
    assert distribution(logits, Sampling(top_p=0.5)) == approx({1: 4 / 7, 3: 3 / 7})
    assert list(distribution(logits, Sampling(top_p=0.75))) == [1, 3, 2]
    assert list(distribution(logits, Sampling(top_k=3, top_p=0.75))) == [1, 3]
    assert list(distribution(logits, Sampling(min_p=0.49))) == [1, 3, 2]
    assert list(distribution(logits, Sampling(min_p=0.51))) == [1, 3]
    assert list(distribution([1.0, 1.0, 0.0], Sampling(top_k=1))) == [0]
    assert distribution([1.0, 0.0], Sampling(temperature=1e-320)) == {0: 1.0}


@given(
    st.lists(st.floats(-30, 30), min_size=1, max_size=20),
    st.builds(
        Sampling,
        temperature=st.floats(0, 5),
        top_k=st.integers(0, 25),
        top_p=st.floats(0.001, 1),
        min_p=st.floats(0, 1),
    ),
    st.floats(0, 1),
)
def test_a_distribution_is_one(logits: list[float], sampling: Sampling, noise: float) -> None:
    chances = distribution(logits, sampling)
    assert sum(chances.values()) == pytest.approx(1)
    assert all(0 < p <= 1 for p in chances.values())
    assert len(chances) <= (sampling.top_k or len(logits))
    assert list(chances) == sorted(chances, key=lambda token: (-logits[token], token))
    best = sorted(logits, reverse=True)[: len(chances)]
    assert [logits[token] for token in chances] == best
    assert draw(chances, noise) in chances


def test_a_draw_is_where_the_sum_passes_the_noise() -> None:
    chances = {7: 0.5, 2: 0.25, 9: 0.25}
    noises = [0.0, 0.499, 0.5, 0.749, 0.75, 1.0]
    assert [draw(chances, noise) for noise in noises] == [7, 7, 2, 2, 9, 9]


def test_the_kv_is_a_chain() -> None:
    whole = read_tokens("digest", [1, 2, 3, 4])
    first = read_tokens("digest", [1, 2])
    assert first + read_tokens("digest", [3, 4], first) == whole
    assert read_tokens("other", [1, 2]) != first
    assert len({whole[i : i + 8] for i in range(0, 32, 8)}) == 4


def test_the_youngest_gives_way_and_the_oldest_comes_back(harness: Harness) -> None:
    """Three of 4 + 8 tokens, room for 20: worked out by hand."""
    drive = start(harness, slots=3, kv_budget_tokens=20)
    drive.submit(*(ask(harness, i, length=4) for i in (5, 1, 3)))
    heard = [(n, one) for n in range(30) for one in drive.step() if not isinstance(one, Sampled)]
    # Step 3 would hold 3 x 7; step 7 would hold 2 x 11. Then 5 ends and 1 comes back with 3.
    parks = [(n, one.trajectory) for n, one in heard if isinstance(one, Parked)]
    resumes = [(n, one.trajectory) for n, one in heard if isinstance(one, Resumed)]
    assert parks == [(3, 3), (7, 1)]
    assert [trajectory for _, trajectory in resumes] == [1, 3]
    assert all(record.finish for record in drive.records.values())


def test_parking_frees_the_kv(harness: Harness) -> None:
    drive = start(harness)
    drive.submit(ask(harness, 1), ask(harness, 2))
    drive.step(2)
    held = drive.engine.load().kv_used_tokens
    drive.park(1)
    assert drive.engine.load().kv_used_tokens == held / 2 == 6


def test_tokens_per_second_are_of_the_last_seconds(tmp_path: Path) -> None:
    now = 100.0
    engine = FakeEngine(clock=lambda: now)
    drive = Drive(engine)
    drive.install(1, write_weights(tmp_path, 0))
    sampling = Sampling(max_tokens=50, ignore_eos=True)
    drive.submit(Request(1, 1, (1,), sampling))
    drive.step(10)
    assert engine.load().versions[1].tokens_per_s == 2.0
    now += 4
    drive.step(5)
    assert engine.load().versions[1].tokens_per_s == 3.0
    now += 4
    assert engine.load().versions[1].tokens_per_s == 1.0
    now += 4
    assert engine.load().versions[1].tokens_per_s == 0.0


def test_stop_strings_need_a_tokenizer(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.install(1, write_weights(tmp_path, 0))
    with pytest.raises(RequestRefused, match=r"stop needs a tokenizer: `.*halt"):
        engine.submit(Request(1, 1, (1,), Sampling(stop=("halt",))))
    assert engine.idle


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"digest": ""}', '{"digest": 5}', '{"digest": null}', "\xff", "5"]
)
def test_weights_without_a_digest_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text, encoding="latin-1")
    engine = FakeEngine()
    with pytest.raises(VersionRefused, match=r"manifest.json` names no digest: "):
        engine.install(1, tmp_path)
    assert engine.load().versions == {}


def test_only_what_is_here_can_be_made_to_fail(harness: Harness) -> None:
    engine = harness.make()
    with pytest.raises(UnknownTrajectory, match="`1`"):
        harness.fail(engine, 1)


def test_a_failure_to_come_is_forgotten_with_its_trajectory(harness: Harness) -> None:
    drive = start(harness)
    drive.submit(ask(harness, 1))
    harness.fail(drive.engine, 1)
    drive.cancel(1)
    drive.submit(ask(harness, 1))
    assert drive.run()[1].failure is None


def test_a_held_trajectory_with_a_strange_last_token_is_not_taken_over(harness: Harness) -> None:
    source, target = start(harness), start(harness)
    source.submit(ask(harness, 1, max_tokens=3, hold=True))
    source.until_held(1)
    export = wire.decode(source.export(1))
    for strange in (harness.vocab_size, 10**6):
        damaged = replace(export, generated=(*export.generated[:-1], strange))
        with pytest.raises(ImportRefused, match=f"outside the vocabulary: `{strange}`"):
            target.engine.import_trajectory(wire.encode(damaged))
    target.check()


def test_another_model_is_not_taken_over(harness: Harness, tmp_path: Path) -> None:
    drive = start(harness)
    drive.submit(ask(harness, 1))
    drive.step()
    other = FakeEngine(vocab_size=33)
    other.install(OLD, harness.weights(0))
    with pytest.raises(ImportRefused, match=r"fake of 32 tokens.*fake of 33 tokens"):
        other.import_trajectory(drive.export(1))


def test_kv_that_is_not_of_its_tokens_is_not_taken_over(harness: Harness) -> None:
    source, target = start(harness), start(harness)
    source.submit(ask(harness, 1))
    source.step(3)
    export = wire.decode(source.export(1))
    kv = b"".join(export.kv)
    for wrong in (b"", kv[:-8], kv[:-1], kv + kv[:8], kv[8:] + kv[:8], kv * 9):
        damaged = replace(export, kv=(wrong,))
        with pytest.raises(ImportRefused, match="the KV of trajectory 1 is not that of its tokens"):
            target.engine.import_trajectory(wire.encode(damaged))
    target.check()
    target.engine.import_trajectory(wire.encode(export))


def test_a_closed_engine_holds_nothing(harness: Harness) -> None:
    drive = start(harness)
    drive.submit(ask(harness, 1))
    drive.engine.close()
    assert drive.engine.idle
    with pytest.raises(VersionRefused):
        drive.engine.submit(ask(harness, 2))


def test_tokens_stay_what_they_are(harness: Harness) -> None:
    """Whoever compares runs of the fake by value relies on this."""
    request = Request(1, OLD, (1, 2, 3), Sampling(max_tokens=6, ignore_eos=True), seed=11)
    assert alone(harness, [request])[1].tokens == [6, 18, 1, 10, 10, 22]
