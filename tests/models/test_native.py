"""The native kernels: right for every shape and number of threads; compiled where it is safe."""

import os
import signal
import stat
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load_file

from dora_rl.core.protocol.errors import SettingsError
from dora_rl.engines.base import Request, Sampled, Sampling
from dora_rl.engines.embedded import EmbeddedEngine, EngineSettings
from dora_rl.machine.fast_paths import PORTABLE, Unavailable
from dora_rl.models.linear import Layout
from dora_rl.models.native import library as native
from dora_rl.models.native.products import PackedProduct, native_kernels
from dora_rl.transports.weights.shared_directory import WeightStore
from tests.engines.random_versions import AdapterModels, Models
from tests.models.kernels import needs_kernels


@needs_kernels
@given(
    rows=st.integers(1, 40),
    inputs=st.integers(1, 80),
    outputs=st.integers(1, 300),
    bf16=st.booleans(),
    dots=st.booleans(),
    biased=st.booleans(),
    threads=st.integers(1, 3),
)
@example(rows=1, inputs=64, outputs=257, bf16=True, dots=False, biased=True, threads=2)
@example(rows=13, inputs=1, outputs=1, bf16=False, dots=False, biased=False, threads=1)
@example(rows=2, inputs=33, outputs=1, bf16=True, dots=True, biased=False, threads=1)
def test_a_product_is_the_one_of_torch(
    rows: int, inputs: int, outputs: int, bf16: bool, dots: bool, biased: bool, threads: int
) -> None:
    noise = torch.Generator().manual_seed(rows + 100 * inputs + 10_000 * outputs)
    x_RI = torch.randn(rows, inputs, generator=noise)
    weight_OI = torch.randn(outputs, inputs, generator=noise)
    weight_OI = weight_OI.bfloat16() if bf16 else weight_OI
    bias_O = torch.randn(outputs, generator=noise) if biased else None
    product = PackedProduct(weight_OI, bias_O, dots=dots)
    out_RO = product(x_RI, threads)
    entered_RI = x_RI.bfloat16() if bf16 and dots else x_RI
    expected = torch.nn.functional.linear(entered_RI.double(), weight_OI.double(), None)
    expected = expected if bias_O is None else expected + bias_O
    torch.testing.assert_close(out_RO[:, :outputs].double(), expected, rtol=1e-5, atol=1e-5)
    assert not out_RO[:, outputs:].any()  # the zeros of the last panel
    alone = torch.cat([product(x_RI[r : r + 1]) for r in range(rows)])
    assert torch.equal(out_RO, alone)


@needs_kernels
def test_no_rows_are_no_products() -> None:
    assert PackedProduct(torch.ones(4, 3))(torch.empty(0, 3)).shape[0] == 0


@needs_kernels
@pytest.mark.parametrize("dots", [False, True])
def test_nan_stays_in_its_row(dots: bool) -> None:
    x_RI, weight_OI = torch.ones(3, 20), torch.ones(40, 20).bfloat16()
    x_RI[1, 7] = torch.nan
    out_RO = PackedProduct(weight_OI, dots=dots)(x_RI, 2)
    assert out_RO[1, :40].isnan().all()
    assert torch.equal(out_RO[::2, :40], torch.full((2, 40), 20.0))


@needs_kernels
@pytest.mark.parametrize("scale", [1.0, 30.0, 1000.0])
def test_gates_of_any_size_are_those_of_torch(scale: float, tmp_path: Path) -> None:
    """Far below zero a gate is shut; e^x of the other sign is beyond what a float can hold."""
    models = Models(tmp_path, "llama")
    tensors = dict(load_file(next(models.path(0).glob("*.safetensors"))))
    for name, tensor in tensors.items():
        if "gate_proj" in name:
            tensor.mul_(scale)
        if "down_proj" in name:
            tensor.mul_(1 / scale)
    store = WeightStore(tmp_path / "gates")
    store.publish(0, tensors)
    logprobs: dict[bool, list[float]] = {}
    for kernels in (True, False):
        settings = EngineSettings(native_kernels=kernels, kv_budget_tokens=256)
        engine = EmbeddedEngine(models.config, settings, models.tokenizer)
        engine.install(0, store.path(0))
        engine.submit(Request(1, 0, (5, 7, 9, 11), Sampling(max_tokens=4, ignore_eos=True), seed=1))
        found = logprobs.setdefault(kernels, [])
        while not engine.idle:
            for output in engine.step():
                assert isinstance(output, Sampled)
                found += [*output.tokens, *output.logprobs]
    assert logprobs[True] == pytest.approx(logprobs[False], abs=1e-3)


