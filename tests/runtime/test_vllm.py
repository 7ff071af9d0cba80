"""Runs whose rollout workers are vLLM, in its own environment: `make test-vllm`."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path

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
from tests.runtime.harness import assert_sound, records, run
from tests.runtime.vllm_runs import ALONE, VLLM, events, faulty_python, session_of
from tests.runtime.vllm_runs import model as model
from tests.runtime.vllm_runs import nobody_is_left_behind as nobody_is_left_behind

pytestmark = pytest.mark.vllm
SLOW_STEPS = """
def step(engine):
    time.sleep(0.02)
    return plain_step(engine)

LLMEngine.step = step
"""


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


def test_trajectories_move_with_their_kv(model: Path, tmp_path: Path) -> None:
    """Stragglers of a version give up an instance to the next one, and nothing is read anew.

    A slow trainer would find no stragglers, so the engines wait in every step. Where they are when
    a version comes is chance, so that a run may do without a move: but hardly five of them.
    """
    python = faulty_python(tmp_path, SLOW_STEPS)
    rollout = {"max_tokens": 200, "stop": ["q"], "vllm": {"python": str(python)}}
    sections = {
        **VLLM,
        "rollout": {**VLLM["rollout"], **rollout},
        "orchestration": {
            "max_staleness": 3,
            "pipeline_depth": 4,
            "rebalance_period_s": 0.2,
            "install_estimate_s": 0.05,
            "migration_estimate_s": 0.01,
        },
        "run": {"steps": 6},
    }
    moves = []
    for number in range(5):
        ended = run(model, tmp_path / f"run-{number}", **sections)
        assert_sound(ended)
        assert ended.audit.failed == 0
        assert ended.summary.reprefilled_tokens == 0
        key = "logprob_gap_max"
        gaps = [step.metrics[key] for step in ended.steps if key in step.metrics]
        assert gaps and max(gaps) < 1e-3
        if moves := events(ended.directory, MigrationCompleted):
            break
    assert moves


def test_one_engine_serves_several_adapters(model: Path, tmp_path: Path) -> None:
    """Versions that are LoRA adapters: no instance is re-assigned, none is waited for."""
    sections = {**ALONE, "run": {"steps": 5}}
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
    sections = {**ALONE, "run": {"steps": 3}}
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
