"""The files and books of a run: what it says of itself."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from dora_rl.cli._training import introduction
from dora_rl.core.protocol.commands import Command
from dora_rl.core.protocol.errors import UserError
from dora_rl.core.protocol.events import Event
from dora_rl.runtime.control.listeners import Listener
from dora_rl.runtime.execution import execute
from dora_rl.runtime.launchers.inline import InlineRuntime
from dora_rl.runtime.prepare.plan import Plan, prepare, read_config
from dora_rl.runtime.records.run_files import RunFiles
from dora_rl.sandbox import linux
from dora_rl.store.durable_files import partial_of
from dora_rl.store.ledger import Changes, Ledger
from dora_rl.store.rundir import METRICS_OF_STEPS
from tests.runtime.harness import PROMPTS, assert_sound, settings


def reward(response: str) -> float:
    return float(len(response))


def test_what_is_not_kept_from_rewards_is_said_once_and_logged(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    config = read_config(settings(model, out, run={"steps": 2, "checkpoint_every": 1}))
    # Not by a name: a fork has the patch as well.
    plan = prepare(config, prompts=PROMPTS, reward=lambda response: reward(response))
    for name in ("confine_files", "mount_read_only"):
        monkeypatch.setattr(linux, name, lambda *_: False)
    assert not any(line.startswith("rewards") for line in introduction(plan))
    plan.task.score_pool().close()
    (said,) = [line for line in introduction(plan) if line.startswith("rewards")]
    assert "files outside the scratch directory" in said
    assert_sound(execute(plan))
    (logged,) = (out / "logs" / "rewards.log").read_text().splitlines()
    assert logged.startswith("sandbox gaps on this kernel: ") and said.endswith(logged)


def test_a_path_that_is_not_utf_8_is_refused_before_anything_is_written(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "caf\udce9"
    try:
        here.mkdir()
    except OSError:
        pytest.skip("names of files are text here")
    monkeypatch.chdir(here)
    config = read_config(settings(model, Path("run")))
    with pytest.raises(UserError, match=r"run.out must be a path in UTF-8: `.*caf\\udce9/run`"):
        prepare(config, prompts=PROMPTS)
    assert not list(here.iterdir())


def test_the_records_of_steps_are_on_the_disk_with_every_commit(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that the ledger has is not taken again, nor is its record written again."""
    metrics = tmp_path / "run" / METRICS_OF_STEPS
    synced = 0
    sizes: set[int] = set()
    fsync, commit = os.fsync, Ledger.commit

    def watched_fsync(fd: int) -> None:
        nonlocal synced
        fsync(fd)
        if os.readlink(f"/proc/self/fd/{fd}") in (str(metrics), str(partial_of(metrics))):
            synced = os.fstat(fd).st_size

    def watched_commit(ledger: Ledger, changes: Changes) -> None:
        assert synced == metrics.stat().st_size
        sizes.add(synced)
        commit(ledger, changes)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(Ledger, "commit", watched_commit)
    run = {"steps": 3, "checkpoint_every": 1}
    config = read_config(settings(model, tmp_path / "run", run=run))
    assert_sound(execute(prepare(config, prompts=PROMPTS)))
    assert len(sizes) >= 3


class Logs(Listener):
    """Whether the log was there when things happened; it is removed each time."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.seen = 0

    def observed(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        if self.log.exists():
            self.seen += 1
            self.log.unlink()


def plan_with_gaps(model: Path, out: Path, patch: pytest.MonkeyPatch, **run: int) -> Plan:
    patch.setattr("dora_rl.sandbox.protocol.Isolation.gaps", lambda self: ["the sea"])
    return prepare(read_config(settings(model, out, run=run)), prompts=PROMPTS)


def test_the_log_is_written_once_in_each_life(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    logs = Logs(out / "logs" / "rewards.log")
    plan = plan_with_gaps(model, out, monkeypatch, steps=2)
    assert_sound(execute(plan, listeners=[logs]))
    assert logs.seen == 1


def test_a_run_does_not_end_for_a_log(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_with_gaps(model, tmp_path / "run", monkeypatch, steps=1)
    with RunFiles(plan) as files:
        (plan.out / "logs").touch()  # where the directory would be
        assert InlineRuntime(files).run().ok


def test_nothing_is_said_where_all_is_kept(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dora_rl.sandbox.protocol.Isolation.gaps", lambda self: [])
    plan = prepare(
        read_config(settings(model, tmp_path / "run", run={"steps": 1})), prompts=PROMPTS
    )
    execute(plan)
    assert not any(line.startswith("rewards") for line in introduction(plan))
    assert not (tmp_path / "run" / "logs").exists()
