"""A run that is killed at any point, and resumed, ends as if it had never been killed.

In `inline` to the bit: the same weights, the same journal, the same ledger.
"""

from pathlib import Path
from typing import Any

import pytest

from dora_rl.core.audit import audit_journal
from dora_rl.store.rundir import checkpoints_in
from tests.runtime.harness import journal, lines, weights
from tests.runtime.killing import labels, live, rows

pytestmark = pytest.mark.faults
SECTIONS: dict[str, Any] = {
    "rollout": {"slots": 6, "max_tokens": 30, "stop": ["a"]},
    "run": {"steps": 4, "checkpoint_every": 2, "keep_checkpoints": 1},
}
KILLED = -9
SHARDS = 8  # of the points, for several processes


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never killed."""
    out = tmp_path_factory.mktemp("whole") / "run"
    assert live(model, out, SECTIONS) == 0
    return out


def assert_same(out: Path, whole: Path) -> None:
    assert lines(out) == lines(whole)
    assert rows(out) == rows(whole)
    (ours,), (theirs,) = checkpoints_in(out / "checkpoints"), checkpoints_in(whole / "checkpoints")
    assert weights(ours[1]) == weights(theirs[1])
    assert audit_journal(journal(out).lines()).ok
    assert {path.name for path in out.iterdir()} == {path.name for path in whole.iterdir()}
    versions = [sorted(path.name for path in (run / "weights").iterdir()) for run in (out, whole)]
    assert versions[0] == versions[1]


def test_the_points_cover_what_a_run_does(whole: Path) -> None:
    passed = labels(whole)
    assert len(passed) > 100
    for name in ("os.fsync", "os.rename", "os.replace", "shutil.rmtree", "Ledger.commit"):
        assert passed.count(f"before {name}") == passed.count(f"after {name}") > 0, name
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


def test_killed_again_and_again(model: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    kill_and_resume(model, out, [60, 5, 90, 3])
    assert_same(out, whole)


@pytest.mark.parametrize("shard", range(SHARDS))
def test_killed_at_every_point(shard: int, model: Path, whole: Path, tmp_path: Path) -> None:
    passed = labels(whole)
    for point in range(shard, len(passed), SHARDS):
        out = tmp_path / f"run-{point}"
        assert live(model, out, SECTIONS, point) == KILLED, passed[point]
        assert live(model, out, SECTIONS) == 0, passed[point]
        assert_same(out, whole)
