"""The real vLLM that hangs, fails, finds no memory or refuses, in a run: `make test-vllm`."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from dora_rl import cli
from dora_rl.core.protocol.commands import Command, Start
from dora_rl.core.protocol.events import Event, InstanceFailed, InstanceJoined, TrajectoryRefused
from dora_rl.runtime.control.listeners import Listener
from tests.runtime.harness import PROMPTS, REWARDS, assert_sound, records, run
from tests.runtime.vllm_runs import (
    ALONE,
    VLLM,
    events,
    faulty_python,
    make_vllm_model,
    session_of,
)
from tests.runtime.vllm_runs import model as model
from tests.runtime.vllm_runs import nobody_is_left_behind as nobody_is_left_behind

pytestmark = pytest.mark.vllm
STEP_S, SILENCE_S = 5.0, 15.0
NOTICED_S = STEP_S + SILENCE_S + 20.0  # with room for a slow machine
STARTED_S = 120.0  # until a worker that cannot start has said so
# Each incarnation has the next fault, after so many steps that gave tokens; then there is none.
FAULTS = """
faults = [{faults}]
steps = 0

def step(engine):
    global steps
    outputs = plain_step(engine)
    steps += bool(outputs)
    number = len(list(struck.iterdir()))
    if steps == 25 and number < len(faults):
        (struck / str(os.getpid())).touch()
        faults[number]()
    return outputs

def raises(error):
    raise error

LLMEngine.step = step
"""


def with_fault(tmp_path: Path, fault: str) -> dict[str, dict[str, Any]]:
    python = faulty_python(tmp_path, fault)
    rollout = {**ALONE["rollout"], "max_tokens": 60, "stop": None, "vllm": {"python": str(python)}}
    return {**ALONE, "rollout": rollout, "run": {"steps": 3, "save_every_s": 0.02}}


class Losses(Listener):
    """When an instance was given up, on the clock of files."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def observed(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        if isinstance(event, InstanceFailed):
            self.at.append(time.time())


def assert_replaced(directory: Path, struck: Sequence[Path]) -> list[str]:
    """Each that was struck has a successor, its work went on, and nothing of it is left.

    Returns the reasons.
    """
    assert [e.incarnation for e in events(directory, InstanceJoined)] == [0, 1, 2]
    sessions = set(map(session_of, psutil.pids()))
    assert not sessions & {int(path.name) for path in struck}
    starts = [c for r in records(directory) for c in r.commands if isinstance(c, Start)]
    assert any(start.prefix_tokens > 0 for start in starts), "all was generated again"
    return [event.reason for event in events(directory, InstanceFailed)]


def struck_in(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "struck").iterdir(), key=lambda path: path.stat().st_mtime)


def test_an_engine_that_hangs_is_replaced_in_time(model: Path, tmp_path: Path) -> None:
    """First its step never returns; then the whole process stands still, heartbeat and all."""
    hangs = "lambda: time.sleep(1e6), lambda: os.kill(os.getpid(), signal.SIGSTOP)"
    sections = with_fault(tmp_path, FAULTS.format(faults=hangs))
    sections["runtime"] = {**sections["runtime"], "step_timeout_s": STEP_S}
    core = {"groups_per_step": 2, "group_size": 2, "heartbeat_timeout_s": SILENCE_S}
    losses = Losses()
    ended = run(model, tmp_path / "run", losses, **sections, orchestration=core)
    assert_sound(ended)
    assert ended.audit.failed == 0
    struck = struck_in(tmp_path)
    reasons = assert_replaced(ended.directory, struck)
    assert len(reasons) == 2 and all("silent" in reason for reason in reasons)
    for path, at in zip(struck, losses.at, strict=True):
        assert 0 < at - path.stat().st_mtime < NOTICED_S


def test_an_engine_whose_step_fails_is_replaced_and_nothing_is_lost(
    model: Path, tmp_path: Path
) -> None:
    """Out of memory in the middle of a run, as Python says it and as torch does."""
    errors = (
        "lambda: raises(RuntimeError('DefaultCPUAllocator: can\\'t allocate memory')), "
        "lambda: raises(MemoryError('no more'))"
    )
    ended = run(model, tmp_path / "run", **with_fault(tmp_path, FAULTS.format(faults=errors)))
    assert_sound(ended)
    assert ended.audit.failed == 0
    first, second = assert_replaced(ended.directory, struck_in(tmp_path))
    assert "instance 0 ended with exit code 1: RuntimeError: DefaultCPUAllocator" in first
    assert "MemoryError: no more" in second


REFUSALS = """
from vllm.exceptions import VLLMValidationError
added = 0

def add_request(engine, request, *given, **more):
    global added
    added += request != "probe"
    if request != "probe" and added % 7 == 3:
        raise VLLMValidationError("not today", parameter="prompt", value=added % 2)
    return plain_add(engine, request, *given, **more)

LLMEngine.add_request = add_request
"""


def test_what_vllm_refuses_fails_alone(model: Path, tmp_path: Path) -> None:
    ended = run(model, tmp_path / "run", **with_fault(tmp_path, REFUSALS))
    assert_sound(ended)
    assert len(ended.steps) == 3
    refused = events(ended.directory, TrajectoryRefused)
    assert refused and len(refused) == len({event.trajectory for event in refused})
    said = "vLLM refuses the trajectory: VLLMValidationError: not today"
    assert all(said in event.reason for event in refused)
    assert ended.audit.failed == sum(ended.audit.failed_for.values()) >= len(refused)
    assert ended.audit.trained > 0
    assert not events(ended.directory, InstanceFailed)


def train(model: Path, out: Path, **settings: object) -> tuple[int, float]:
    """`dora-rl train` with vLLM: its exit code, and how many seconds it took."""
    given = {
        "model.path": model,
        "task.prompts": out.parent / "prompts.jsonl",
        "task.reward": f"{REWARDS}:vowels",
        "rollout.engine": "vllm",
        "rollout.slots": VLLM["rollout"]["slots"],
        "rollout.max_tokens": 40,
        **settings,
    }
    lines = [f'{{"prompt": "{row["prompt"]}"}}\n' for row in PROMPTS]
    (out.parent / "prompts.jsonl").write_text("".join(lines))
    sets = [word for key, value in given.items() for word in ("--set", f"{key}={value}")]
    began = time.monotonic()
    code = cli.main(["train", "--plain", "--steps", "2", "--out", str(out), *sets])
    return code, time.monotonic() - began


def test_kv_that_vllm_finds_no_memory_for_is_told(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the estimate is switched off; else nothing would start."""
    settings = {"rollout.kv_budget_tokens": 10**11, "runtime.min_free_memory_mb": 0}
    code, took_s = train(model, tmp_path / "run", **settings)
    said = capsys.readouterr().err
    assert code == 2 and took_s < STARTED_S, said
    assert "less than requested memory for kv" in said
    assert "rollout.kv_budget_tokens" in said


def test_a_model_that_vllm_refuses_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its heads are of a size that vLLM does not compute."""
    odd = make_vllm_model(tmp_path / "odd", head_dim=20)
    code, took_s = train(odd, tmp_path / "run")
    said = capsys.readouterr().err
    assert code == 2 and took_s < STARTED_S, said
    assert "vLLM cannot compute the model in" in said and "head_dim=20" in said
