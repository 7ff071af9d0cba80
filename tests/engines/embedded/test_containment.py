"""What goes wrong with one trajectory, version or request stays with it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dora_rl.core.protocol.errors import SettingsError
from dora_rl.engines import wire
from dora_rl.engines.base import Failed, Output, Request, Sampled, Sampling
from dora_rl.engines.embedded import EmbeddedEngine, EngineSettings, moving
from dora_rl.engines.errors import ImportRefused, VersionRefused
from dora_rl.transports.weights.shared_directory import WeightStore
from dora_rl.weights.errors import WeightsError
from tests.engines.random_versions import Models
from tests.models.random_models import random_model

GOOD, BROKEN = 0, 9
LONG = Sampling(max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A version 9 whose finite weights overflow in the first layer."""
    made = Models(tmp_path_factory.mktemp("models"), "llama", max_position_embeddings=256)
    tensors = tensors_of(made)
    for name in ("k_proj", "v_proj"):
        tensors[f"model.layers.0.self_attn.{name}.weight"].fill_(3e38)
    made.store.publish(BROKEN, tensors)
    return made


def tensors_of(models: Models) -> dict[str, torch.Tensor]:
    model = random_model("llama", seed=1, vocab_size=300, max_position_embeddings=256)
    wanted = models.config.tensors()
    return {name: t.clone() for name, t in model.state_dict().items() if name in wanted}


def make(models: Models, **settings: object) -> EmbeddedEngine:
    chosen = {"slots": 4, "block_tokens": 4, "prefill_chunk": 4, **settings}
    engine = EmbeddedEngine(models.config, EngineSettings(**chosen), models.tokenizer)  # type: ignore[arg-type]
    engine.install(GOOD, models.path(GOOD))
    engine.install(BROKEN, models.path(BROKEN))
    return engine


def finish(engine: EmbeddedEngine, steps: int = 500) -> list[Output]:
    outputs: list[Output] = []
    for _ in range(steps):
        if engine.idle:
            return outputs
        outputs += engine.step()
    raise AssertionError("it does not end")


def good(engine: EmbeddedEngine, first: int) -> None:
    """Two trajectories of the good version give what they give in a clean engine."""
    for i in (first, first + 1):
        engine.submit(Request(i, GOOD, (i % 7 + 1, 4, 5), LONG, seed=2))


def tokens(outputs: list[Output], trajectory: int) -> list[int]:
    mine = [o for o in outputs if isinstance(o, Sampled) and o.trajectory == trajectory]
    return [token for output in mine for token in output.tokens]


def cancel(engine: EmbeddedEngine) -> None:
    assert engine.cancel(1)


def export_and_cancel(engine: EmbeddedEngine) -> None:
    engine.export_trajectory(1)
    assert engine.cancel(1)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("leave", [cancel, export_and_cancel, finish])
def test_what_is_no_number_does_not_outlive_its_trajectory(
    models: Models, deterministic: bool, leave: Callable[[EmbeddedEngine], object]
) -> None:
    engine, clean = (make(models, deterministic=deterministic) for _ in range(2))
    engine.submit(Request(1, BROKEN, tuple(range(10, 50)), LONG))
    for _ in range(5):
        engine.step()
    leave(engine)
    good(engine, 100)
    good(clean, 100)
    found, expected = finish(engine), finish(clean)
    assert not any(isinstance(output, Failed) for output in found)
    for i in (100, 101):
        assert tokens(found, i) == tokens(expected, i)
    assert engine.load().kv_used_tokens == 0


def test_a_broken_version_beside_a_good_one_that_needs_its_room(models: Models) -> None:
    engine = make(models, kv_budget_tokens=32)
    engine.submit(Request(1, GOOD, (3, 4, 5), LONG))
    engine.step()
    engine.submit(Request(2, BROKEN, tuple(range(10, 30)), Sampling(max_tokens=2)))
    engine.submit(Request(3, GOOD, (8, 4, 5), LONG))
    failed = [output.trajectory for output in finish(engine) if isinstance(output, Failed)]
    assert failed == [2]


@pytest.mark.parametrize("prefix", [(), tuple(range(8, 60))])
@pytest.mark.parametrize("moved", [True, False])
def test_what_is_half_read_can_be_parked_and_moved(
    models: Models, prefix: tuple[int, ...], moved: bool
) -> None:
    prompt = (1,) if prefix else tuple(range(5, 65))
    request = Request(2, GOOD, prompt, Sampling(max_tokens=60, ignore_eos=True), prefix=prefix)
    clean, engine = make(models), make(models)
    clean.submit(request)
    expected = tokens(finish(clean), 2)
    engine.submit(request)
    engine.step()
    assert engine.load().kv_used_tokens > 0
    if moved:
        message = engine.export_trajectory(2)
        engine.cancel(2)
        engine = make(models)
        engine.import_trajectory(message)
    else:
        engine.export_trajectory(2)
        assert engine.load().kv_used_tokens in (0, 60)  # its prompt may wait where it is
        good(engine, 100)
        finish(engine)
        engine.resume(2)
    assert tokens(finish(engine), 2) == expected


