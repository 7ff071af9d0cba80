"""The actions and the handlers, one situation each, through the public entry alone."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from dora_rl.core.audit import Audit
from dora_rl.core.audit.invariants import check
from dora_rl.core.history.codec import dumps
from dora_rl.core.orchestrator import Orchestrator
from dora_rl.core.protocol import commands as cm
from dora_rl.core.protocol import events as ev
from dora_rl.core.protocol.errors import IllegalTransition, RefusedEvent
from dora_rl.core.protocol.settings import ParadigmName, Settings
from dora_rl.core.protocol.types import (
    TRAJECTORY_MOVES,
    Length,
    Placement,
    Segment,
    TrajectoryState,
    check_move,
)
from tests.core.adversary import Adversary, digest


def world_of(instances: int = 2, slots: int = 4, **settings) -> Adversary:
    """A world in which version 0 is served and work has begun."""
    settings.setdefault("groups_per_step", 2)
    settings.setdefault("group_size", 2)
    world = Adversary(Settings(**settings))
    for name in range(instances):
        world.join(name, slots=slots, version_slots=settings.get("version_slots", 1))
    drain(world)
    return world


def drain(world: Adversary, *, without: tuple[type, ...] = ()) -> None:
    """Deliver what is in the pool, in order, except events of some kinds."""
    while True:
        index = next((i for i, e in enumerate(world.pool) if not isinstance(e, without)), None)
        if index is None or world.halted:
            return
        world.deliver(index)
        check(world.core.state)


def commands(world: Adversary, kind: type) -> list:
    return [c for _, _, answers in world.log for c in answers if isinstance(c, kind)]


def running(world: Adversary) -> list[int]:
    return sorted(t for engine in world.engines.values() for t in engine.running)


def act(world: Adversary, trajectory: int, what: str) -> None:
    name = next(n for n, engine in world.engines.items() if trajectory in engine.running)
    world.act(name, trajectory, what)


def finish(world: Adversary, *trajectories: int) -> None:
    for trajectory in trajectories:
        act(world, trajectory, "finish")


def finish_by_engine(world: Adversary, name: int) -> None:
    """Finish everything that runs on one instance."""
    engine = world.engines[name]
    for trajectory in sorted(engine.running):
        run = engine.running.pop(trajectory)
        world.pool.append(
            ev.TrajectoryFinished(
                trajectory, run.fence, 1, (Segment(run.version, digest(run.version), 1),)
            )
        )


def age(world: Adversary, seconds: float, *, report: bool = True) -> None:
    """Let time pass in small steps, with heartbeats."""
    for _ in range(int(seconds // 5)):
        if report:
            for name in sorted(world.engines):
                world.report(name)
        world.advance(5.0)
        check(world.core.state)


# Life cycle


def test_a_run_from_the_first_version_to_the_last_step() -> None:
    world = world_of(max_steps=3)
    run_to_its_end(world)
    assert world.halted == cm.Halt(True, "3 steps trained")
    work = world.core.state.work
    assert work.trained == 3 * 2 * 2
    assert not work.groups, "nothing is left over that no step could have consumed"
    assert [t.step for t in world.trained] == [0, 1, 2]
    assert world.core.handle(1e9, ev.TimerFired()) == []


def run_to_its_end(world: Adversary) -> None:
    while not world.halted:
        for name in list(world.engines):
            finish_by_engine(world, name)
        drain(world)


@pytest.mark.parametrize("paradigm", list(ParadigmName))
@pytest.mark.parametrize("ended", [False, True])
def test_a_run_takes_more_steps_than_it_was_started_for(
    paradigm: ParadigmName, ended: bool
) -> None:
    """Told at its end, or before; the audit, a replay and a snapshot know of it."""
    world = world_of(max_steps=3, paradigm=paradigm)
    if ended:
        run_to_its_end(world)
        world.halted = None
    world.send(ev.StepLimitRaised(5))
    assert Orchestrator.restore(world.core.snapshot()).settings.max_steps == 5
    run_to_its_end(world)
    assert world.halted == cm.Halt(True, "5 steps trained")
    assert [t.step for t in world.trained] == list(range(5))
    assert not world.core.state.work.groups
    settings = replace(world.core.settings, max_steps=3)
    audit, again = Audit(settings), Orchestrator(settings)
    for now, event, answers in world.log:
        audit.observe(now, event, answers)
        assert again.handle(now, event) == answers
    report = audit.report()
    assert report.ok and report.steps == 5 and report.halted == "done: 5 steps trained"


def test_the_limit_of_steps_is_raised_alone() -> None:
    world = world_of(max_steps=3)
    for limit in (3, 2, 0, -1):
        with pytest.raises(RefusedEvent, match="not raised"):
            world.send(ev.StepLimitRaised(limit))
    with pytest.raises(RefusedEvent, match="not raised"):
        world_of().send(ev.StepLimitRaised(7))  # it has none


def test_a_run_that_failed_is_not_done_for_its_steps() -> None:
    world = world_of(max_steps=3, max_wasted_batches=1)
    while not world.halted:
        for trajectory in running(world):
            act(world, trajectory, "fail")
        drain(world)
    assert not world.halted.ok
    with pytest.raises(RefusedEvent, match="not because all steps were taken"):
        world.send(ev.StepLimitRaised(9))


def test_finite_prompts_end_with_a_short_batch() -> None:
    core = Orchestrator(Settings(groups_per_step=2, group_size=1))
    core.handle(0, ev.WeightsPublished(0, "d"))
    core.handle(0, ev.InstanceJoined(0, 0, 8, 1000))
    core.handle(0, ev.PromptsAvailable(0, 3, exhausted=True))
    starts = core.handle(0, ev.VersionInstalled(0, 0, 0, "d"))
    answers: list[cm.Command] = []
    for start in [c for c in starts if isinstance(c, cm.Start)]:
        core.handle(
            1, ev.TrajectoryFinished(start.trajectory, start.fence, 1, (Segment(0, "d", 1),))
        )
        core.handle(1, ev.TrajectoryScored(start.trajectory, start.fence))
        answers += core.handle(1, ev.GroupJudged(start.trajectory))
    assert [len(c.groups) for c in answers if isinstance(c, cm.Train)] == [2]
    core.handle(2, ev.BatchTrained(0))
    last = core.handle(2, ev.WeightsPublished(1, "e"))
    assert [len(c.groups) for c in last if isinstance(c, cm.Train)] == [1]
    core.handle(3, ev.BatchTrained(1))
    end = core.handle(3, ev.WeightsPublished(2, "f"))
    assert cm.Halt(True, "every prompt is trained, filtered or failed") in end


def test_prompts_that_all_come_to_nothing_are_no_success() -> None:
    core = Orchestrator(Settings(groups_per_step=2, group_size=1))
    core.handle(0, ev.WeightsPublished(0, "d"))
    core.handle(0, ev.InstanceJoined(0, 0, 8, 1000))
    core.handle(0, ev.PromptsAvailable(0, 1, exhausted=True))
    (start,) = core.handle(0, ev.VersionInstalled(0, 0, 0, "d"))
    assert isinstance(start, cm.Start)
    whole = ev.TrajectoryFinished(start.trajectory, start.fence, 1, (Segment(0, "d", 1),))
    core.handle(1, whole)
    core.handle(1, ev.TrajectoryScored(start.trajectory, start.fence))
    end = core.handle(1, ev.GroupJudged(0, "no_signal"))
    assert cm.Halt(False, "every prompt failed or was filtered: no step taken") in end


def test_versions_are_deleted_when_their_last_lease_goes() -> None:
    world = world_of(instances=1, slots=8)
    world.send(ev.VersionPinned(0, "checkpoint"))
    for _ in range(12):
        age(world, 10)
        for name in list(world.engines):
            finish_by_engine(world, name)
        drain(world)
        for version in world.deleted:
            assert all(g.version != version for g in world.core.state.work.groups.values())
    assert 0 not in world.deleted
    assert {1, 2} <= world.deleted
    world.send(ev.VersionUnpinned(0, "checkpoint"))
    assert 0 in world.deleted
    world.send(ev.VersionUnpinned(0, "checkpoint"))  # again: absorbed
    with pytest.raises(RefusedEvent, match="does not exist"):
        world.send(ev.VersionPinned(0, "checkpoint"))
    with pytest.raises(RefusedEvent, match="never published"):
        world.send(ev.VersionUnpinned(99, "checkpoint"))


# Retries and failures


def fail_always(world: Adversary, trajectory: int, rounds: int) -> None:
    for _ in range(rounds):
        if trajectory in running(world):
            act(world, trajectory, "fail")
            drain(world)


def test_a_failed_trajectory_is_retried_on_its_version_from_its_saved_prefix() -> None:
    world = world_of(max_retries=2)
    for _ in range(3):
        act(world, 0, "token")
    for name in sorted(world.engines):
        world.report(name)
    act(world, 0, "fail")
    drain(world)
    starts = [c for c in commands(world, cm.Start) if c.trajectory == 0]
    assert [(s.version, s.prefix_tokens) for s in starts] == [(0, 0), (0, 3)]
    assert starts[0].fence != starts[1].fence


def test_after_its_retries_it_fails_and_the_rest_of_its_group_is_trained() -> None:
    world = world_of(max_retries=1)
    fail_always(world, 0, 2)
    assert world.failed == {0: "broken"}
    assert world.core.state.work.failed == {"broken": 1}
    for name in list(world.engines):
        finish_by_engine(world, name)
    drain(world)
    sizes = {g.group: g.trajectories for t in world.trained for g in t.groups}
    assert sizes[0] == (1,), "the batch records the group's true size"


def test_a_failed_member_can_fail_its_group() -> None:
    world = world_of(max_retries=0, on_failed_member="fail_group")
    fail_always(world, 0, 1)
    assert world.failed == {0: "broken", 1: "sibling failed"}
    assert 1 not in running(world)
    assert 0 not in world.core.state.work.groups


def test_a_group_without_a_survivor_fails() -> None:
    world = world_of(max_retries=0)
    fail_always(world, 0, 1)
    fail_always(world, 1, 1)
    assert 0 not in world.core.state.work.groups
    assert world.core.state.work.failed.total() == 2


def test_a_trajectory_that_can_never_be_generated_is_not_tried_again() -> None:
    world = world_of(max_retries=3)
    act(world, 0, "refuse")
    drain(world)
    assert world.failed[0] == "broken"
    assert len([s for s in commands(world, cm.Start) if s.trajectory == 0]) == 1


def test_scoring_is_retried_without_generating_again() -> None:
    world = world_of(max_retries=1)
    finish(world, 0)
    world.deliver(0)
    score = commands(world, cm.Score)[-1]
    world.send(ev.TrajectoryFailed(0, score.fence, "verifier crashed"))
    again = commands(world, cm.Score)[-1]
    assert again.trajectory == 0
    assert again.fence > score.fence
    world.send(ev.TrajectoryFailed(0, score.fence, "verifier crashed"))  # late: fenced
    assert not world.failed
    world.send(ev.TrajectoryFailed(0, again.fence, "verifier crashed"))
    assert world.failed == {0: "verifier crashed"}
    assert len([s for s in commands(world, cm.Start) if s.trajectory == 0]) == 1


def test_a_score_that_never_comes_is_asked_for_again_and_then_given_up() -> None:
    world = world_of(max_retries=1, score_timeout_s=30.0)
    finish(world, 0)
    world.deliver(0)
    world.pool.clear()
    age(world, 80)
    assert world.failed == {0: "score timeout"}


def test_a_judgement_that_never_comes_fails_the_group() -> None:
    world = world_of(max_retries=1, score_timeout_s=30.0)
    finish(world, 0, 1)
    drain(world, without=(ev.GroupJudged,))
    world.pool.clear()
    age(world, 100)
    assert len(commands(world, cm.Judge)) == 2
    assert world.failed == {0: "judge timeout", 1: "judge timeout"}


def test_an_environment_that_never_ends_times_out() -> None:
    world = world_of(max_retries=0, trajectory_timeout_s=60.0)
    act(world, 0, "pause")
    world.deliver(0)
    for engine in world.engines.values():
        engine.running.pop(0, None)
    age(world, 120)
    assert world.failed[0] == "timeout"
    assert any(c.trajectory == 0 for c in commands(world, cm.Cancel))


def test_filtered_groups_are_counted_and_supplemented() -> None:
    world = world_of(instances=1, slots=4, max_staleness=0)
    finish(world, 0, 1)
    drain(world, without=(ev.GroupJudged,))
    world.pool.clear()
    issued = world.core.state.work.issued
    world.send(ev.GroupJudged(0, "all rewards equal"))
    assert world.core.state.work.filtered == {"all rewards equal": 2}
    assert world.core.state.work.issued == issued + 1
    world.send(ev.GroupJudged(0, "all rewards equal"))  # again: absorbed
    assert world.core.state.work.filtered.total() == 2


def test_a_run_in_which_every_group_comes_to_nothing_halts() -> None:
    world = world_of(instances=1, slots=4, max_staleness=0, groups_per_step=2, max_wasted_batches=2)
    for group in range(4):
        assert world.halted is None
        finish(world, 2 * group, 2 * group + 1)
        drain(world, without=(ev.GroupJudged,))
        world.pool.clear()
        world.send(ev.GroupJudged(group, "all rewards equal"))
        drain(world, without=(ev.GroupJudged,))
    assert world.halted == cm.Halt(
        False,
        "4 consecutive groups failed or were filtered (limit 2 batches); most frequent reason: "
        "all rewards equal",
    )


def test_one_good_group_starts_the_count_anew() -> None:
    world = world_of(instances=1, slots=4, max_staleness=1, groups_per_step=2, max_wasted_batches=1)
    for group, verdict in enumerate(["all rewards equal", None, "all rewards equal"]):
        finish(world, 2 * group, 2 * group + 1)
        drain(world, without=(ev.GroupJudged,))
        world.pool.clear()
        world.send(ev.GroupJudged(group, verdict))
        drain(world, without=(ev.GroupJudged,))
    assert world.halted is None
    assert world.core.state.wasted_groups == 1


# Instances


def test_a_dead_instance_gives_its_work_to_others_on_the_same_version() -> None:
    world = world_of()
    held = sorted(world.engines[0].running)
    world.crash(0)
    drain(world)
    assert world.core.state.counters["instances_lost"] == 1
    waiting = {t: r.version for t, r in world.core.state.work.trajectories.items() if t in held}
    assert set(waiting) == set(held)
    assert set(waiting.values()) == {0}


def test_a_silent_instance_is_expelled_and_its_late_words_are_fenced() -> None:
    world = world_of(heartbeat_timeout_s=30.0)
    zombie = world.engines.pop(0)
    age(world, 40)
    assert any(c.instance == 0 for c in commands(world, cm.Expel))
    before = world.core.state.work.trained
    for trajectory, run in zombie.running.items():
        world.send(ev.TrajectoryFinished(trajectory, run.fence, 1, (Segment(0, digest(0), 1),)))
        check(world.core.state)
    assert world.core.state.counters["absorbed_fenced_trajectory"] >= len(zombie.running) > 0
    world.send(ev.InstanceProgressed(0, 0, 5))
    assert world.core.state.counters["absorbed_fenced_instance"] >= 1
    world.send(ev.InstanceJoined(0, 0, 4, 100))  # the same incarnation does not come back
    assert 0 not in world.core.state.fleet.instances
    world.join(0)
    assert 0 in world.core.state.fleet.instances
    assert world.core.state.work.trained == before


def test_poison_is_named_after_enough_dead_instances() -> None:
    world = world_of(instances=1, max_losses=1)
    for _ in range(2):
        world.crash(0)
        world.join(0)
        drain(world)
    assert set(world.failed.values()) == {"poison"}


def test_a_leaving_instance_is_emptied_by_migration_and_dismissed() -> None:
    world = world_of(instances=3, slots=8, group_size=1, groups_per_step=4, pipeline_depth=4)
    busy = next(n for n, e in world.engines.items() if e.running)
    world.leave(busy)
    drain(world)
    age(world, 20)
    drain(world)
    assert [c.instance for c in commands(world, cm.Dismiss)] == [busy]
    assert world.core.state.migrations.committed > 0
    assert len(running(world)) == 4


def test_a_higher_incarnation_supersedes_a_silent_one() -> None:
    world = world_of()
    world.incarnations[0] += 1
    world.engines[0].incarnation += 1
    world.send(ev.InstanceJoined(0, world.incarnations[0], 4, 1000))
    check(world.core.state)
    assert world.core.state.fleet.instances[0].incarnation == 1
    assert world.core.state.counters["instances_lost"] == 1


def test_a_wrong_install_is_never_served() -> None:
    world = Adversary(Settings())
    world.deliver(0)
    world.join(0)
    world.pool = [e for e in world.pool if not isinstance(e, ev.VersionInstalled)]
    drain(world)
    world.send(ev.VersionInstalled(0, 0, 0, "something else"))
    assert not commands(world, cm.Start)
    assert "wrong weights" in commands(world, cm.Expel)[0].reason


def test_tokens_of_wrong_weights_are_refused_with_their_instance() -> None:
    world = world_of()
    name = next(n for n, e in world.engines.items() if 0 in e.running)
    run = world.engines[name].running[0]
    world.send(ev.TrajectoryFinished(0, run.fence, 2, (Segment(0, "other", 2),)))
    check(world.core.state)
    assert [c.instance for c in commands(world, cm.Expel)] == [name]
    assert world.core.state.work.trajectories[0].state is not TrajectoryState.GENERATED
    assert world.core.state.counters["wrong_weights"] == 1


def test_an_install_that_fails_is_repeated_then_the_instance_given_up() -> None:
    world = Adversary(Settings(max_retries=2))
    world.deliver(0)
    world.join(0)
    for _ in range(3):
        world.pool.clear()
        world.send(ev.InstallFailed(0, 0, 0, "disk"))
    assert len(commands(world, cm.Install)) == 3
    assert commands(world, cm.Expel)[0].reason == "disk"


def test_an_install_that_is_not_answered_is_repeated() -> None:
    world = Adversary(Settings(install_timeout_s=20.0))
    world.deliver(0)
    world.join(0)
    world.pool.clear()
    age(world, 30)
    assert len(commands(world, cm.Install)) == 2


def test_without_any_instance_the_run_halts_in_the_end() -> None:
    world = world_of(instances=1, fleet_timeout_s=100.0)
    world.crash(0)
    age(world, 120, report=False)
    assert world.halted is not None
    assert not world.halted.ok
    assert "no rollout instance" in world.halted.reason


# Trainer and versions


def full_batch(world: Adversary) -> None:
    for name in list(world.engines):
        finish_by_engine(world, name)
    drain(world, without=(ev.BatchTrained, ev.WeightsPublished))


def test_a_failed_step_is_repeated_and_then_halts_the_run() -> None:
    world = world_of(max_train_attempts=2)
    full_batch(world)
    world.pool.clear()
    world.send(ev.BatchFailed(0, "loss is nan"))
    assert len(commands(world, cm.Train)) == 2
    assert commands(world, cm.Train)[0] == commands(world, cm.Train)[1]
    world.send(ev.BatchFailed(0, "loss is nan"))
    assert world.halted == cm.Halt(False, "train step 1 failed 2 times: loss is nan")


def test_a_rejected_batch_fails_and_the_step_is_taken_with_another() -> None:
    world = world_of(max_train_attempts=2)
    full_batch(world)
    world.pool.clear()
    first = commands(world, cm.Train)[0]
    groups = tuple(group.group for group in first.groups)
    world.send(ev.BatchRejected(0, (*groups, 99), "loss is nan"))  # speaks of another batch
    assert not commands(world, cm.Fail)
    world.send(ev.BatchRejected(0, groups, "loss is nan"))
    members = sorted(name for group in first.groups for name in group.trajectories)
    assert sorted(fail.trajectory for fail in commands(world, cm.Fail)) == members
    full_batch(world)
    world.pool.clear()
    second = commands(world, cm.Train)[-1]
    assert second.step == 0
    assert not set(groups) & {group.group for group in second.groups}
    world.send(ev.BatchRejected(0, tuple(g.group for g in second.groups), "loss is nan"))
    assert world.halted == cm.Halt(False, "train step 1 rejected 2 batches in a row: loss is nan")


@pytest.mark.parametrize(
    "late", [lambda groups: ev.BatchRejected(0, groups, "nan"), lambda _: ev.BatchFailed(0, "late")]
)
def test_what_another_attempt_says_of_a_rejected_batch_is_late(
    late: Callable[[tuple[int, ...]], ev.Event],
) -> None:
    world = world_of(max_train_attempts=2)
    full_batch(world)
    world.pool.clear()
    groups = tuple(group.group for group in commands(world, cm.Train)[0].groups)
    world.send(ev.BatchRejected(0, groups, "loss is nan"))
    failed, asked = len(commands(world, cm.Fail)), len(commands(world, cm.Train))
    world.send(late(groups))
    assert (len(commands(world, cm.Fail)), len(commands(world, cm.Train))) == (failed, asked)
    assert world.halted is None


def test_a_trainer_that_does_not_answer_is_asked_again() -> None:
    world = world_of(train_timeout_s=50.0, max_train_attempts=2)
    full_batch(world)
    world.pool.clear()
    age(world, 60)
    assert len(commands(world, cm.Train)) == 2
    age(world, 60)
    assert world.halted is not None
    assert "no answer for 50 s" in world.halted.reason


def test_a_failed_publication_is_repeated_and_then_halts_the_run() -> None:
    world = world_of(max_publish_attempts=2, publish_timeout_s=40.0)
    full_batch(world)
    world.send(ev.BatchTrained(0))
    world.pool.clear()
    world.send(ev.PublicationFailed(1, "disk full"))
    assert len(commands(world, cm.Publish)) == 2
    age(world, 60)
    assert world.halted is not None
    assert "no answer" in world.halted.reason


def test_prompts_that_never_come_halt_the_run() -> None:
    world = Adversary(Settings(prompt_timeout_s=20.0, max_retries=1))
    world.deliver(0)
    world.join(0)
    drain(world, without=(ev.PromptsAvailable,))
    world.pool.clear()
    age(world, 60)
    assert world.halted is not None
    assert "prompt 0 was asked for 2 times" in world.halted.reason


def test_the_trainer_waits_for_a_deadline_and_counts_the_wait() -> None:
    world = world_of(
        instances=2, slots=2, groups_per_step=1, group_size=1, max_staleness=1, turn_s=1e6
    )
    slow = running(world)[0]
    for _ in range(40):
        others = [t for t in running(world) if t != slow]
        if others:
            finish(world, others[0])
        drain(world)
        age(world, 5)
    trainer = world.core.state.trainer
    assert trainer.stalls == 1
    assert trainer.step == 1, "step 0 took another group; step 1 is the slow one's deadline"
    finish(world, slow)
    drain(world)
    assert world.core.state.trainer.stalled_s > 0
    assert all(t.step - g.version <= 1 for t in world.trained for g in t.groups)


def test_rollout_continues_while_a_batch_waits_for_a_deadline() -> None:
    """As far as the bound admits: the slots would idle, and the trainer has to catch up."""
    world = world_of(
        instances=3, slots=1, groups_per_step=2, group_size=1, max_staleness=2, turn_s=1e6
    )
    state, slow = world.core.state, running(world)[0]
    while state.trainer.stalled_since is None:
        finish(world, next(t for t in running(world) if t != slow))
        drain(world)
        age(world, 5)
    issued = state.work.issued
    for _ in range(20):
        for other in [t for t in running(world) if t != slow]:
            finish(world, other)
        drain(world)
        age(world, 10)
    assert state.trainer.stalled_since is not None
    assert state.work.issued > issued
    assert state.work.num_ready > state.settings.groups_per_step


# Sharing, turns, migration


def test_more_versions_than_places_take_turns_by_parking() -> None:
    world = world_of(
        instances=1, slots=2, groups_per_step=1, group_size=1, max_staleness=3, turn_s=20.0
    )
    slow = running(world)[0]
    for _ in range(30):
        others = [t for t in running(world) if t != slow]
        if others:
            finish(world, others[0])
        drain(world)
        age(world, 10)
        drain(world)
    assert commands(world, cm.Park)
    assert commands(world, cm.Unpark)
    assert slow in running(world) or slow in world.engines[0].parked
    assert world.core.state.trainer.step >= 2


def test_several_versions_share_an_instance_where_there_is_room() -> None:
    world = world_of(
        instances=1, slots=4, groups_per_step=1, group_size=1, max_staleness=3, version_slots=3
    )
    slow = running(world)[0]
    seen = 0
    for _ in range(12):
        others = [t for t in running(world) if t != slow]
        if others:
            finish(world, others[0])
        drain(world)
        age(world, 10)
        drain(world)
        seen = max(seen, len(world.engines[0].versions))
    assert seen >= 2
    assert not commands(world, cm.Park)
    assert slow in running(world)


def test_kv_pressure_moves_the_longest_away() -> None:
    world = world_of(instances=2, slots=4, group_size=1, groups_per_step=4, pipeline_depth=4)
    source = next(n for n, e in world.engines.items() if e.running)
    longest = sorted(world.engines[source].running)[-1]
    for _ in range(5):
        act(world, longest, "token")
    world.send(
        ev.InstanceProgressed(
            source,
            0,
            9_900,
            tuple(
                Length(t, r.fence, 5_000 if t == longest else 10)
                for t, r in world.engines[source].running.items()
            ),
        )
    )
    moved = [m.trajectory for c in commands(world, cm.Reserve) for m in c.moves]
    assert moved == [longest]
    assert world.core.state.fleet.instances[source].pressured
    world.report(source, 0)
    assert not world.core.state.fleet.instances[source].pressured


def test_a_migration_that_fails_leaves_its_members_where_they_were() -> None:
    world = world_of(instances=3, slots=8, group_size=1, groups_per_step=4, pipeline_depth=4)
    busy = next(n for n, e in world.engines.items() if e.running)
    held = sorted(world.engines[busy].running)
    world.leave(busy)
    reserve = commands(world, cm.Reserve)[0]
    world.pool.clear()
    world.send(ev.MigrationFailed(reserve.migration, "no route"))
    check(world.core.state)
    assert sorted(world.engines[busy].running) == held
    assert world.core.state.migrations.undone >= 1
    world.send(ev.MigrationReserved(reserve.migration))  # late: absorbed
    world.send(ev.MigrationCompleted(reserve.migration, ()))
    check(world.core.state)


def test_a_migration_that_is_not_answered_is_undone() -> None:
    world = world_of(
        instances=3, slots=8, group_size=1, groups_per_step=4, pipeline_depth=4,
        migration_timeout_s=15.0,
    )  # fmt: skip
    busy = next(n for n, e in world.engines.items() if e.running)
    world.leave(busy)
    world.pool.clear()
    age(world, 20)
    assert commands(world, cm.AbortMigration)


def test_a_finish_at_the_target_may_overtake_the_commit() -> None:
    world = world_of(instances=3, slots=8, group_size=1, groups_per_step=4, pipeline_depth=4)
    busy = next(n for n, e in world.engines.items() if e.running)
    world.leave(busy)
    reserve = commands(world, cm.Reserve)[0]
    drain(world, without=(ev.MigrationCompleted,))
    move = reserve.moves[0]
    world.send(
        ev.TrajectoryFinished(move.trajectory, move.new_fence, 1, (Segment(0, digest(0), 1),))
    )
    check(world.core.state)
    assert commands(world, cm.Score)[-1] == cm.Score(move.trajectory, move.new_fence)
    drain(world)
    assert all(
        c.trajectory != move.trajectory or c.fence == move.new_fence
        for c in commands(world, cm.Score)
    )


# Paradigms


@pytest.mark.parametrize("paradigm", ["partial", "in_flight"])
def test_switching_paradigms_carry_running_work_to_the_new_version(paradigm: str) -> None:
    world = world_of(paradigm=paradigm, instances=2, slots=4, groups_per_step=1, group_size=1)
    slow = running(world)[0]
    others = [t for t in running(world) if t != slow]
    for _ in range(3):
        act(world, slow, "token")
    for other in others[:2]:
        finish(world, other)
    drain(world)
    assert any(c.carry for c in commands(world, cm.Install))
    assert world.core.state.work.trajectories[slow].version > 0
    suspended = bool(commands(world, cm.Suspend))
    assert suspended == (paradigm == "partial")
    assert len(commands(world, cm.Resume)) == len(commands(world, cm.Suspend))
    finish(world, slow)
    drain(world)
    finished = [e for _, e, _ in world.log if isinstance(e, ev.TrajectoryFinished)]
    assert len(next(e for e in finished if e.trajectory == slow).segments) > 1


def schedule(paradigm: str, staleness: int) -> list[str]:
    """Every command of a run whose world answers by a fixed rule."""
    world = Adversary(
        Settings(
            paradigm=paradigm, max_staleness=staleness, groups_per_step=3, group_size=2, max_steps=6
        )
    )
    for name in range(3):
        world.join(name, slots=3)
    turn = 0
    while not world.halted:
        turn += 1
        world.deliver(turn * 7919)
        world.generate(turn * 104_729, "finish")
        if turn % 50 == 0:
            world.advance(5.0)
            for name in sorted(world.engines):
                world.report(name)
        check(world.core.state)
    return [f"{now} {command}" for now, _, answers in world.log for command in answers]


def test_multi_version_with_k_0_is_sync() -> None:
    assert schedule("multi_version", 0) == schedule("sync", 3)
    assert schedule("multi_version", 1) != schedule("sync", 3)


# Refusals


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (ev.PromptsAvailable(999, 4), "were skipped"),
        (ev.PromptsAvailable(-1, 4), "not negative"),
        (ev.InstanceJoined(9, 0, 0, 10), "needs slots"),
        (ev.InstanceProgressed(0, 0, -5), "not negative"),
        (ev.VersionInstalled(0, 0, 7, "x"), "never published"),
        (ev.TrajectoryFinished(0, 1, 5, ()), "do not add up"),
        (ev.TrajectoryFinished(0, 1, 5, (Segment(0, "x", 4),)), "do not add up"),
        (ev.TrajectoryFinished(0, 1, 5, (Segment(3, "x", 5),)), "never published"),
        (ev.TrajectoryFinished(10_000, 1, 0, (Segment(0, "x", 0),)), "never issued"),
        (ev.TrajectoryFailed(0, 10_000, "x"), "never given out"),
        (ev.TrajectoryRefused(0, 10_000, "x"), "never given out"),
        (ev.TrajectoryScored(0, 1), "before the trajectory was whole"),
        (ev.GroupJudged(9_999), "never issued"),
        (ev.GroupJudged(0), "no judgement was asked for"),
        (ev.MigrationReserved(55), "never begun"),
        (ev.BatchTrained(0), "not being trained"),
        (ev.BatchTrained(4), "not being trained"),
        (ev.WeightsPublished(5, "x"), "not being published"),
        (ev.PublicationFailed(5, "x"), "not being published"),
    ],
)
def test_nonsense_is_refused_by_name_and_changes_nothing(event: ev.Event, why: str) -> None:
    world = world_of()
    before = dumps(world.core.snapshot())
    with pytest.raises(RefusedEvent, match=why) as refusal:
        world.core.handle(world.now + 5, event)
    assert type(event).__name__ in str(refusal.value)
    assert dumps(world.core.snapshot()) == before


def test_what_is_no_event_is_refused() -> None:
    with pytest.raises(RefusedEvent, match="not an event"):
        Orchestrator(Settings()).handle(0.0, "hello")  # type: ignore[arg-type]


def test_prompts_nobody_asked_for_are_refused() -> None:
    core = Orchestrator(Settings())
    with pytest.raises(RefusedEvent, match="no prompts were asked for"):
        core.handle(0.0, ev.PromptsAvailable(0, 4))


def test_an_illegal_transition_raises_and_changes_nothing() -> None:
    with pytest.raises(IllegalTransition, match="cannot go from `trained` to `running`"):
        check_move(
            TRAJECTORY_MOVES, TrajectoryState.TRAINED, TrajectoryState.RUNNING, "trajectory 1"
        )


def test_time_does_not_run_backwards() -> None:
    world = world_of()
    world.now = 100.0
    world.report(0)
    world.now = 50.0
    world.report(0)
    assert world.core.state.now == 100.0


def test_a_run_that_no_instance_ever_joins_halts() -> None:
    world = Adversary(Settings(fleet_timeout_s=100.0))
    world.deliver(0)
    age(world, 120)
    assert world.halted is not None
    assert "no rollout instance" in world.halted.reason


@pytest.mark.parametrize("paradigm", ["in_flight", "multi_version"])
def test_tokens_of_unknown_weights_are_refused_by_every_paradigm(paradigm: str) -> None:
    world = world_of(paradigm=paradigm)
    run = next(e.running[0] for e in world.engines.values() if 0 in e.running)
    world.send(ev.TrajectoryFinished(0, run.fence, 2, (Segment(0, "lie", 2),)))
    check(world.core.state)
    assert not commands(world, cm.Score)
    assert commands(world, cm.Expel)


# What only the speaker's own work may be


def test_an_instance_cannot_park_nor_report_what_runs_elsewhere() -> None:
    world = world_of(
        instances=2, slots=2, groups_per_step=2, group_size=1, max_staleness=3, turn_s=20.0
    )
    state = world.core.state
    for _ in range(40):
        drain(world, without=(ev.TrajectoriesParked,))
        parking = [i for i in state.fleet.instances.values() if i.parking]
        elsewhere = [
            t
            for t in state.work.trajectories.values()
            if parking and t.instance not in (None, parking[0].id)
        ]
        if elsewhere:
            break
        others = [t for t in running(world) if t > 1]
        if others:
            finish(world, others[0])
        age(world, 10)
    else:
        pytest.fail("no instance was ever parking while another ran something")
    victim = elsewhere[0]
    placement = Placement(victim.id, victim.fence)
    world.send(ev.TrajectoriesParked(parking[0].id, parking[0].incarnation, (placement,)))
    assert victim.state is TrajectoryState.RUNNING
    check(state)


def test_a_report_counts_only_for_the_instance_that_runs_the_trajectory() -> None:
    world = world_of(group_size=1, groups_per_step=4)
    host, trajectory = next((n, t) for n, e in world.engines.items() for t in e.running)
    fence = world.engines[host].running[trajectory].fence
    other = next(n for n in world.engines if n != host)
    foreign = (Length(trajectory, fence, 999),)
    world.send(ev.InstanceProgressed(other, 0, 0, foreign, foreign))
    record = world.core.state.work.trajectories[trajectory]
    assert (record.tokens, record.saved) == (0, 0)
    own = (Length(trajectory, fence, 7),)
    world.send(ev.InstanceProgressed(host, 0, 0, own, own))
    assert (record.tokens, record.saved) == (7, 7)
    with pytest.raises(RefusedEvent, match="fewer than 0 tokens"):
        world.send(ev.InstanceProgressed(host, 0, 0, (Length(trajectory, fence, -1),)))


def test_a_fleet_that_only_leaves_ends_the_run() -> None:
    world = world_of(instances=1, fleet_timeout_s=100.0)
    world.leave(0)
    age(world, 150)
    assert world.halted is not None
    assert "no rollout instance" in world.halted.reason


def test_work_waits_out_the_pressure_of_its_only_host() -> None:
    world = world_of(instances=1, slots=8, group_size=1, groups_per_step=2, pipeline_depth=4)
    world.report(0, 9_900)
    busy = running(world)
    finish(world, busy[0], busy[1])
    drain(world)
    assert running(world) == busy[2:]
    assert world.core.state.work.num_waiting > 0
    world.report(0, 0)
    assert len(running(world)) > len(busy[2:])


@pytest.mark.parametrize("version_slots", [2, 4])
def test_versions_without_work_are_let_go_where_instances_are_shared(version_slots: int) -> None:
    world = world_of(instances=2, slots=4, max_staleness=0, version_slots=version_slots)
    for _ in range(10):
        for name in list(world.engines):
            finish_by_engine(world, name)
        drain(world)
        age(world, 15)
        drain(world)
    assert world.core.state.trainer.step > 4
    assert len(world.core.state.versions.live) <= 2


def test_parked_work_comes_back_with_its_version() -> None:
    world = world_of(
        instances=1, slots=2, groups_per_step=1, group_size=1, max_staleness=3, turn_s=20.0
    )
    slow = running(world)[0]
    for _ in range(30):
        others = [t for t in running(world) if t != slow]
        if others:
            finish(world, others[0])
        drain(world)
        age(world, 10)
    unparking = [
        event for _, event, answers in world.log if any(isinstance(c, cm.Unpark) for c in answers)
    ]
    assert unparking
    assert all(isinstance(event, ev.VersionInstalled) for event in unparking)


def test_nothing_is_decided_after_a_halt() -> None:
    world = world_of(max_train_attempts=1)
    full_batch(world)
    last = world.send(ev.BatchFailed(0, "broken"))
    assert [type(c) for c in last] == [cm.Halt]
    assert world.core.handle(world.now + 1e6, ev.TimerFired()) == []
