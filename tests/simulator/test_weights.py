"""Training, publishing, installing, evicting, carrying over; and what is refused."""

from typing import Any

import pytest

from dora_rl.core.protocol import commands as cmd
from dora_rl.core.protocol import events as ev
from dora_rl.core.protocol.types import BatchGroup, Segment
from dora_rl.simulator.errors import WorldError
from dora_rl.simulator.usage import Timeline
from tests.simulator.scripted import (
    DEVICE,
    EFFICIENCY,
    STEP_S,
    build,
    check_memory,
    installing,
    publish_next,
    shape,
)

# Version 1 is published at 1 s + 5 s + 0.5 s (train) + 0.5 s (publish), and a little.
PUBLISHED_S = 7.1


def with_version_one() -> Any:
    script = installing()
    publish_next(script, 0, at=1.0)
    return script


def test_training_takes_time_and_publishes_one_version_more() -> None:
    script = with_version_one()
    world = build(script)
    world.run(until_s=20)
    (trained_at, trained), *_ = script.seen(ev.BatchTrained)
    assert trained == ev.BatchTrained(0)
    assert trained_at == pytest.approx(1.0 + 5.5, rel=1e-6)
    assert script.last(ev.WeightsPublished) == ev.WeightsPublished(1, "v1")
    assert world.trainer.steps == 1
    assert [(s.kind, s.version) for s in world.facts.train_spans] == [("train", 0)]
    assert [(s.kind, s.version) for s in world.facts.publish_spans] == [("publish", 1)]


def test_repeated_train_and_publish_are_answered_again_and_done_once() -> None:
    script = with_version_one()
    script.at(2.0, cmd.Train(0, ()))
    script.at(6.9, cmd.Publish(1))
    script.at(10.0, cmd.Train(0, ()), cmd.Publish(1))
    world = build(script)
    world.run(until_s=30)
    assert len(script.seen(ev.BatchTrained)) == 2
    assert len(world.facts.train_spans) == 1
    assert len(world.facts.publish_spans) == 1
    assert world.trainer.steps == 1


def test_a_colocated_trainer_takes_the_devices_for_the_switch_and_the_step() -> None:
    script = installing()
    script.on(ev.VersionInstalled, lambda e: [cmd.Start(0, 1, 0, 0)])
    script.at(1.0, cmd.Suspend(), cmd.Suspend(), cmd.Train(0, ()))
    script.on(ev.BatchTrained, lambda e: [cmd.Resume()])
    timeline = Timeline()
    world = build(script, train_devices=0, recorder=timeline)
    world.run(until_s=60)
    installed_at = script.seen(ev.VersionInstalled)[0][0]
    trained_at = script.seen(ev.BatchTrained)[0][0]
    assert trained_at == pytest.approx(1.0 + 10.0 + 5.5, rel=1e-6)
    ended_at = script.seen(ev.TrajectoryFinished)[0][0]
    away_s = trained_at + 10.0 - 1.0
    assert ended_at == pytest.approx(installed_at + 100 * STEP_S + away_s, rel=1e-5)
    usage = world.usage.read(world.now)
    assert usage.suspended_s == pytest.approx(4 * away_s)
    assert usage.slots_s == pytest.approx(4 * (60 - away_s))
    assert usage.busy_s == pytest.approx(100 * STEP_S, rel=1e-4)
    assert [(s.start, s.end) for s in timeline.spans if s.kind == "suspend"] == [
        (1.0, pytest.approx(1.0 + away_s))
    ]


# Installing


def test_an_install_replaces_what_it_evicts() -> None:
    script = with_version_one()
    script.at(PUBLISHED_S, cmd.Install(0, 1, 1, evict=0), cmd.Install(0, 1, 1, evict=0))
    script.at(9.0, cmd.Install(0, 1, 1, evict=0), cmd.Evict(0, 1, 0), cmd.Delete(0))
    world = build(script)
    world.run(until_s=20)
    assert world.instances[0].versions == {1: "v1"}
    installed = [e for _, e in script.seen(ev.VersionInstalled) if e.version == 1]
    assert installed == [ev.VersionInstalled(0, 1, 1, "v1")] * 2  # the second is the repetition
    assert script.last(ev.VersionEvicted) == ev.VersionEvicted(0, 1, 0)
    assert world.facts.installs == 2
    assert world.store.versions == {1}


def test_two_versions_decode_together_and_both_weights_are_read() -> None:
    # Reading the weights once takes 0.01 s.
    device = DEVICE.model_copy(update={"memory_bandwidth": 2e8 / 0.75})
    efficiency = EFFICIENCY.model_copy(update={"decode_overhead_s": 0.0})
    script = with_version_one()
    script.at(PUBLISHED_S, cmd.Install(0, 1, 1))
    script.at(9.0, cmd.Start(0, 1, 0, 0))
    script.at(9.5, cmd.Start(1, 2, 0, 1))
    world = build(
        script, {0: shape(100), 1: shape(20)}, version_slots=2, device=device, efficiency=efficiency
    )
    world.run(until_s=20)
    ends = {e.trajectory: now for now, e in script.seen(ev.TrajectoryFinished)}
    assert ends[1] == pytest.approx(9.5 + 20 * 0.02, abs=0.05)
    assert ends[0] == pytest.approx(9.0 + 80 * 0.01 + 20 * 0.02, abs=0.05)
    assert script.last(ev.TrajectoryFinished).segments == (Segment(0, "v0", 100),)


