"""What an operator reads: a run's log lines, of the driver and of its workers."""

import json
import logging
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from dora_rl import logs
from dora_rl.core.protocol.commands import Command
from dora_rl.core.protocol.events import Event, TimerFired, TrajectoryFinished
from dora_rl.faultlab.processes import workers_of_run
from dora_rl.runtime.control import messages as ms
from dora_rl.runtime.control.listeners import Listener
from dora_rl.runtime.execution import execute
from dora_rl.runtime.prepare.plan import prepare, read_config
from dora_rl.runtime.records.run_log import RunLog
from dora_rl.samples import Sample
from tests.runtime.harness import PROMPTS, assert_sound, run, settings


class _Killer(Listener):
    """Kills the rollout worker once, in the middle of its work, and later the trainer."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._finished = 0

    def observed(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        if isinstance(event, TrajectoryFinished):
            self._finished += 1
            if self._finished == 3:
                self._kill("rollout-0")

    def trained(self, now: float, report: ms.Trained, samples: Sequence[Sample]) -> None:
        if report.step == 1:
            self._kill("trainer")

    def _kill(self, name: str) -> None:
        psutil.Process(workers_of_run(self._out)[name]).send_signal(signal.SIGKILL)


@pytest.fixture
def as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(logs.FORMAT, "json")


def parsed(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.slow
@pytest.mark.usefixtures("as_json")
def test_lines_of_a_run_in_processes(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    runtime = {"kind": "local", "instances": 1}
    with logs.to_stderr("debug"):
        assert_sound(run(model, out, _Killer(out), runtime=runtime, run={"steps": 4}))
    driver = parsed(capfd.readouterr().err)
    assert {line["role"] for line in driver} == {"driver"}
    replaced = [line for line in driver if line["message"].startswith("worker replaced")]
    assert {line["level"] for line in replaced} == {"warning"}
    assert sorted(line["message"] for line in replaced) == [  # and no line of their logs
        "worker replaced: rollout instance 0 ended with signal SIGKILL",
        "worker replaced: the trainer ended with signal SIGKILL",
    ]
    said = [line["message"] for line in driver]
    for words in ("run `", "step 4 trained: ", "checkpoint written: `", "version 4 published in"):
        assert any(message.startswith(words) for message in said), words

    rollout = parsed((out / "logs" / "rollout-0.log").read_text())
    assert {(line["role"], line["instance"]) for line in rollout} == {("rollout", 0)}
    assert {line["incarnation"] for line in rollout} == {0, 1}
    said = [line["message"] for line in rollout]
    assert said.count("joined: 8 slots") == 2
    assert any(message.startswith("version 0 installed") for message in said)
    trainer = parsed((out / "logs" / "trainer.log").read_text())
    ready = [line for line in trainer if line["message"] == "ready, from the model"]
    assert [(line["role"], line["incarnation"]) for line in ready] == [
        ("trainer", 0),
        ("trainer", 1),
    ]


class _EvaluatorKiller(Listener):
    """Kills the evaluator once, when the first step is trained."""

    def __init__(self, out: Path) -> None:
        self._out = out

    def trained(self, now: float, report: ms.Trained, samples: Sequence[Sample]) -> None:
        if report.step == 0:
            psutil.Process(workers_of_run(self._out)["evaluator"]).kill()


@pytest.mark.slow
@pytest.mark.usefixtures("as_json")
def test_the_death_of_an_evaluator_is_told_and_the_next_has_its_own_incarnation(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    asked = tmp_path / "asked.jsonl"
    asked.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    sections = {
        "runtime": {"kind": "local", "instances": 1},
        "task": {"eval_prompts": str(asked), "eval_every": 1},
    }
    config = read_config(settings(model, out, run={"steps": 3}, **sections))
    plan = prepare(config, prompts=PROMPTS)
    with logs.to_stderr("info"):
        ended = execute(plan, listeners=[_EvaluatorKiller(out)])
    assert_sound(ended)
    driver = [line["message"] for line in parsed(capfd.readouterr().err)]
    replaced = [message for message in driver if message.startswith("worker replaced")]
    assert replaced == ["worker replaced: the evaluator ended with signal SIGKILL"]
    evaluator = parsed((out / "logs" / "evaluator.log").read_text())
    # The first may have been killed before it had written a line.
    assert {line["incarnation"] for line in evaluator} - {0} == {1}


def test_a_resume_tells_from_where(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Inline, a run goes back to each of its checkpoints and is resumed there."""
    with caplog.at_level(logging.INFO, logger="dora_rl"):
        assert_sound(run(model, tmp_path / "run", run={"steps": 4, "checkpoint_every": 2}))
    said = [record.getMessage() for record in caplog.records]
    (resumed,) = [line for line in said if " resumes at step " in line]
    assert " at step 2: " in resumed
    assert resumed.endswith(f"last checkpoint {tmp_path / 'run' / 'checkpoints' / 'step-2'}")
    written = [line for line in said if line.startswith("checkpoint written")]
    assert [line.partition("`, ")[0][-6:] for line in written] == ["step-2", "step-4"]


def test_evaluations_are_told_as_they_begin_and_end(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = read_config(settings(model, tmp_path / "run", run={"steps": 2}))
    plan = prepare(config, prompts=PROMPTS, eval_prompts=PROMPTS)
    with caplog.at_level(logging.INFO, logger="dora_rl.runtime.control.evaluator"):
        assert_sound(execute(plan))
    begun, ended = caplog.messages
    assert begun == "evaluation of version 2 begins"
    assert ended.startswith("evaluation of version 2 ended: reward ")
    assert f", {len(PROMPTS)} responses, 0 failed, " in ended


def test_an_event_that_the_core_refuses_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    RunLog().refused(2.0, TimerFired(), "nothing is due")
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == "event refused: TimerFired: nothing is due"
