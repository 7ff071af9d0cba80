"""Cores that change roles in a run of processes: the trainer's, while it waits, and rollout's."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dora_rl.core.protocol.events import InstanceJoined
from dora_rl.runtime.control.decisions import ELASTIC_INSTANCES
from tests.runtime.harness import assert_sound, lines, records, run
from tests.runtime.test_local import kind as kind


@pytest.mark.slow
def test_the_trainers_cores_generate_while_it_waits_and_nothing_is_lost(
    kind: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    quick = {"switch_estimate_s": 0.0, "install_estimate_s": 0.0, "elastic_gain": 1.0}
    ended = run(
        model,
        tmp_path / "lent",
        orchestration={"groups_per_step": 4, "elastic": "both", "rebalance_period_s": 0.2, **quick},
        rollout={"slots": 2, "max_tokens": 200, "stop": []},
        runtime=kind,
        run={"steps": 6},
    )
    assert_sound(ended)
    said: Counter[str] = Counter()
    for line in lines(ended.directory)[1:-1]:
        record = json.loads(line)
        names = [record[1], *(record[2] or [])]
        said.update(message[0] for message in names if message[1:2] == [ELASTIC_INSTANCES])
    assert said["Wake"] == said["InstanceWoke"] > 0
    assert said["Sleep"] == said["InstanceSlept"] > 0
    joined = [r.event for r in records(ended.directory) if isinstance(r.event, InstanceJoined)]
    assert {event.instance: event.lendable for event in joined} == {
        0: True,
        ELASTIC_INSTANCES: True,
    }
