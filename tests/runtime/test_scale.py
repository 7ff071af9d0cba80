"""Another number of instances while a run goes on, by each launcher; and who may ask for it."""

import os
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from dora_rl.cli import main
from dora_rl.core.audit import audit_journal
from dora_rl.core.protocol.commands import Command, Dismiss
from dora_rl.core.protocol.events import BatchTrained, Event, InstanceFailed, InstanceJoined
from dora_rl.runtime.control.listeners import Listener
from dora_rl.store.scale_request import REQUEST, put_request, take_request
from tests.runtime.harness import journal, records, run
from tests.runtime.test_local import ALONE, by
from tests.runtime.test_local import kind as kind
from tests.runtime.test_local import nobody_is_left_behind as nobody_is_left_behind


class Scaling(Listener):
    """After a step, asks for two instances; once the second has joined, for one; then stops."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.codes: list[int] = []
        self.steps: list[Callable[[], None]] = [
            lambda: self.ask(2),
            lambda: self.ask(1),
            lambda: os.kill(os.getpid(), signal.SIGINT),
        ]
        self.due = True
        self.threads: list[threading.Thread] = []

    def ask(self, instances: int) -> None:
        args = ["scale", str(self.out), "--instances", str(instances)]
        self.threads.append(threading.Thread(target=lambda: self.codes.append(main(args))))
        self.threads[-1].start()

    def observed(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        self.due |= isinstance(event, InstanceJoined) and event.instance == 1
        self.due |= any(isinstance(command, Dismiss) for command in commands)
        if self.due and self.steps and isinstance(event, BatchTrained):
            self.due = False
            self.steps.pop(0)()


@pytest.mark.slow
def test_a_run_gets_and_gives_up_an_instance(
    kind: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    scaling = Scaling(out)
    ended = run(model, out, scaling, **{**by(ALONE, kind), "run": {"steps": 10_000}})
    for thread in scaling.threads:
        thread.join()
    assert scaling.codes == [0, 0]
    assert ended.ending.interrupted and ended.audit.ok and ended.audit.lost == 0
    assert audit_journal(journal(out).lines()).ok
    found = records(out)
    joined = [r.event.instance for r in found if isinstance(r.event, InstanceJoined)]
    assert joined == [0, 1]
    dismissed = [c.instance for r in found for c in r.commands if isinstance(c, Dismiss)]
    assert dismissed == [1]
    assert not [r.event for r in found if isinstance(r.event, InstanceFailed)]


@pytest.mark.parametrize("instances", ["0", "1025", "-3"])
def test_a_number_that_no_run_can_have_is_refused(
    instances: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["scale", str(tmp_path), "--instances", instances]) == 2
    assert f"must be from 1 to 1024: `{instances}`" in capsys.readouterr().err


def test_a_run_that_is_not_going_on_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["scale", str(tmp_path), "--instances", "2"]) == 2
    assert f"not a run: `{tmp_path}`" in capsys.readouterr().err
    (tmp_path / "config.toml").write_text("")
    assert main(["scale", str(tmp_path), "--instances", "2"]) == 2
    assert f"no durable run is going on in `{tmp_path}`" in capsys.readouterr().err
    assert not (tmp_path / REQUEST).exists()


def test_a_request_is_taken_once_and_the_last_counts(tmp_path: Path) -> None:
    assert take_request(tmp_path) is None
    put_request(tmp_path, 2)
    put_request(tmp_path, 3)
    assert take_request(tmp_path) == 3
    assert take_request(tmp_path) is None


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"instances": 0}', '{"instances": "2"}'])
def test_what_is_no_request_is_taken_away(content: str, tmp_path: Path) -> None:
    (tmp_path / REQUEST).write_text(content)
    assert take_request(tmp_path) is None
    assert not (tmp_path / REQUEST).exists()
