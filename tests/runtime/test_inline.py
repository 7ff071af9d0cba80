"""Whole runs in one process: a function of the seed, sound in every paradigm."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dora_rl.core.protocol.commands import Delete, Release, Reserve
from dora_rl.core.protocol.events import TrajectoryFinished, VersionPinned, VersionUnpinned
from dora_rl.core.protocol.settings import ParadigmName
from dora_rl.core.protocol.types import Version
from dora_rl.models.tokenizer import load_tokenizer
from dora_rl.runtime.execution import Run
from tests.runtime.harness import (
    PROMPTS,
    REWARDS,
    Seen,
    assert_sound,
    lines,
    records,
    run,
    weights,
)

ORCHESTRATION: dict[str, Any] = {"groups_per_step": 2, "group_size": 2}


@pytest.fixture(scope="module")
def plain(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run that others are compared with."""
    return run(model, tmp_path_factory.mktemp("runs") / "plain")


def checkpoint(ended: Run) -> bytes:
    assert ended.checkpoint is not None
    return weights(ended.checkpoint)


def test_a_run_is_sound_and_has_learnt(plain: Run, model: Path) -> None:
    assert_sound(plain)
    assert [record.step for record in plain.steps] == [1, 2, 3, 4]
    assert checkpoint(plain) != weights(model)
    assert max(record.staleness_max for record in plain.steps) > 0
    assert len({record.length_mean for record in plain.steps}) > 1


def test_the_same_seed_gives_the_same_bytes(plain: Run, model: Path, tmp_path: Path) -> None:
    again = run(model, tmp_path / "again")
    read = [(ended.directory / "journal.jsonl").read_bytes() for ended in (plain, again)]
    assert read[0] == read[1]
    assert checkpoint(again) == checkpoint(plain)


def test_another_seed_gives_another_run(plain: Run, model: Path, tmp_path: Path) -> None:
    other = run(model, tmp_path / "other", run={"seed": 1, "steps": 4})
    assert_sound(other)
    assert lines(other.directory) != lines(plain.directory)
    assert checkpoint(other) != checkpoint(plain)


def test_multi_version_at_k_0_is_sync(model: Path, tmp_path: Path) -> None:
    both = [
        run(model, tmp_path / name, orchestration=ORCHESTRATION | {"paradigm": name} | more)
        for name, more in (("sync", {}), ("multi_version", {"max_staleness": 0}))
    ]
    assert lines(both[0].directory) == lines(both[1].directory)
    assert checkpoint(both[0]) == checkpoint(both[1])


@pytest.mark.parametrize("paradigm", [p for p in ParadigmName if p != "sync"])
def test_every_paradigm_runs(paradigm: ParadigmName, model: Path, tmp_path: Path) -> None:
    ended = run(
        model,
        tmp_path / paradigm,
        rollout={"slots": 4, "max_tokens": 40, "stop": ["a"]},
        orchestration=ORCHESTRATION | {"paradigm": str(paradigm), "group_size": 3},
        runtime={"kind": "inline", "instances": 2},
    )
    assert_sound(ended)
    mixes = paradigm in (ParadigmName.PARTIAL, ParadigmName.IN_FLIGHT)
    assert (ended.audit.mixed > 0) == mixes
    assert bool(ended.audit.notes) == mixes
    assert all(s.staleness_max <= ended.audit.max_staleness for s in ended.steps) or mixes


def test_work_moves_between_instances(model: Path, tmp_path: Path) -> None:
    ended = run(
        model,
        tmp_path / "moves",
        rollout={"slots": 4, "max_tokens": 40, "stop": ["a"], "version_slots": 1},
        orchestration=ORCHESTRATION | {"max_staleness": 3, "rebalance_period_s": 0.05},
        runtime={"kind": "inline", "instances": 2},
        run={"steps": 6},
    )
    assert_sound(ended)
    commands = [c for record in records(ended.directory) for c in record.commands]
    reserved = {c.migration: c.moves for c in commands if isinstance(c, Reserve)}
    released = [c.migration for c in commands if isinstance(c, Release)]
    moved = {move.trajectory for name in released for move in reserved[name]}
    assert moved
    for record in records(ended.directory):
        if isinstance(record.event, TrajectoryFinished) and record.event.trajectory in moved:
            assert len(record.event.segments) == 1
    assert ended.audit.mixed == 0