def test_carried_work_goes_on_in_a_new_segment_and_computes_its_kv_again() -> None:
    script = with_version_one()
    script.at(1.0, *(cmd.Start(t, t + 1, 0, 0) for t in range(6)))
    script.at(PUBLISHED_S, cmd.Install(0, 1, 1, evict=0, carry=True))
    shapes = {0: shape(2000), 1: shape(2000), 2: shape((300, 6.0, 10), 20), 3: shape(600)}
    world = build(script, shapes, group_size=2)
    world.run(until_s=PUBLISHED_S + 0.5)
    assert world.instances[0].stops == 1
    before = world.facts.prefilled_tokens
    world.run(until_s=9.0)
    check_memory(world)
    assert world.instances[0].versions == {1: "v1"}
    assert world.facts.reprefilled_tokens > 2 * 600
    assert world.facts.prefilled_tokens > before
    world.run(until_s=60)
    for _, event in script.seen(ev.TrajectoryFinished):
        versions = [segment.version for segment in event.segments]
        assert (
            versions == {0: [0, 1], 1: [0, 1], 2: [0, 1], 3: [0], 4: [0], 5: [0]}[event.trajectory]
        )
        assert sum(segment.tokens for segment in event.segments) == event.tokens
    assert len(script.seen(ev.TrajectoryFinished)) == 6


def test_carrying_over_without_prefill_keeps_the_kv() -> None:
    script = with_version_one()
    script.at(1.0, cmd.Start(0, 1, 0, 0))
    script.at(PUBLISHED_S, cmd.Install(0, 1, 1, evict=0, carry=True))
    world = build(script, {0: shape(2000)}, carry_reprefill=False)
    world.run(until_s=60)
    assert world.facts.reprefilled_tokens == 0
    assert world.facts.prefilled_tokens == 10
    assert [s.version for s in script.last(ev.TrajectoryFinished).segments] == [0, 1]


@pytest.mark.parametrize(
    ("commands", "complaint"),
    [
        ([cmd.Start(0, 1, 0, 1)], "serves \\[0\\]"),
        ([cmd.Install(0, 1, 1, evict=0)], "not in the store"),
        ([cmd.Install(0, 1, 7)], "not in the store"),
        ([cmd.Delete(0)], "instance 0 holds it"),
        ([cmd.Start(0, 1, 0, 0), cmd.Evict(0, 1, 0)], "under work that runs"),
        ([cmd.Start(0, 1, 0, 0, prefix_tokens=5)], "only 0 tokens"),
        ([cmd.Publish(1)], "published at step 0"),
        ([cmd.Train(1, ())], "asked for at step 0"),
        ([cmd.Train(0, (BatchGroup(0, 0, (0,)),))], "not whole or scored"),
        ([cmd.Transfer(3), cmd.Release(3), cmd.AbortMigration(3)], None),
        ([cmd.Dismiss(0, 1)], "did not ask to leave"),
        ([cmd.Score(0, 1)], None),
        ([cmd.Start(0, 1, 0, 0), cmd.Score(0, 1)], "not whole"),
    ],
)
def test_what_no_engine_could_do_is_refused(commands: Any, complaint: str | None) -> None:
    script = installing()
    script.at(0.9, *commands)
    world = build(script)
    if complaint is None:
        world.run(until_s=5)
    else:
        with pytest.raises(WorldError, match=complaint):
            world.run(until_s=5)


@pytest.mark.parametrize(
    ("commands", "complaint"),
    [
        ([cmd.Install(0, 1, 1)], "too many"),
        ([cmd.Start(0, 1, 0, 0), cmd.Install(0, 1, 1, evict=0)], "under work that runs"),
        ([cmd.Install(0, 1, 1, evict=0), cmd.Start(0, 1, 0, 0)], "serves \\[0\\]"),
        ([cmd.Train(1, ()), cmd.Publish(2)], "during training"),
        ([cmd.Train(1, ()), cmd.Train(2, ())], "during step 1"),
    ],
)
def test_what_a_second_version_must_not_do_is_refused(commands: Any, complaint: str) -> None:
    script = with_version_one()
    script.at(PUBLISHED_S, *commands)
    with pytest.raises(WorldError, match=complaint):
        build(script).run(until_s=20)


def test_a_group_is_trained_once() -> None:
    script = installing()
    batch = (BatchGroup(0, 0, (0,)),)
    script.on(ev.VersionInstalled, lambda e: [cmd.Start(0, 1, 0, 0)])
    script.on(ev.TrajectoryFinished, lambda e: [cmd.Score(0, 1)])
    script.on(ev.TrajectoryScored, lambda e: [cmd.Train(0, batch)])
    script.on(ev.BatchTrained, lambda e: [cmd.Train(1, batch)])
    with pytest.raises(WorldError, match="group 0 is trained twice"):
        build(script).run(until_s=60)
