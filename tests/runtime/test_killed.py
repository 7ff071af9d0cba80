"""A run that is killed at any point, and resumed, ends as if it had never been killed.

In `inline` to the bit: the same weights, the same journal, the same ledger.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dora_rl import cli
from dora_rl.core.audit import audit_journal
from dora_rl.core.protocol.commands import Command
from dora_rl.core.protocol.events import Event, WeightsPublished
from dora_rl.runtime.control.listeners import Listener
from dora_rl.runtime.execution import execute
from dora_rl.runtime.prepare.plan import plan_resume
from dora_rl.store.ledger import Ledger
from dora_rl.store.rundir import (
    LEDGER,
    METRICS_OF_STEPS,
    SAMPLES,
    TRACE,
    TRAJECTORIES,
    checkpoints_in,
)
from dora_rl.weights.versions import published_versions
from tests.runtime.harness import PROMPTS, assert_sound, journal, lines, run, weights
from tests.runtime.killing import LABEL, digest, labels, live, rows
from tests.store.test_read_only import as_ordinary_user
from tests.store.test_read_only import outside as outside

pytestmark = pytest.mark.faults
SECTIONS: dict[str, Any] = {
    "rollout": {"slots": 6, "max_tokens": 30, "stop": ["a"]},
    "run": {"steps": 4, "checkpoint_every": 2, "keep_checkpoints": 1, "snapshot_every": 20},
}
KILLED = -9
MEASURED = {"train_s"}  # in real time
SHARDS = 8  # of the points, for several processes


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never killed."""
    out = tmp_path_factory.mktemp("whole") / "run"
    assert live(model, out, SECTIONS) == 0
    return out


def steps_of(out: Path) -> list[dict[str, Any]]:
    """The records of all steps, but for what is measured in real time."""
    records = map(json.loads, (out / METRICS_OF_STEPS).read_text().splitlines())
    return [{k: v for k, v in record.items() if k not in MEASURED} for record in records]


def assert_same(out: Path, whole: Path) -> None:
    assert lines(out) == lines(whole)
    assert rows(out) == rows(whole)
    for name in (SAMPLES, TRACE):
        assert (out / name).read_bytes() == (whole / name).read_bytes(), name
    assert steps_of(out) == steps_of(whole)
    (ours,), (theirs,) = checkpoints_in(out / "checkpoints"), checkpoints_in(whole / "checkpoints")
    assert weights(ours[1]) == weights(theirs[1])
    assert audit_journal(journal(out).lines()).ok
    for path in (whole / TRAJECTORIES).iterdir():
        assert (out / TRAJECTORIES / path.name).read_bytes() == path.read_bytes()
    assert {path.name for path in out.iterdir()} == {path.name for path in whole.iterdir()}
    for name in ("weights", "snapshots", TRAJECTORIES):
        ours, theirs = (sorted(p.name for p in (run / name).iterdir()) for run in (out, whole))
        assert ours == theirs


def test_the_points_cover_what_a_run_does(whole: Path) -> None:
    passed = labels(whole)
    assert len(passed) > 100
    assert passed.count("before os.fsync") > 20
    for name in ("os.rename", "os.replace", "shutil.rmtree", "Ledger.commit"):
        assert passed.count(f"before {name}") == passed.count(f"after {name}") > 0, name
    assert passed.count("after os.unlink") > 10  # files of records among them: small here
    for name in ("WeightStore.publish", "EmbeddedEngine.install"):
        assert passed.count(f"before {name}") == passed.count(f"after {name}") >= 4, name


def kill_and_resume(model: Path, out: Path, points: list[int]) -> None:
    """A life for each point, killed there, and one to the end."""
    for point in points:
        assert live(model, out, SECTIONS, point) in (KILLED, 0)
    assert live(model, out, SECTIONS) == 0