def test_a_parked_prompt_that_is_half_read_does_not_stop_the_others(models: Models) -> None:
    engine = make(models, prefill_chunk=2, kv_budget_tokens=16, slots=2)
    engine.submit(Request(2, GOOD, tuple(range(20, 26)), Sampling(max_tokens=4)))
    engine.step()
    engine.export_trajectory(2)
    for i in (3, 4):
        engine.submit(Request(i, GOOD, (i, i), Sampling(max_tokens=8, ignore_eos=True)))
    assert len(tokens(finish(engine), 3)) == 8
    engine.resume(2)
    assert tokens(finish(engine), 2)


def test_the_same_id_with_another_sampling(models: Models) -> None:
    engine = make(models)
    engine.submit(Request(1, GOOD, (5, 6), LONG))
    engine.step()
    engine.cancel(1)
    engine.submit(Request(1, GOOD, (5, 6), replace(LONG, temperature=0.0, raw_logprobs=True)))
    outputs = [output for output in finish(engine) if isinstance(output, Sampled)]
    assert {output.logprobs for output in outputs} == {(0.0,)}
    assert all(output.raw_logprobs for output in outputs)


def test_weights_of_two_dtypes_are_refused(models: Models, tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "store")
    mixed = tensors_of(models)
    mixed["model.layers.0.self_attn.k_proj.weight"] = mixed[
        "model.layers.0.self_attn.k_proj.weight"
    ].bfloat16()
    store.publish(1, mixed)
    store.publish(2, {name: tensor.half() for name, tensor in tensors_of(models).items()})
    engine = make(models)
    for version, dtypes in ((1, "bfloat16, float32"), (2, "float16")):
        with pytest.raises(WeightsError, match=f"of dtype `{dtypes}`"):
            engine.install(version, store.path(version))
    good(engine, 100)
    assert len(tokens(finish(engine), 100)) == 24


def test_a_claimed_shape_is_not_allocated(models: Models) -> None:
    engine = make(models)
    engine.submit(Request(1, GOOD, (5, 6), LONG))
    engine.step()
    honest = wire.decode(engine.export_trajectory(1))
    config = replace(models.config, num_layers=10**6, context=10**9)
    tokens_claimed = 10**6
    lying = wire.Export(
        **{
            **{name: getattr(honest, name) for name in honest.__struct_fields__},
            "prompt": (5,) * (tokens_claimed + 1),
            "model": f"llama {10**6}x{config.num_kv_heads}x{config.head_dim}",
            "kv_tokens": tokens_claimed,
            "kv_shape": (10**6, 2, tokens_claimed, config.num_kv_heads, config.head_dim),
            "kv": (),
        }
    )
    with pytest.raises(ImportRefused, match="the KV of trajectory 1"):
        moving.kv_of(config, lying, torch.float32)


def test_waiting_takes_no_memory_but_its_own(models: Models) -> None:
    engine = make(models, slots=1)
    engine.submit(Request(1, GOOD, (5, 6), LONG))
    for _ in range(1000):
        engine.export_trajectory(1)
        engine.resume(1)
    assert len(engine._scheduler._by_age) < 100


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layout": "nope"}, "rollout.layout must be one of mapped, packed, tiled: `nope`"),
        ({"slots": 1.5}, "rollout.slots must be a whole number >= 1: `1.5`"),
        ({"slots": 0}, "rollout.slots must be a whole number >= 1: `0`"),
        ({"kv_budget_tokens": 3}, "must hold at least one block of 32 tokens: `3`"),
        ({"kv_dtype": "int8"}, "rollout.kv_dtype must be float32 or bfloat16: `int8`"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        EngineSettings(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [MemoryError, RuntimeError])
@pytest.mark.parametrize("where", ["build", "FullVersions._restack"])
def test_a_version_that_finds_no_memory_is_refused(
    models: Models, where: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When its weights are brought into their form, or are stacked with those of the others."""
    engine, clean = (make(models, deterministic=True) for _ in range(2))

    def fail(*_: object, **__: object) -> None:
        raise error("no memory left")

    with monkeypatch.context() as broken:
        broken.setattr(f"dora_rl.engines.embedded.versions.{where}", fail)
        with pytest.raises(VersionRefused, match=r"version 1 .*no memory left.*Free memory"):
            engine.install(1, models.path(1))
    assert set(engine.load().versions) == {GOOD, BROKEN}
    good(engine, 100)
    good(clean, 100)
    assert finish(engine) == finish(clean)
    assert engine.install(1, models.path(1)) == clean.install(1, models.path(1))
