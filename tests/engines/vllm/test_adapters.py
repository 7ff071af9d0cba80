"""Several LoRA adapters in one batch of vLLM, each request with its own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM

from dora_rl.engines.base import Request
from dora_rl.engines.errors import VersionRefused
from dora_rl.engines.vllm.backend import LoadedAdapter
from dora_rl.engines.vllm.engine import VllmEngine
from dora_rl.transports.weights.shared_directory import WeightStore
from dora_rl.weights.errors import WeightsError
from tests.engines.driving import MID, NEW, OLD, Drive, ask, start
from tests.engines.random_versions import AdapterModels, Models, logprobs_of
from tests.engines.vllm.harness import Backends, VllmHarness
from tests.engines.vllm.shape import BLOCK, SHAPE

pytestmark = pytest.mark.vllm
VERSIONS = (OLD, MID, NEW)
CLOSE = 1e-3  # to the same sums in another order


@pytest.fixture
def harness(adapters: AdapterModels, backends: Backends) -> Iterator[VllmHarness]:
    with VllmHarness(adapters, backends) as made:
        yield made


def engine_of(drive: Drive) -> VllmEngine:
    assert isinstance(drive.engine, VllmEngine)
    return drive.engine


def all_installed(harness: VllmHarness, **settings: Any) -> Drive:
    drive = start(harness, version_slots=4, **settings)
    for n, version in enumerate(VERSIONS[1:], 1):
        drive.install(version, harness.weights(n))
    return drive


def with_peft(models: Models, n: int) -> Any:
    """The n-th adapter, from the files of its version."""
    base = AutoModelForCausalLM.from_pretrained(models.directory)
    return PeftModel.from_pretrained(base, str(models.path(n)))


def test_each_of_a_batch_has_its_own_adapter(harness: VllmHarness) -> None:
    drive = all_installed(harness, slots=12)
    requests = [
        ask(harness, i, VERSIONS[i % 3], length=BLOCK + 3, raw_logprobs=True) for i in range(12)
    ]
    drive.submit(*requests)
    records = drive.run()
    references = [with_peft(harness.models, n) for n in range(3)]
    for i, request in enumerate(requests):
        tokens = (*request.prompt, *records[i].tokens)
        own, other = (
            logprobs_of(references[n], tokens)[len(request.prompt) - 1 :]
            for n in (i % 3, (i + 1) % 3)
        )
        assert records[i].raw == pytest.approx(own, abs=CLOSE)
        assert records[i].raw != pytest.approx(other, abs=0.1)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_every_family_serves_its_adapters(
    family: str, tied: bool, backends: Backends, tmp_path: Path
) -> None:
    models = AdapterModels(tmp_path, family, tie_word_embeddings=tied, **SHAPE)
    with VllmHarness(models, backends) as harness:
        drive = all_installed(harness)
        requests = [ask(harness, i, version) for i, version in enumerate(VERSIONS)]
        drive.submit(*requests)
        records = drive.run()
        for n, request in enumerate(requests):
            tokens = (*request.prompt, *records[n].tokens)
            expected = logprobs_of(models.model(n), tokens)[len(request.prompt) - 1 :]
            assert records[n].logprobs == pytest.approx(expected, abs=CLOSE)


def test_another_adapter_than_was_asked_for_is_caught(
    harness: VllmHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM itself does for an id that it knows: it serves what it had by it."""
    drive = start(harness, version_slots=4)
    engine = engine_of(drive)
    add = engine.backend.add_adapter

    def other(adapter: LoadedAdapter) -> None:
        add(adapter._replace(path=str(harness.weights(2))))

    with monkeypatch.context() as wrong:
        wrong.setattr(engine.backend, "add_adapter", other)
        with pytest.raises(VersionRefused, match=rf"adapter of version {MID} in memory, but"):
            engine.install(MID, harness.weights(1))
        wrong.setattr(engine.versions, "_check_memory", lambda *given: None)
        with pytest.raises(VersionRefused, match=rf"weights of version {MID}: .* off by"):
            engine.install(MID, harness.weights(1))
    assert set(engine.load().versions) == {OLD}
    drive.install(MID, harness.weights(1))
    drive.submit(ask(harness, 1, MID), ask(harness, 2, OLD))
    drive.run()


