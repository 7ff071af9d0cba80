"""A side of a move in this process: how it samples, and what it forgets."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dora_rl.benchmarks.contestants import mover
from dora_rl.benchmarks.contestants.mover import Mover
from dora_rl.engines.base import Capabilities, Request, Sampled
from dora_rl.engines.kv_room import BLOCK_TOKENS
from dora_rl.engines.registry import EngineName, EngineOptions


class FakeEngine:
    """Makes one token a step; notes what it was asked for."""

    def __init__(self, exact_noise: bool) -> None:
        self.capabilities = Capabilities(version_slots=1, exact_noise=exact_noise)
        self.log: list[Any] = []
        self.options: Any = None
        self.running: Request | None = None
        self.left = 0

    def create(self, name: EngineName, options: EngineOptions) -> "FakeEngine":
        self.options = options
        return self

    def install(self, version: int, directory: Path) -> str:
        self.log.append("install")
        return "digest"

    def evict(self, version: int) -> None:
        assert self.idle
        self.log.append("evict")

    def submit(self, request: Request) -> None:
        self.log.append(request)
        self.running = request
        self.left = request.sampling.max_tokens - len(request.prefix)

    def cancel(self, trajectory: int) -> bool:
        self.left = 0
        return True

    @property
    def idle(self) -> bool:
        return not self.left

    def step(self) -> list[Sampled]:
        assert self.running is not None
        self.left -= 1
        return [Sampled(self.running.trajectory, 0, "digest", (1,), (0.0,))]


def made(
    monkeypatch: pytest.MonkeyPatch, kind: EngineName, exact_noise: bool
) -> tuple[Mover, FakeEngine]:
    fake = FakeEngine(exact_noise)
    monkeypatch.setattr(mover, "create_engine", fake.create)
    monkeypatch.setattr(mover.torch, "set_num_threads", lambda threads: None)
    monkeypatch.setattr(mover, "socket", SimpleNamespace(socket=lambda fileno: None))
    return Mover("d", "w", threads=1, tokens=509, fd=9, engine=kind), fake


@pytest.mark.parametrize(
    ("kind", "exact_noise", "temperature", "version_slots"),
    [(EngineName.EMBEDDED, True, 1.0, 4), (EngineName.VLLM, False, 0.0, 1)],
)
def test_without_exact_noise_it_is_greedy(
    monkeypatch: pytest.MonkeyPatch,
    kind: EngineName,
    exact_noise: bool,
    temperature: float,
    version_slots: int,
) -> None:
    side, engine = made(monkeypatch, kind, exact_noise)
    assert engine.options.version_slots == version_slots
    assert engine.options.kv_budget_tokens == 18 * BLOCK_TOKENS  # 509 tokens, and 2 that begin
    assert side.begin(1, [5] * 64, [6] * 436, more=8) == [1]
    (request,) = engine.log[1:]
    assert request.sampling.temperature == temperature
    assert request.sampling.max_tokens == 445


def test_emptied_it_has_a_fresh_version_that_has_been_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    side, engine = made(monkeypatch, EngineName.VLLM, False)
    for _ in range(2):
        engine.log.clear()
        side.empty()
        assert engine.log[:2] == ["evict", "install"]
        (warm,) = engine.log[2:]
        assert set(warm.prompt) == {0}  # no measured text begins so
        assert engine.idle