@needs_kernels
@pytest.mark.parametrize("kind", [Models, AdapterModels])
def test_a_version_that_was_evicted_is_gone(kind: type[Models], tmp_path: Path) -> None:
    """Its memory is free, and what is installed under its number is what is served."""
    models = kind(tmp_path, "llama")
    base = models.base
    engine = EmbeddedEngine(
        models.config,
        EngineSettings(native_kernels=True, kv_budget_tokens=256),
        models.tokenizer,
        base,
    )

    def served() -> list[float]:
        request = Request(1, 0, (5, 7, 9), Sampling(max_tokens=3, ignore_eos=True), seed=1)
        engine.submit(request)
        found: list[float] = []
        while not engine.idle:
            found += [p for out in engine.step() if isinstance(out, Sampled) for p in out.logprobs]
        return found

    engine.install(0, models.path(0))
    first = served()
    held = weakref.ref(engine._versions._natives[0])  # type: ignore[attr-defined]
    engine.evict(0)
    assert held() is None
    engine.install(0, models.path(1))
    second = served()
    engine.evict(0)
    engine.install(0, models.path(0))
    assert served() == first != second


@needs_kernels
def test_a_child_of_fork_has_threads_of_its_own() -> None:
    """Its parent's are not there, nor is whoever held the pool's lock."""
    x_RI, weight_OI = torch.ones(64, 512), torch.ones(4096, 512)
    product = PackedProduct(weight_OI)
    before = product(x_RI, 2)
    done = threading.Event()

    def multiply() -> None:
        while not done.is_set():
            product(x_RI, 2)

    busy = threading.Thread(target=multiply)
    busy.start()
    try:
        children = []
        for _ in range(5):  # at whatever moment of a pass
            child = os.fork()
            if not child:
                signal.alarm(60)  # rather than for ever
                os._exit(not torch.equal(product(x_RI, 2), before))
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    finally:
        done.set()
        busy.join()
    assert codes == [0] * 5


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, and nothing loaded yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.delenv("CC", raising=False)
    native.library.cache_clear()
    yield tmp_path
    native.library.cache_clear()


@pytest.mark.slow
@needs_kernels
def test_they_are_compiled_once_for_this_user_alone(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native.library()
    (kept,) = (fresh / "cache" / "dora-rl" / "native").iterdir()
    assert stat.S_IMODE(kept.parent.stat().st_mode) == 0o700
    native.library.cache_clear()
    monkeypatch.setattr(native, "_compile", lambda *_: pytest.fail("compiled again"))
    native.library()


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("no-such-compiler", "no C compiler: `no-such-compiler`"),
        ("false", "false` failed"),
        ("true", "true` wrote nothing"),
        ("gcc '", "No closing quotation"),
    ],
)
def test_without_a_compiler_that_works_there_are_none(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, compiler: str, reason: str
) -> None:
    monkeypatch.setenv("CC", compiler)
    with pytest.raises(Unavailable, match=reason):
        native.library()
    with pytest.raises(SettingsError, match=f"rollout.native_kernels cannot be `true`.*{reason}"):
        EngineSettings(native_kernels=True).layout_for(1, 1)
    assert not list(fresh.rglob("*.so"))


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize("left", [0, 9000])
def test_a_damaged_file_is_compiled_anew(fresh: Path, left: int) -> None:
    """To load it would end the process."""
    native.library()
    (kept,) = (fresh / "cache" / "dora-rl" / "native").iterdir()
    whole = kept.read_bytes()
    native.library.cache_clear()
    kept.unlink()  # not in place: it is loaded
    kept.write_bytes(whole[:left])
    native.library()
    (again,) = kept.parent.iterdir()
    assert again.read_bytes() == whole


@pytest.mark.slow
@needs_kernels
def test_a_directory_that_others_can_write_to_is_not_used(fresh: Path) -> None:
    """Whoever can write there could have this process run their code."""
    open_to_all = fresh / "cache" / "dora-rl" / "native"
    open_to_all.mkdir(parents=True)
    open_to_all.chmod(0o777)
    native.library()
    assert not list(open_to_all.iterdir())
    assert list(fresh.glob("dora-rl-*/kernels-*.so"))


def test_they_are_a_fast_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PORTABLE, "1")
    assert not native_kernels().in_force
    assert EngineSettings().layout_for(1, 1) is Layout.PACKED
    assert EngineSettings(deterministic=True).layout_for(1, 1) is Layout.TILED


def test_the_deterministic_mode_is_not_chosen_by_a_trial() -> None:
    assert EngineSettings(deterministic=True).layout_for(1, 1) is Layout.TILED
    assert EngineSettings(native_kernels=False).layout_for(1, 1) is Layout.PACKED