def test_an_adapter_that_differs_by_a_hair_is_caught(
    harness: VllmHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A neighbouring version: its log-probabilities are the same but for rounding."""
    models = harness.models
    assert isinstance(models, AdapterModels)
    tensors = models.tensors(1)
    name = next(name for name in tensors if "lora_B" in name)
    tensors[name][0, 0] *= 1.0001
    near = WeightStore(tmp_path / "store")
    near.publish(1, tensors, adapter=models.adapter)
    engine = engine_of(start(harness, version_slots=4))
    add = engine.backend.add_adapter
    monkeypatch.setattr(
        engine.backend, "add_adapter", lambda one: add(one._replace(path=str(near.path(1))))
    )
    with pytest.raises(VersionRefused, match=rf"adapter of version {MID} in memory, but"):
        engine.install(MID, harness.weights(1))
    assert engine.backend._engine.list_loras() == {1}


def test_a_step_that_fails_during_an_install_is_no_refusal(
    adapters: AdapterModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM takes what was scheduled for computed: the worker must end, or it would serve that."""
    with VllmHarness(adapters, Backends()) as harness:  # which nobody uses again
        engine = engine_of(start(harness, version_slots=4))
        engine.submit(ask(harness, 1, OLD, max_tokens=40, ignore_eos=True))

        def broken() -> None:
            raise RuntimeError("out of memory")

        with monkeypatch.context() as failing:
            failing.setattr(engine.backend._engine, "step", broken)
            with pytest.raises(RuntimeError, match="out of memory"):
                engine.install(MID, harness.weights(1))
        assert set(engine.load().versions) == {OLD}
        engine.backend.abort(engine._live[1].id or "")
        engine.backend.abort("probe")


def test_what_is_not_of_this_base_is_refused(harness: VllmHarness, tmp_path: Path) -> None:
    drive = start(harness, version_slots=4)
    store = WeightStore(tmp_path / "store")
    models = harness.models
    assert isinstance(models, AdapterModels)
    full = Models(tmp_path / "full", "llama", **SHAPE)
    with pytest.raises(WeightsError, match=r"full set of weights, .* serves LoRA adapters"):
        engine_of(drive).install(MID, full.path(1))
    other = AdapterModels(tmp_path / "other", "llama", **{**SHAPE, "intermediate_size": 96})
    with pytest.raises(WeightsError, match="adapter of another base"):
        engine_of(drive).install(MID, other.path(1))
    cut = {name: tensor[:2] for name, tensor in models.tensors(1).items()}
    store.publish(1, cut, adapter=models.adapter)
    with pytest.raises(WeightsError, match=r"has the shape `\(2, .*with rank 3 this model has"):
        engine_of(drive).install(MID, store.path(1))
    drive.check()


def test_an_install_waits_for_nobody_and_stops_nobody(harness: VllmHarness) -> None:
    """All slots are taken, and more waits: a version is proven while they sample on."""
    drive = start(harness, slots=2, version_slots=4)
    engine = engine_of(drive)
    requests = [ask(harness, i, OLD, max_tokens=40, ignore_eos=True) for i in range(5)]
    drive.submit(*requests)
    for _ in range(3):
        drive.step()
    drive.install(MID, harness.weights(1))
    assert engine.load().running <= 2
    drive.submit(ask(harness, 9, MID))
    records = drive.run()
    for request in requests:
        tokens = (*request.prompt, *records[request.trajectory].tokens)
        expected = logprobs_of(harness.models.model(0), tokens)[len(request.prompt) - 1 :]
        assert len(expected) == 40
        assert records[request.trajectory].logprobs == pytest.approx(expected, abs=CLOSE)


def test_what_a_cancelled_one_got_during_an_install_is_not_told(harness: VllmHarness) -> None:
    drive = start(harness, slots=2, version_slots=4)
    engine = engine_of(drive)
    kept, cancelled = (ask(harness, i, OLD, max_tokens=9, ignore_eos=True) for i in (1, 2))
    engine.submit(kept)
    engine.submit(cancelled)
    told = [output for _ in range(2) for output in engine.step()]
    assert {1, 2} == {output.trajectory for output in told}
    engine.install(MID, harness.weights(1))
    engine.cancel(2)
    after = []
    while not engine.idle:
        after += engine.step()
    assert {output.trajectory for output in after} == {1}
    tokens = [output.tokens for output in (*told, *after) if output.trajectory == 1]
    assert len(tokens) == 9 and all(len(token) == 1 for token in tokens)


def test_an_evicted_adapter_is_gone_and_its_kv_is_never_served(harness: VllmHarness) -> None:
    drive = all_installed(harness)
    engine = engine_of(drive)
    request = ask(harness, 1, MID, length=3 * BLOCK + 1, temperature=0.0, raw_logprobs=True)
    drive.submit(request)
    drive.run()
    engine.evict(MID)
    drive.digests.pop(MID)
    assert len(engine.backend._engine.list_loras()) == 2
    with pytest.raises(VersionRefused, match=rf"version {MID} is not installed"):
        engine.submit(ask(harness, 5, MID))
    again = Request(7, NEW, request.prompt, request.sampling)
    drive.submit(again)
    record = drive.run()[7]
    tokens = (*request.prompt, *record.tokens)
    expected = logprobs_of(harness.models.model(2), tokens)[len(request.prompt) - 1 :]
    assert record.raw == pytest.approx(expected, abs=CLOSE)