@pytest.mark.parametrize("share", [0.3, 0.5, 0.97])
def test_killed_once(share: float, model: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    point = int(share * len(labels(whole)))
    assert live(model, out, SECTIONS, point) == KILLED
    assert live(model, out, SECTIONS) == 0
    assert_same(out, whole)


def test_a_killed_run_is_read_where_nothing_can_be_written(
    model: Path, whole: Path, outside: Path, tmp_path: Path
) -> None:
    commits = [n for n, label in enumerate(labels(whole)) if label == "after Ledger.commit"]
    assert live(model, tmp_path / "run", SECTIONS, commits[2]) == KILLED
    out = outside / "run"
    shutil.copytree(tmp_path / "run", out)
    (out / f"{LEDGER}-shm").unlink()
    assert (out / f"{LEDGER}-wal").stat().st_size
    for command in ("audit", "replay"):  # whatever is imported late is, now
        assert cli.main([command, str(tmp_path / "run")]) == 0
    for file in out.iterdir():
        file.chmod(0o555 if file.is_dir() else 0o444)
    out.chmod(0o555)

    def check() -> None:
        for command in ("audit", "replay"):
            assert cli.main([command, str(out)]) == 0

    try:
        as_ordinary_user(check)
    finally:
        out.chmod(0o755)


def test_killed_again_and_again(model: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    kill_and_resume(model, out, [60, 5, 90, 3])
    assert_same(out, whole)


@pytest.fixture(scope="module")
def kept(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    """A run, and all that its points leave on the disk."""
    directory = tmp_path_factory.mktemp("kept")
    out, states = directory / "run", directory / "states"
    assert live(model, out, SECTIONS, keep=states) == 0
    return out, sorted(states.iterdir())


@pytest.mark.parametrize("shard", range(SHARDS))
def test_killed_at_every_point(
    shard: int, kept: tuple[Path, list[Path]], model: Path, whole: Path
) -> None:
    out, found = kept
    assert len(found) > len(labels(whole)) / 4
    for state in found[shard::SHARDS]:
        shutil.rmtree(out)
        shutil.copytree(state, out)
        where = (out / LABEL).read_text()
        (out / LABEL).unlink()
        assert live(model, out, SECTIONS) == 0, where
        assert_same(out, whole)


@pytest.mark.parametrize("share", [0.2, 0.6, 0.9])
def test_a_death_leaves_what_is_kept(
    share: float, model: Path, whole: Path, tmp_path: Path
) -> None:
    out, states = tmp_path / "run", tmp_path / "states"
    point = int(share * len(labels(whole)))
    assert live(model, out, SECTIONS, point, states) == KILLED
    assert digest(out) in {state.name for state in states.iterdir()}


# Steps whose old log-probabilities are those of the versions that sampled them

RECOMPUTE: dict[str, Any] = {**SECTIONS, "train": {"behaviour": "recompute"}}


def test_killed_two_steps_past_a_checkpoint(model: Path, tmp_path: Path) -> None:
    sections = {**RECOMPUTE, "run": {**SECTIONS["run"], "steps": 6, "checkpoint_every": 3}}
    whole, out = tmp_path / "whole", tmp_path / "run"
    assert live(model, whole, sections) == 0
    points = [n for n, label in enumerate(labels(whole)) if label == "after WeightStore.publish"]
    assert live(model, out, sections, points[5]) == KILLED
    assert [step for step, _ in checkpoints_in(out / "checkpoints")] == [3]
    assert live(model, out, sections) == 0
    assert_same(out, whole)


class Dies(Listener):
    """The driver, when a version is published."""

    def __init__(self, version: int) -> None:
        self.version = version

    def observed(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        if isinstance(event, WeightsPublished) and event.version == self.version:
            raise RuntimeError("the driver dies")


def test_steps_are_taken_again_with_versions_that_the_core_let_go_of(
    model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    sections = {
        **RECOMPUTE,
        "runtime": {"kind": "local"},
        "orchestration": {"paradigm": "sync"},
        "run": {"steps": 4, "checkpoint_every": None},
    }
    with pytest.raises(RuntimeError, match="the driver dies"):
        run(model, out, Dies(3), **sections)
    assert published_versions(out / "weights") == [0, 1, 2, 3]
    with Ledger.read(out / LEDGER) as ledger:
        gone = [row.version for row in ledger.versions() if row.state == "deleted"]
    assert gone  # without them nothing could be taken again
    ended = execute(plan_resume(out, prompts=PROMPTS))
    assert_sound(ended)
    assert [record.step for record in ended.steps] == [1, 2, 3, 4]
    with Ledger.read(out / LEDGER) as ledger:
        kept = [row.version for row in ledger.versions() if row.state != "deleted"]
    assert published_versions(out / "weights") == kept
