"""vLLM on Ray: its interpreter beside actors. `make test-vllm` runs it, where both are there."""

from pathlib import Path

import pytest

from dora_rl.core.protocol.events import InstanceJoined, VersionInstalled
from tests.runtime.harness import assert_sound, run
from tests.runtime.test_local import by
from tests.runtime.vllm_runs import VLLM, events
from tests.runtime.vllm_runs import model as model

pytestmark = [pytest.mark.ray, pytest.mark.vllm]


def test_a_run_with_vllm_on_ray(ray_address: str, model: Path, tmp_path: Path) -> None:
    sections = by(VLLM, {"kind": "ray", "ray": {"address": ray_address}})
    core = {"groups_per_step": 2, "group_size": 2, "max_staleness": 3}
    # Version 0 is admitted for K + 1 batches at most: the last one is of a later version.
    steps = core["max_staleness"] + 2
    ended = run(model, tmp_path / "run", **sections, orchestration=core, run={"steps": steps})
    assert_sound(ended)
    assert len(ended.steps) == steps
    joined = events(ended.directory, InstanceJoined)
    assert sorted((event.instance, event.incarnation) for event in joined) == [(0, 0), (1, 0)]
    assert len({event.version for event in events(ended.directory, VersionInstalled)}) > 1
    # The trainer's weights are those sampled from.
    key = "logprob_gap_max"
    gaps = [step.metrics[key] for step in ended.steps if key in step.metrics]
    assert gaps and max(gaps) < 1e-3