# Prompts


@pytest.mark.parametrize(
    ("epochs", "prompts", "steps"), [(1, 6, 3), (2, 4, 4), (1, 5, 3)], ids=["one", "two", "odd"]
)
def test_prompts_that_end_end_the_run(
    epochs: int, prompts: int, steps: int, model: Path, tmp_path: Path
) -> None:
    seen = Seen(tmp_path / "short")
    ended = run(
        model,
        tmp_path / "short",
        seen,
        prompts=PROMPTS[:prompts],
        task={"epochs": epochs},
        run={"steps": 50},
    )
    assert_sound(ended)
    assert "prompt" in ended.ending.reason
    assert len(ended.steps) == steps
    assert ended.audit.issued == ended.audit.trained == epochs * prompts * 2
    texts = Counter(sample.trajectory.prompt for sample in seen.samples)
    assert list(texts.values()) == [epochs * 2] * prompts


# Episodes


def test_an_episode_is_one_trajectory_of_one_version(model: Path, tmp_path: Path) -> None:
    seen = Seen(tmp_path / "episodes")
    ended = run(
        model,
        tmp_path / "episodes",
        seen,
        task={"reward": None, "environment": f"{REWARDS}:Counting"},
        rollout={"slots": 4, "max_tokens": 60},
        runtime={"instances": 2},
    )
    assert_sound(ended)
    assert {sample.trajectory.turns for sample in seen.samples} >= {2, 3}
    tokenizer = load_tokenizer(model)
    assert tokenizer is not None
    for step, batch in enumerate(seen.batches):
        for sample in batch:
            whole = sample.trajectory
            assert sample.reward == whole.turns * (whole.turns + 1) / 2  # 1 + 2 + ...
            assert sample.parts == {"environment": sample.reward}
            assert [tokenizer.decode(whole.tokens[a:b]) for a, b in whole.observed] == [
                f" t{turn} " for turn in range(1, whole.turns)
            ]
            said = {i for a, b in whole.observed for i in range(a, b)}
            for i, logprob in enumerate(whole.logprobs):
                assert (logprob == 0.0) == (i in said)
            assert [s.tokens for s in whole.segments] == [len(whole.tokens) - len(said)]
            assert {s.version for s in whole.segments} == {whole.version}
            assert 0 <= step - whole.version <= 2
            assert tokenizer.decode(whole.prompt).endswith(" begin")


def test_an_episode_whose_observation_has_no_room_is_truncated(model: Path, tmp_path: Path) -> None:
    """Its environment ends it with the third turn: whatever is shorter was cut off."""
    seen = Seen(tmp_path / "cut")
    ended = run(
        model,
        tmp_path / "cut",
        seen,
        algorithm={"preset": "dr_grpo", "mask_truncated": True},
        task={"reward": None, "environment": f"{REWARDS}:Counting"},
        rollout={"max_tokens": 16},
    )
    assert_sound(ended)
    cut = [sample.trajectory for sample in seen.samples if sample.trajectory.turns < 3]
    assert any(len(whole.tokens) < 16 for whole in cut), "none was cut for want of room"
    assert all(whole.truncated for whole in cut)
    for record, batch in zip(ended.steps, seen.batches, strict=True):
        kept = [s.trajectory for s in batch if not s.trajectory.truncated]
        assert record.truncated == len(batch) - len(kept)
        assert record.metrics["trained_tokens"] == sum(whole.num_sampled for whole in kept)


