"""Small versions are stepped together, and uneven ones are not."""

import pytest

from dora_rl.engines.base import Request, Sampled, Sampling
from dora_rl.engines.embedded import EmbeddedEngine, EngineSettings
from dora_rl.engines.embedded import versions as module
from dora_rl.machine.fast_paths import Trial
from dora_rl.models.linear import Layout
from tests.engines.random_versions import Models

SAMPLING = Sampling(max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("stacked"), "qwen3")


@pytest.fixture(autouse=True)
def stacked_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine is better at."""
    monkeypatch.setattr(module, "stacked_steps", lambda: Trial(True, "as the test says"))


def run(
    models: Models, counts: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> tuple[dict, int]:
    """Tokens and log-probabilities of each trajectory, and the steps that were stacked."""
    engine = EmbeddedEngine(
        models.config, EngineSettings(slots=32, block_tokens=8, layout=Layout.PACKED)
    )
    stacked = 0
    find = engine._by_torch._stack_for

    def counting(sequences: list) -> object:
        nonlocal stacked
        found = find(sequences)
        stacked += found is not None
        return found

    monkeypatch.setattr(engine._by_torch, "_stack_for", counting)
    for version in counts:
        engine.install(version, models.path(version))
    for version, count in counts.items():
        for i in range(count):
            prompt = (version + 1, i + 1, 5)
            engine.submit(Request(version * 100 + i, version, prompt, SAMPLING, seed=3))
    found: dict[int, tuple[list[int], list[float]]] = {}
    while not engine.idle:
        for output in engine.step():
            assert isinstance(output, Sampled)
            tokens, logprobs = found.setdefault(output.trajectory, ([], []))
            tokens += output.tokens
            logprobs += output.logprobs
    return found, stacked


@pytest.mark.parametrize(
    ("counts", "steps"),
    [({0: 4, 1: 3, 2: 4}, 8), ({0: 9, 1: 1, 2: 1}, 0), ({0: 4}, 0)],
    ids=["even", "uneven", "alone"],
)
def test_what_comes_out_is_the_same(
    models: Models, counts: dict[int, int], steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    together, stacked = run(models, counts, monkeypatch)
    assert stacked == steps
    for version, count in counts.items():
        alone, _ = run(models, {version: count}, monkeypatch)
        for trajectory, (tokens, logprobs) in alone.items():
            assert together[trajectory][0] == tokens
            assert together[trajectory][1] == pytest.approx(logprobs, abs=1e-4)


def test_versions_are_stepped_apart_where_that_is_faster(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    together, _ = run(models, {0: 4, 1: 3}, monkeypatch)
    monkeypatch.setattr(module, "stacked_steps", lambda: Trial(False, "slower here"))
    apart, stacked = run(models, {0: 4, 1: 3}, monkeypatch)
    assert stacked == 0
    assert {id_: tokens for id_, (tokens, _) in apart.items()} == {
        id_: tokens for id_, (tokens, _) in together.items()
    }
