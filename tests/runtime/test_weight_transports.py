"""Whole runs by each transport of weights: they are the same run, and resume as it does."""

from pathlib import Path
from typing import Any

import pytest

from dora_rl.core.protocol.errors import UserError
from dora_rl.runtime.execution import Run, execute
from dora_rl.runtime.prepare.plan import plan_resume, read_config
from tests.runtime.harness import PROMPTS, assert_sound, lines, run, settings, weights
from tests.runtime.test_resume import plan_of, published, stopped

WAYS: dict[str, dict[str, Any]] = {
    "deltas": {"delta": True},
    "process group": {"transport": "process_group"},
}
# Steps so small that few of the published numbers change.
TRAIN = {"learning_rate": 1e-6, "threads": 1, "publish_dtype": "bfloat16"}


def inline(way: dict[str, Any], instances: int = 2) -> dict[str, Any]:
    often = 0.01  # so that every step hears of what was sent before it
    return {"kind": "inline", "instances": instances, "weights": way, "report_period_s": often}


@pytest.fixture(scope="module")
def plain(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(model, tmp_path_factory.mktemp("runs") / "plain", train=TRAIN, runtime=inline({}))


@pytest.mark.parametrize("way", WAYS)
def test_a_run_is_the_same_by_whatever_transport(
    way: str, plain: Run, model: Path, tmp_path: Path
) -> None:
    ended = run(model, tmp_path / "run", train=TRAIN, runtime=inline(WAYS[way]))
    assert_sound(ended)
    assert ended.checkpoint is not None and plain.checkpoint is not None
    assert lines(ended.directory) == lines(plain.directory)
    assert weights(ended.checkpoint) == weights(plain.checkpoint)
    assert {record.weights_sent_share for record in plain.steps} <= {1.0, None}
    shares = [r.weights_sent_share for r in ended.steps if r.weights_sent_share is not None]
    assert shares and min(shares) < 0.5  # the manifest counts, and this model is tiny
    assert not (ended.directory / "exchange").exists()
    assert not (ended.directory / "weights" / "endpoint.json").exists()


@pytest.mark.parametrize("way", WAYS)
def test_a_stopped_run_goes_on(way: str, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    stopped(plan_of(model, out, train=TRAIN, runtime=inline(WAYS[way])), published(2))
    assert_sound(execute(plan_resume(out, prompts=PROMPTS)))


def test_what_cannot_be_is_refused(model: Path, tmp_path: Path) -> None:
    for way, said in (
        ({"transport": "rdma"}, "runtime.weights.transport.*`rdma`"),
        ({"timeout_s": 0}, "runtime.weights.timeout_s.*`0`"),
        ({"deltas": True}, "runtime.weights.deltas.*delta"),
        ({"transport": "object_store"}, "runtime.weights.transport needs a Ray.*`inline`"),
    ):
        with pytest.raises(UserError, match=said):
            read_config(settings(model, tmp_path / "run", runtime=inline(way)))
