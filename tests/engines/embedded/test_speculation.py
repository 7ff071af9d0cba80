"""With drafts and without, the same comes out, and the same is left in memory."""

import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from dora_rl.core.protocol.errors import SettingsError
from dora_rl.engines.base import Output, Request, Sampled, Sampling
from dora_rl.engines.embedded import EmbeddedEngine, EngineSettings, drafting
from dora_rl.engines.embedded.drafting import TextDrafter
from dora_rl.engines.embedded.sequences import Prompt, Sequence
from dora_rl.engines.speculation import MOST_SEQUENCES, TYPICAL, Speculation
from dora_rl.quickstart import model_directory
from dora_rl.transports.weights.shared_directory import WeightStore
from tests.engines.embedded.drafts import Spoil, look_ahead, spoilt
from tests.engines.embedded.test_exactness import Shape, shapes
from tests.engines.random_versions import Models
from tests.models.kernels import needs_kernels

Heard = dict[int, list[tuple[int, float, float | None]]]
BY_TORCH = {"deterministic": True}
BY_KERNELS = {"native_kernels": True}
both = pytest.mark.parametrize(
    "fixed",
    [
        pytest.param(BY_TORCH, id="torch"),
        pytest.param(BY_KERNELS, id="native", marks=needs_kernels),
    ],
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"), "qwen3")


def make(models: Models, *versions: int, **settings: Any) -> EmbeddedEngine:
    chosen = {"block_tokens": 4, "kv_budget_tokens": 512, "slots": 3, **settings}
    engine = EmbeddedEngine(models.config, EngineSettings(**chosen), models.tokenizer)
    for version in versions or (0,):
        engine.install(version, models.path(version))
    return engine


def submit(engine: EmbeddedEngine, versions: int = 1, **sampling: Any) -> None:
    for i in range(6):
        wishes = Sampling(
            max_tokens=9 + i,
            temperature=(0.0, 0.7, 1.0)[i % 3],
            raw_logprobs=i % 2 == 0,
            **sampling,
        )
        prompt = tuple(range(3, 8 + i // 2))  # some have siblings
        engine.submit(Request(i, i % versions, prompt, wishes, seed=5))


def run(engine: EmbeddedEngine) -> tuple[Heard, int]:
    """All that was sampled, by trajectory, and in how many steps; the KV is checked in each."""
    heard: Heard = {}
    steps = 0
    while not engine.idle:
        steps += 1
        for output in engine.step():
            if isinstance(output, Sampled):
                raw = output.raw_logprobs or (None,) * len(output.tokens)
                new = zip(output.tokens, output.logprobs, raw, strict=True)
                heard.setdefault(output.trajectory, []).extend(new)
        check_kv(engine)
    assert engine.load().kv_used_tokens == 0
    return heard, steps


def check_kv(engine: EmbeddedEngine) -> None:
    """No block more than what is cached needs; and nothing behind it, where it is multiplied."""
    pool = engine._pool
    for sequence in engine._scheduler.running.values():
        kv = sequence.kv
        if not sequence.ready:
            continue  # being read: it has blocks for all that is to be
        assert len(kv.blocks) == pool.blocks_for(kv.tokens)
        if (full := kv.tokens % pool.block_tokens) and not engine._versions.native:
            assert not pool.keys_LNKDT[:, kv.blocks[-1], ..., full:].any()
            assert not pool.values_LNKTD[:, kv.blocks[-1], :, full:].any()


def right(tokens: list[int]) -> list[int]:
    return tokens


def wrong(tokens: list[int]) -> list[int]:
    return [(token + 1) % 300 for token in tokens]


@both
@pytest.mark.parametrize("versions", [1, 2])
@pytest.mark.parametrize("spoil", [right, wrong, spoilt(300)], ids=["right", "wrong", "spoilt"])
def test_the_same_comes_out(models: Models, fixed: Any, versions: int, spoil: Spoil) -> None:
    plain, drafted = (
        make(models, *range(versions), speculation=mode, **fixed)
        for mode in (Speculation.OFF, Speculation.ON)
    )
    submit(plain, versions)
    submit(drafted, versions)
    drafter = look_ahead(drafted, spoil)
    expected, slowly = run(plain)
    found, quickly = run(drafted)
    assert found == expected
    assert plain.load().proposed_tokens == 0
    load = drafted.load()
    assert load.proposed_tokens == sum(proposed for proposed, _ in drafter.log) > 0
    assert load.accepted_tokens == sum(accepted for _, accepted in drafter.log)
    if spoil is right:
        assert load.accepted_tokens == load.proposed_tokens
        assert quickly < slowly / 2
    if spoil is wrong:
        assert load.accepted_tokens == 0
        assert quickly == slowly


@both
def test_a_turn_ends_within_a_draft(models: Models, fixed: Any) -> None:
    """At a stop token, a stop string or the last token that there is room for."""
    quiet = make(models, speculation=Speculation.OFF, **fixed)
    submit(quiet)
    free, _ = run(quiet)
    token = free[2][3][0]
    text = models.tokenizer.decode([token for token, _, _ in free[5]][2:5])
    for ends in ({"stop_token_ids": (token,)}, {"stop": (text,)}, {"ignore_eos": True}):
        heard = []
        for mode in (Speculation.OFF, Speculation.ON):
            engine = make(models, speculation=mode, **fixed)
            submit(engine, **ends)
            look_ahead(engine, lambda tokens: [*tokens, 7, 7, 7])
            heard.append(run(engine)[0])
        assert heard[0] == heard[1]


@hypothesis_settings(max_examples=10)
@given(shapes, st.sampled_from(["float32", "bfloat16"]), st.integers(0, 99))
def test_for_every_shape_of_a_model(shape: Shape, kv_dtype: str, seed: int) -> None:
    with tempfile.TemporaryDirectory() as root:
        models = shape.models(Path(root))
        fixed = {**BY_TORCH, "block_tokens": shape.block_tokens, "kv_dtype": kv_dtype}
        heard = []
        for mode in (Speculation.OFF, Speculation.ON):
            engine = make(models, speculation=mode, **fixed)
            submit(engine)
            look_ahead(engine, spoilt(300, seed))
            heard.append(run(engine)[0])
        assert heard[0] == heard[1]


@both
def test_nobody_gives_way_for_a_draft(models: Models, fixed: Any) -> None:
    """With no block to spare, what is parked and resumed is what would be without."""
    events: list[list[Output]] = []
    for mode in (Speculation.OFF, Speculation.ON):
        engine = make(models, speculation=mode, kv_budget_tokens=28, **fixed)
        submit(engine)
        look_ahead(engine, wrong)
        heard = []
        while not engine.idle:
            heard += engine.step()
        events.append(heard)
    assert events[0] == events[1]
    assert any(not isinstance(output, Sampled) for output in events[0])


@both
def test_a_draft_that_is_no_number_harms_nobody(models: Models, fixed: Any, tmp_path: Path) -> None:
    """A token that overflows is proposed in every step, and never drawn."""
    poison = 299
    tensors = {name: tensor.clone() for name, tensor in models.tensors(0).items()}
    tensors["model.embed_tokens.weight"][poison] = 3e38
    if not models.config.tied:
        tensors["lm_head.weight"][poison] = -1e3
    store = WeightStore(tmp_path / "store")
    store.publish(1, tensors)
    heard = []
    for mode in (Speculation.OFF, Speculation.ON):
        engine = make(models, speculation=mode, **fixed)
        engine.install(1, store.path(1))
        for i in (0, 1):
            wishes = Sampling(max_tokens=12, ignore_eos=True, top_k=3)
            engine.submit(Request(i, 1, (3, 4, 5), wishes, seed=i))
        look_ahead(engine, lambda tokens: [*tokens[:1], poison, poison])
        heard.append(run(engine)[0])
    assert heard[0] == heard[1]
    assert len(heard[0][0]) == 12


# Drafts from texts


@pytest.fixture(scope="module")
def chains(tmp_path_factory: pytest.TempPathFactory) -> WeightStore:
    store = WeightStore(tmp_path_factory.mktemp("chains"))
    store.publish_directory(0, model_directory())
    return store


@both
def test_siblings_that_ended_speed_up_a_straggler(chains: WeightStore, fixed: Any) -> None:
    """The quickstart's model: in fewer steps, and bit for bit the same."""
    heard, steps = [], []
    for mode in (Speculation.OFF, Speculation.ON):
        settings = EngineSettings(slots=2, speculation=mode, kv_budget_tokens=4096, **fixed)
        engine = EmbeddedEngine.for_model(model_directory(), settings)
        engine.install(0, chains.path(0))
        assert engine._tokenizer is not None
        prompt = tuple(engine._tokenizer.encode("52+03*16="))
        for i in range(4):
            engine.submit(Request(i, 0, prompt, Sampling(max_tokens=128), seed=1))
        found, taken = run(engine)
        heard.append(found)
        steps.append(taken)
        accepted = engine.load().accepted_tokens
    assert heard[0] == heard[1]
    assert accepted > 0
    assert steps[1] < 0.9 * steps[0]


def sequence_of(prompt: Prompt, trajectory: int, own: list[int]) -> Sequence:
    prompt.holders += 1
    return Sequence(Request(trajectory, prompt.version, (*prompt.tokens, 1)), 0, prompt, own)


def test_texts_are_those_of_the_same_prompt_and_version() -> None:
    drafter, loop = TextDrafter(Speculation.ON), [1, 2, 3, 4] * 20
    one, other = Prompt(0, (9,)), Prompt(1, (9,))
    ended = sequence_of(one, 1, loop)
    sibling, stranger = sequence_of(one, 2, [1, 2, 3]), sequence_of(other, 3, [1, 2, 3])
    one.holders -= 1
    drafter.ended(ended)
    drafts = [drafter.propose([sibling, stranger], TYPICAL) for _ in range(3)][-1]
    assert drafts[0].tokens[:3] == (4, 1, 2)
    assert drafts[1].tokens == ()


def test_nothing_is_kept_of_a_prompt_that_nobody_holds() -> None:
    drafter, prompt = TextDrafter(Speculation.ON), Prompt(0, (9,))
    sequences = [sequence_of(prompt, i, [1, 2, 3]) for i in range(2)]
    drafter.propose(sequences, TYPICAL)
    for sequence in sequences:
        assert drafter._texts
        prompt.holders -= 1
        drafter.ended(sequence)
    assert not drafter._texts


def test_many_sequences_get_no_drafts() -> None:
    drafter, prompt = TextDrafter(Speculation.ON), Prompt(0, (9,))
    sequences = [sequence_of(prompt, i, [1, 2] * 30) for i in range(MOST_SEQUENCES + 1)]
    assert not drafter.propose(sequences, TYPICAL)
    assert not drafter._texts  # and no time is spent on them
    assert drafter.propose(sequences[:-1], TYPICAL)


def test_what_is_counted_in_a_step_and_in_all_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafting, "_MOST_COUNTED", 600)
    drafter, prompt = TextDrafter(Speculation.ON), Prompt(0, (9,) * 5000)
    ended, mine = sequence_of(prompt, 1, [5] * 5000), sequence_of(prompt, 2, [1, 2] * 2000)
    prompt.holders -= 1
    drafter.ended(ended)
    counted = 0
    for _ in range(100):
        drafter.propose([mine], TYPICAL)
        now = drafter._texts[prompt].continuations.counted
        assert now - counted <= 2 * drafting._COUNTED_A_STEP
        assert now <= 600 + 2 * drafting._COUNTED_A_STEP
        counted = now
        mine.own += [1, 2] * 4
    assert drafter.propose([mine], TYPICAL)[0].tokens[:2] == (1, 2)


# When


@needs_kernels
def test_what_rows_cost_is_measured_once_and_leaves_nothing(models: Models) -> None:
    engine = make(models, 0, 1, native_kernels=True)
    costs = engine._speculator.costs
    assert costs is not TYPICAL
    assert list(costs.costs) == sorted(costs.costs) and costs.costs[0] > 0
    assert engine.load().kv_used_tokens == 0
    engine.install(2, models.path(2))
    assert engine._speculator.costs is costs


@needs_kernels
def test_a_clock_that_is_too_coarse_measures_nothing(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "thread_time", lambda: 0.0)
    engine = make(models, 0, native_kernels=True)
    assert engine._speculator.costs is TYPICAL


@needs_kernels
def test_a_trial_that_fails_keeps_the_version_and_no_block(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(EmbeddedEngine, "_draw", fails)
    engine = make(models, 0, native_kernels=True)
    assert list(engine.load().versions) == [0]
    assert engine.load().kv_used_tokens == 0


def test_texts_that_nobody_counts_do_not_pile_up() -> None:
    drafter, prompt = TextDrafter(Speculation.ON), Prompt(0, (9,))
    for trajectory in range(3 * drafting._MOST_WAITING):  # one after another, in full batches
        drafter.ended(sequence_of(prompt, trajectory, [2, 3, 4]))
    assert len(drafter._texts[prompt]._uncounted) == drafting._MOST_WAITING


@pytest.mark.parametrize(
    "settings",
    [
        {"speculation": Speculation.OFF},
        {"deterministic": True, "speculation": Speculation.ON},
        {"kv_budget_tokens": 8, "speculation": Speculation.ON},
    ],
)
def test_nothing_is_measured_where_it_must_not_or_cannot_be(
    models: Models, settings: dict[str, Any]
) -> None:
    engine = make(models, **settings)
    assert engine._speculator.costs is TYPICAL
    assert engine.load().kv_used_tokens == 0


def test_auto_is_where_it_was_measured_to_be_faster() -> None:
    auto = EngineSettings()
    assert auto.speculation is Speculation.AUTO
    assert auto.speculates(native=True) and not auto.speculates(native=False)
    assert not EngineSettings(deterministic=True).speculates(native=True)
    for native in (True, False):
        assert EngineSettings(speculation=Speculation.ON).speculates(native=native)
        assert not EngineSettings(speculation=Speculation.OFF).speculates(native=native)


def test_another_word_is_refused() -> None:
    with pytest.raises(SettingsError, match="must be one of auto, on, off: `always`"):
        EngineSettings(speculation="always")  # type: ignore[arg-type]
