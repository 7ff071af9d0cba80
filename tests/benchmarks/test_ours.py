"""The contestant of ours in this process: which version each row gets, and what it refuses."""

from pathlib import Path
from typing import Any

import pytest

from dora_rl.benchmarks.contestants import ours
from dora_rl.benchmarks.contestants.ours import Ours
from dora_rl.engines.base import Failed, Request, Sampled
from dora_rl.engines.kv_room import BLOCK_TOKENS
from dora_rl.engines.registry import EngineName, EngineOptions


class FakeEngine:
    """Makes every token of a request in one step."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.installed: list[int] = []
        self.waiting: list[Request] = []
        self.name: Any = None
        self.options: Any = None
        self.failing = False

    def create(self, name: EngineName, options: EngineOptions) -> "FakeEngine":
        self.name, self.options = name, options
        return self

    def install(self, version: int, directory: Path) -> str:
        self.installed.append(version)
        return "digest"

    def submit(self, request: Request) -> None:
        self.requests.append(request)
        self.waiting.append(request)

    @property
    def idle(self) -> bool:
        return not self.waiting

    def step(self) -> list[Any]:
        request = self.waiting.pop()
        if self.failing:
            return [Failed(request.trajectory, "no number")]
        count = request.sampling.max_tokens
        nan = float("nan") if request.trajectory == 3 else -1.0
        return [Sampled(request.trajectory, request.version, "d", (1,) * count, (nan,) * count)]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    fake = FakeEngine()
    monkeypatch.setattr(ours, "create_engine", fake.create)
    monkeypatch.setattr(ours, "publish_versions", lambda *given: None)
    monkeypatch.setattr(ours.torch, "set_num_threads", lambda threads: None)
    return fake


def contestant(tmp_path: Path, versions: int | None = None) -> Ours:
    return Ours(
        directory="d",
        work=str(tmp_path),
        threads=1,
        slots=8,
        prompt_tokens=65,
        new_tokens=64,
        versions=versions,
    )


def test_rows_are_split_evenly_over_the_versions(tmp_path: Path, engine: FakeEngine) -> None:
    one = contestant(tmp_path, versions=4)
    assert engine.installed == [0, 1, 2, 3]
    for versions, rows in ((1, [0] * 8), (2, [0] * 4 + [1] * 4), (4, [0, 0, 1, 1, 2, 2, 3, 3])):
        engine.requests.clear()
        one.generate([[1]] * 8, 2, versions)
        assert [request.version for request in engine.requests] == rows


def test_requests_are_all_alike_and_never_the_same_trajectory(
    tmp_path: Path, engine: FakeEngine
) -> None:
    one = contestant(tmp_path)
    for _ in range(2):
        one.generate([[1], [2]], 5)
    assert engine.installed == [0]
    assert [request.trajectory for request in engine.requests] == [0, 1, 2, 3]
    for request in engine.requests:
        assert request.sampling.ignore_eos and request.sampling.temperature == 1
        assert request.sampling.max_tokens == 5


def test_the_kv_memory_holds_the_whole_batch(tmp_path: Path, engine: FakeEngine) -> None:
    contestant(tmp_path)
    block = BLOCK_TOKENS
    needed = -(-65 // block) + -(-65 // block)  # of one sequence, which begins two blocks
    assert engine.options.kv_budget_tokens == 8 * needed * block
    assert engine.options.slots == 8


def test_only_numbers_count_as_log_probabilities(tmp_path: Path, engine: FakeEngine) -> None:
    done = contestant(tmp_path).generate([[1]] * 4, 3)
    assert (done["tokens"], done["logprobs"]) == (12, 9)


def test_anything_but_tokens_ends_the_measurement(tmp_path: Path, engine: FakeEngine) -> None:
    engine.failing = True
    with pytest.raises(RuntimeError, match="no number"):
        contestant(tmp_path).generate([[1]], 2)


def test_any_engine_installs_what_was_published(
    tmp_path: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ours, "publish_versions", lambda *given: pytest.fail("published"))
    Ours(
        directory="d",
        work=str(tmp_path),
        threads=1,
        slots=8,
        prompt_tokens=8,
        new_tokens=8,
        versions=2,
        engine="vllm",
        weights=str(tmp_path / "adapters"),
        lora_rank=4,
    )
    assert (engine.name, engine.options.lora_rank) == (EngineName.VLLM, 4)
    assert engine.options.version_slots == 2 and engine.installed == [0, 1]