def test_an_environment_and_a_reward_add_up(model: Path, tmp_path: Path) -> None:
    seen = Seen(tmp_path / "both")
    ended = run(
        model,
        tmp_path / "both",
        seen,
        task={"environment": f"{REWARDS}:Counting", "max_turns": 2},
        rollout={"max_tokens": 60},
        run={"steps": 2},
    )
    assert_sound(ended)
    for sample in seen.samples:
        assert set(sample.parts) == {"environment", "vowels"}
        assert sample.reward == pytest.approx(sum(sample.parts.values()))
        assert sample.trajectory.turns <= 2
        assert sample.parts["environment"] == {1: 1.0, 2: 3.0}[sample.trajectory.turns]
    assert any(sample.trajectory.turns == 2 for sample in seen.samples)


# Evaluation


def test_evaluation_changes_nothing_but_leases(plain: Run, model: Path, tmp_path: Path) -> None:
    asked = tmp_path / "eval.jsonl"
    asked.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS[:3]))
    task = {"eval_prompts": str(asked), "eval_every": 2, "eval_samples": 2}
    ended = run(model, tmp_path / "watched", task=task)
    assert_sound(ended)
    assert checkpoint(ended) == checkpoint(plain)
    assert without_leases(ended) == without_leases(plain)
    assert [e.version for e in ended.evaluations] == [0, 2, 4]
    assert [(e.responses, e.failed) for e in ended.evaluations] == [(6, 0)] * 3
    assert all(e.length_mean > 0 and e.seconds > 0 for e in ended.evaluations)
    metrics = (ended.directory / "metrics.jsonl").read_text().splitlines()
    kinds = Counter(json.loads(line)["kind"] for line in metrics)
    assert kinds == {"step": 4, "evaluation": 3}


def without_leases(ended: Run) -> list[tuple[float, str, list[str]]]:
    """The journal without pins, and without deletions, which wait for them."""
    return [
        (r.now, repr(r.event), [repr(c) for c in r.commands if not isinstance(c, Delete)])
        for r in records(ended.directory)
        if not isinstance(r.event, VersionPinned | VersionUnpinned)
    ]


def test_a_pinned_version_is_there_until_it_is_evaluated(model: Path, tmp_path: Path) -> None:
    """Evaluations last longer than the versions otherwise would."""
    asked = tmp_path / "eval.jsonl"
    asked.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    task = {"eval_prompts": str(asked), "eval_every": 2, "eval_samples": 2}
    ended = run(
        model,
        tmp_path / "slow",
        task=task,
        rollout={"slots": 2, "max_tokens": 8},
        orchestration={"max_staleness": 0},
        run={"steps": 8},
    )
    assert_sound(ended)
    assert [e.version for e in ended.evaluations] == [0, 2, 4, 6, 8]
    assert all((e.responses, e.failed) == (12, 0) for e in ended.evaluations)
    pinned: set[Version] = set()
    late = 0
    for record in records(ended.directory):
        if isinstance(record.event, VersionPinned):
            pinned.add(record.event.version)
        if isinstance(record.event, VersionUnpinned):
            pinned.remove(record.event.version)
            late += any(isinstance(c, Delete) for c in record.commands)
        assert not any(isinstance(c, Delete) and c.version in pinned for c in record.commands)
    assert late > 0


def test_with_devices_that_are_lent_a_run_is_sound_and_a_function_of_its_seed(
    model: Path, tmp_path: Path
) -> None:
    quick = {"switch_estimate_s": 0.0, "install_estimate_s": 0.0, "elastic_gain": 1.0}
    lent = {"orchestration": {**ORCHESTRATION, "elastic": "both", **quick}}
    ended = [
        run(model, tmp_path / name, **lent, run={"steps": 6}, rollout={"slots": 2})
        for name in ("first", "second")
    ]
    assert_sound(ended[0])
    journals = [(each.directory / "journal.jsonl").read_bytes() for each in ended]
    assert journals[0] == journals[1]
    for command in ("Wake", "Sleep"):
        assert f'["{command}",10000,'.encode() in journals[0]
    assert checkpoint(ended[0]) == checkpoint(ended[1])
