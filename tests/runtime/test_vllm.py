"""Runs whose rollout workers are vLLM, in its own environment: `make test-vllm`."""

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from dora_rl.core.protocol.commands import Command, Install, Start
from dora_rl.core.protocol.events import (
    Event,
    InstanceFailed,
    MigrationCompleted,
    TrajectoryFinished,
    VersionInstalled,
)
from dora_rl.faultlab.processes import workers_of_driver
from dora_rl.runtime.control.listeners import Listener
from tests.engines.vllm.shape import SHAPE
from tests.models.random_models import make_model, make_tokenizer
from tests.runtime.harness import assert_sound, children, records, run

pytestmark = pytest.mark.vllm
VOCABULARY = 300
VLLM: dict[str, dict[str, Any]] = {
    "runtime": {"kind": "local", "instances": 2, "report_period_s": 0.1},
    "rollout": {"engine": "vllm", "slots": 4, "max_tokens": 40, "stop": ["a"]},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama whose heads vLLM takes, with a tokenizer; token 0 ends a text."""
    directory = tmp_path_factory.mktemp("model")
    shape = {**SHAPE, "vocab_size": VOCABULARY, "eos_token_id": 0, "bos_token_id": 0}
    make_model(directory, "llama", seed=1, **shape)
    make_tokenizer(VOCABULARY).save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(autouse=True)
def nobody_is_left_behind() -> Iterator[None]:
    before = {child.pid for child in children()}
    yield
    assert {child.pid for child in children()} <= before


class Killer(Listener):
    """Kills an instance once it has finished a few trajectories."""

    def __init__(self, after: int) -> None:
        self.left = after
        self.killed: int | None = None  # a worker leads a session: what it starts is in that
        self.children: list[psutil.Process] = []

    def observed(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        self.left -= isinstance(event, TrajectoryFinished)
        if self.left <= 0 and self.killed is None:
            self.killed = workers_of_driver(os.getpid())["rollout-0"]
            self.children = psutil.Process(self.killed).children(recursive=True)
            os.kill(self.killed, signal.SIGKILL)


def session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def events(directory: Path, kind: type[Event]) -> list[Any]:
    return [r.event for r in records(directory) if isinstance(r.event, kind)]


def test_a_run_with_vllm(model: Path, tmp_path: Path) -> None:
    """One version each, though an engine holds one at a time: instances are re-assigned."""
    ended = run(model, tmp_path / "run", **{**VLLM, "run": {"steps": 5}})
    assert_sound(ended)
    assert len(ended.steps) == 5
    installed = events(ended.directory, VersionInstalled)
    assert len({event.version for event in installed}) > 2
    # Of steps with trajectories of their own version: the trainer's weights are those sampled from.
    key = "logprob_gap_max"
    gaps = [step.metrics[key] for step in ended.steps if key in step.metrics]
    assert gaps and max(gaps) < 1e-3


def test_one_engine_serves_several_adapters(model: Path, tmp_path: Path) -> None:
    """Versions that are LoRA adapters: no instance is re-assigned, none is waited for."""
    sections = {**VLLM, "runtime": {**VLLM["runtime"], "instances": 1}, "run": {"steps": 5}}
    ended = run(model, tmp_path / "run", **sections, model={"lora": {"rank": 4}})
    assert_sound(ended)
    assert max(step.versions_live for step in ended.steps) >= 3
    assert events(ended.directory, MigrationCompleted) == []
    key = "logprob_gap_max"
    gaps = [step.metrics[key] for step in ended.steps if key in step.metrics]
    assert gaps and max(gaps) < 1e-3
    assert ended.checkpoint is not None
    assert (ended.checkpoint / "adapter_model.safetensors").is_file()


def test_a_killed_engine_is_replaced_and_leaves_nobody_behind(model: Path, tmp_path: Path) -> None:
    sections = {**VLLM, "runtime": {**VLLM["runtime"], "instances": 1}, "run": {"steps": 3}}
    killer = Killer(after=3)
    ended = run(model, tmp_path / "run", killer, **sections)
    assert_sound(ended)
    assert killer.killed is not None
    assert killer.children == []  # vLLM is in the worker's own process
    assert killer.killed not in map(session_of, psutil.pids())
    (lost,) = events(ended.directory, InstanceFailed)
    assert "SIGKILL" in lost.reason
    commands = [c for r in records(ended.directory) for c in r.commands]
    versions = {c.version for c in commands if isinstance(c, Start)}
    assert {c.version for c in commands if isinstance(c, Install)} >= versions
    assert ended.audit.failed == 0
    assert not events(ended.directory, MigrationCompleted)  # one instance alone
